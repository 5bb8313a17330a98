"""What crosses between the engine and its ranks, once each way per step. Plain data: any codec can carry it.

The engine sends deltas: a rank keeps a row per sequence (tokens, block table, sampling state) and is never told again
what it already knows. Order of effects on a rank: `forget_all`, `dropped`, `new`, `new_block_ids`, then the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from nanoinfer.sampling_params import SamplingParams


def token_bitmask(token_ids: Sequence[int], vocab_size: int) -> np.ndarray:
    """[ceil(vocab_size / 32)] int32: bit i % 32 of word i // 32 is set for each of the ids."""
    bits = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    bits[list(token_ids)] = 1
    return np.packbits(bits, bitorder="little").view("<i4")


@dataclass(frozen=True)
class NewSequence:
    """A sequence that a rank does not know: newly admitted, or resumed after preemption (then with output tokens).

    seed: what the draws of this sequence depend on, beside the output index; an unsigned 64-bit integer.
    stop_token_ids: every id that would end it, for `min_tokens`.
    prompt_logprobs: how many best tokens to report beside each prompt token; None where it is not asked for, or known.
    bad_words: as token ids.
    """

    seq_id: int
    token_ids: list[int]
    num_prompt_tokens: int
    num_computed_tokens: int
    block_ids: list[int]
    params: SamplingParams
    seed: int
    stop_token_ids: tuple[int, ...]
    prompt_logprobs: int | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class SchedulerOutput:
    """The plan of one step. A sequence samples in it if the step computes the last of its known tokens.

    num_scheduled_tokens: sequence id to the number of tokens to compute; its order is the order of the batch.
    new_block_ids: blocks appended to the tables of sequences that the ranks already know.
    dropped: sequences that finished, were aborted or preempted since the last plan; unknown ids are not an error.
    forget_all: the ranks drop every row first (set after a step that failed, when what they know is uncertain).
    bitmasks: which tokens may be sampled, by sequence id; [ceil(vocab_size / 32)] int32, a set bit allows.
    """

    new: list[NewSequence] = field(default_factory=list)
    num_scheduled_tokens: dict[int, int] = field(default_factory=dict)
    new_block_ids: dict[int, list[int]] = field(default_factory=dict)
    dropped: list[int] = field(default_factory=list)
    forget_all: bool = False
    bitmasks: dict[int, np.ndarray] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        return sum(self.num_scheduled_tokens.values())


@dataclass(frozen=True)
class TokenLogprobs:
    """Raw log-probabilities at one position: the chosen token's first, then the best ones, best first."""

    token_ids: list[int]
    logprobs: list[float]
    ranks: list[int]


@dataclass(frozen=True)
class StepResult:
    """Per sequence that sampled: its new token ids (one today; several when speculating), logprobs where asked.

    prompt_logprobs: where asked, of the prompt tokens that follow the tokens that this step computed.
    """

    token_ids: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)


@dataclass(frozen=True)
class KVCacheCapacity:
    """What one rank reports at start-up, before the pool is allocated.

    num_blocks: as many as fit; block_size: tokens per block; bytes_per_block: keys and values of all layers.
    max_num_batched_tokens: the token budget of a step that suits the device. num_threads: of the rank, on the CPU.
    """

    num_blocks: int
    block_size: int
    bytes_per_block: int
    max_num_batched_tokens: int
    device: str
    dtype: str
    num_threads: int = 1


@dataclass(frozen=True)
class StepStats:
    """What one step did, for progress bars and benchmarks. Times in seconds.

    num_prefill_tokens: tokens of sequences that still had prompt (or recomputed) tokens to compute.
    num_decode_tokens: sequences that computed just their last sampled token.
    num_sampled: rows that went through the head and the sampler.
    num_context_tokens: KV entries that attention had to read: the sum over the batch of the length after the step.
    num_attention_pairs: query-key pairs of the prefill part.
    seconds: from when the step before it had been dealt with (or its own planning began, if that was later) until it
        was itself. execute_seconds: what was spent in sending it and in waiting for its result; the rest of a step is
        the engine's own work, which goes on while the step before runs where steps overlap.
    """

    num_prefill_tokens: int
    num_decode_tokens: int
    num_sampled: int
    num_context_tokens: int
    num_attention_pairs: int
    num_running: int
    num_waiting: int
    num_preemptions: int
    seconds: float
    execute_seconds: float
