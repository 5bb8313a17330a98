"""`Sequence`: one completion of a request as the scheduler sees it. Created by the input processor, owned by the
scheduler.

A sequence has no prefill or decode phase: it has tokens, of which the first `num_computed_tokens` have their keys and
values in the KV pool and `num_inflight_tokens` more are being computed by steps that have not come back. These steps
sample `num_output_placeholders` tokens, whose ids nobody but the ranks knows yet; the next step may compute them all
the same.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from time import monotonic

from nanoinfer.engine.block_manager import CachedPrefix
from nanoinfer.sampling_params import Grammar, SamplingParams
from nanoinfer.step import TokenLogprobs


class SequenceStatus(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class FinishReason(str, Enum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(eq=False)
class Sequence:
    """One completion of a request.

    stop_token_ids: every id that ends it, the model's end-of-sequence ids included unless they are ignored.
    max_tokens: the request's, capped so that prompt and output fit `max_model_len`.
    cache_key: opaque; sequences share cached blocks only under equal keys.
    prefix: the chain of full blocks of this sequence that the prefix index knows.
    index: of the completion in its request. leader: the request's first sequence, for all others; their prompt's full
        blocks come from it.
    bad_words: as token ids.
    error: what its grammar raised.
    """

    seq_id: int
    token_ids: list[int]
    params: SamplingParams
    seed: int
    max_tokens: int
    eos_token_ids: frozenset[int] = frozenset()
    cache_key: bytes = b""
    index: int = 0
    leader: Sequence | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    grammar: Grammar | None = None

    num_prompt_tokens: int = field(init=False)
    status: SequenceStatus = SequenceStatus.WAITING
    block_table: list[int] = field(default_factory=list)
    prefix: CachedPrefix = field(default_factory=CachedPrefix)
    num_computed_tokens: int = 0
    num_inflight_tokens: int = 0
    num_output_placeholders: int = 0
    # Prompt tokens found in the prefix cache at first admission; None before it.
    num_cached_tokens: int | None = None
    num_preemptions: int = 0
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    # Its last token is what ended it, and so no part of the text.
    is_ended_by_token: bool = False
    # Output tokens that the grammar has been told; negative while it is told more.
    num_accepted_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    error: BaseException | None = None
    arrival_time: float = field(default_factory=monotonic)
    first_scheduled_time: float | None = None

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        ids = set(self.params.stop_token_ids)
        if not self.params.ignore_eos:
            ids |= self.eos_token_ids
        return tuple(sorted(ids))

    @property
    def lacks_prompt_logprobs(self) -> bool:
        """One sequence of a request is enough to tell them."""
        if self.params.prompt_logprobs is None or self.leader is not None:
            return False
        return len(self.prompt_logprobs) < self.num_prompt_tokens - 1

    @property
    def is_finished(self) -> bool:
        return self.status is SequenceStatus.FINISHED

    def finish(self, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        self.status = SequenceStatus.FINISHED
        self.finish_reason = reason
        self.stop_reason = stop_reason

    def repair(self) -> None:
        """After an update that may have been cut short anywhere: a token counts only with all that belongs to it.

        A token that is dropped here is sampled again, and comes out the same.
        """
        if self.params.logprobs is not None:
            complete = min(self.num_output_tokens, len(self.logprobs))
            del self.token_ids[self.num_prompt_tokens + complete :]
            del self.logprobs[complete:]
        if self.num_output_tokens and not self.is_finished:
            self.check_stop()

    def advance_grammar(self) -> bool:
        """Tells the grammar the tokens that it does not know, and asks whether it is over.

        Raises what it raises, ValueError if it takes them not. A call that was interrupted half-way (Ctrl-C) leaves it
        uncertain what the grammar knows, so the next one raises.
        """
        assert self.grammar is not None
        known, total = self.num_accepted_tokens, self.num_output_tokens
        if known < 0:
            raise RuntimeError("the grammar was interrupted")
        if known < total:
            self.num_accepted_tokens = -1
            new = self.token_ids[self.num_prompt_tokens + known :]
            if not self.grammar.accept(new):
                raise ValueError(f"the grammar does not accept the tokens {new} after {known} others")
            self.num_accepted_tokens = total
        return bool(self.grammar.is_terminated)

    def check_stop(self) -> None:
        """Finishes the sequence if its newest token ends it. Stop strings are the output processor's business."""
        token_id = self.token_ids[-1]
        if self.num_output_tokens >= self.params.min_tokens:
            if token_id in self.eos_token_ids and not self.params.ignore_eos:
                self.is_ended_by_token = True
                return self.finish(FinishReason.STOP)
            if token_id in self.params.stop_token_ids:
                self.is_ended_by_token = True
                return self.finish(FinishReason.STOP, token_id)
        if self.num_output_tokens >= self.max_tokens:
            self.finish(FinishReason.LENGTH)
