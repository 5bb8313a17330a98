"""Decode steps on a CPU without Python between the kernels: what a CUDA graph is on a GPU.

A layer is seven kernel calls of 50 to 600 us. Python needs 20 to 40 us for each, since the weights that went through
the caches meanwhile have thrown its own data out of them: a fifth of a step at batch 1. So the calls of a decode step
are noted once, for any batch size, and one function makes them. What comes before and after the layers, inputs and
sampler, would cost as much in torch's or numpy's operators: it is kernels, too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nanoinfer.attention.base import AttentionBackend, ForwardBatch, KVCache
from nanoinfer.attention.cpu import CPUAttention, CPUPlan, Decodes, most_parts
from nanoinfer.config import ModelConfig, SchedulerConfig
from nanoinfer.kernels.cpu.inputs import DecodeColumns, DecodeInputs
from nanoinfer.kernels.cpu.memory import Workspace
from nanoinfer.kernels.cpu.ops import CPUKernels, kernels_for
from nanoinfer.kernels.cpu.recording import Recording
from nanoinfer.layers.linear import ParallelLinear
from nanoinfer.layers.sampler import SEGMENT, checked
from nanoinfer.models.qwen3 import Qwen3ForCausalLM

logger = logging.getLogger(__name__)


def make_workspace(config: ModelConfig, dtype: torch.dtype, limits: SchedulerConfig) -> Workspace:
    """For steps of any kind: what is computed in a layer is not read after the same place in the next one."""
    heads, kv_heads, head_dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    widths = [(heads + 2 * kv_heads) * head_dim, config.intermediate_size, config.hidden_size]
    width = sum(widths) + 2 * heads * head_dim + 3 * config.hidden_size
    # Attention leaves float32 for each part of a context. Recordings have up to three parts for each sequence.
    parts_bytes = 4 * heads * (head_dim + 2) * most_parts(3 * max(2, limits.max_num_seqs))
    num_tokens = max(limits.max_num_batched_tokens, limits.max_num_seqs, 2)
    largest = max(num_tokens * max(widths) * dtype.itemsize, parts_bytes)
    # Up to 63 bytes of each result are left unused for alignment.
    return Workspace(num_tokens * width * dtype.itemsize + parts_bytes + 10 * 64, largest)


def make_logits_memory(config: ModelConfig, dtype: torch.dtype, limits: SchedulerConfig) -> Workspace:
    """For a step's logits and what sampling makes of them, beginning at the front in each step.

    Of its own, since what logits are computed from must outlive them: prompt log-probabilities need it again. What is
    not used of it is not mapped.
    """
    rows = max(2, limits.max_num_seqs)
    beside = rows * (8 * (config.vocab_size // SEGMENT + 1) + 16) + 4 * 64
    return Workspace(beside, rows * config.vocab_size * dtype.itemsize)


class NotReplayable(Exception):
    """Why a step cannot be replayed."""


def make_replay(
    model: Qwen3ForCausalLM,
    backend: AttentionBackend,
    kv_cache: KVCache,
    workspace: Workspace,
    logits_memory: Workspace,
    limits: SchedulerConfig,
) -> DecodeReplay | None:
    """None if a decode step of this model is more than calls of kernels; said in the log where that is a surprise."""
    kernels = kernels_for(model.model.norm.weight.dtype, "cpu")
    methods = [module.method for module in model.modules() if isinstance(module, ParallelLinear)]
    is_packed = all(method.is_packed for method in [*methods, model.lm_head.method])
    if kernels is None or not isinstance(backend, CPUAttention) or not backend.can_replay or not is_packed:
        return None
    try:
        return DecodeReplay(model, kernels, backend, kv_cache, workspace, logits_memory, limits)
    except NotReplayable as reason:
        logger.warning("decode steps run with Python between the kernels: %s", reason)
        return None


class DecodeReplay:
    """Runs steps in which each sequence computes its last token.

    `load(...)`, then `tokens()` if all are sampled by temperature alone, else `hidden()`, which is valid until the
    workspace is used again.
    """

    def __init__(
        self,
        model: Qwen3ForCausalLM,
        kernels: CPUKernels,
        backend: CPUAttention,
        kv_cache: KVCache,
        workspace: Workspace,
        logits_memory: Workspace,
        limits: SchedulerConfig,
    ) -> None:
        """Raises NotReplayable where a step is more than calls of kernels."""
        self._model, self._kernels, self._backend, self._kv_cache = model, kernels, backend, kv_cache
        self._workspace = workspace
        config = model.config
        # Two recordings differ in the number of rows.
        self._most = most = max(2, limits.max_num_seqs)
        dtype, half = model.model.norm.weight.dtype, config.head_dim // 2
        self._hidden = torch.zeros(most, config.hidden_size, dtype=dtype)
        self._cos, self._sin = torch.zeros(2, most, half, dtype=dtype)
        self._inputs = DecodeInputs.zeros(most, -(-limits.max_model_len // limits.block_size))
        self._rows = torch.zeros(most, dtype=torch.int64)
        self._order = torch.arange(most + 1)
        self._starts = self._order.int()
        self.num_seqs, self._splits = 0, 1
        self._layers = self._record(self._run_layers, workspace)
        self._sampler = self._record(lambda n, _: self._sample(self._layers.output[:n]), logits_memory)
        self._check(min(limits.max_model_len, limits.num_blocks * limits.block_size))

    def load(self, rows: np.ndarray, columns: DecodeColumns, longest: int) -> None:
        """The step's inputs. rows: [n] int64, of the columns; longest: most tokens of one, the step's own included."""
        self.num_seqs, self._splits = len(rows), self._backend.splits(len(rows), longest)
        mine = self._rows[: len(rows)]
        mine.numpy()[:] = rows
        self._kernels.decode_inputs(mine, columns, self._kv_cache.block_size, self._inputs)

    def hidden(self) -> torch.Tensor:
        """Hidden states, [n, hidden_size]; keys and values are stored."""
        self._kernels.run(self._layers.calls_for(self.num_seqs, self._splits))
        return self._layers.output[: self.num_seqs]

    def tokens(self) -> list[int]:
        """The sampled tokens. Raises FloatingPointError as the sampler does."""
        self.hidden()
        return checked(self._sampled())

    def _sampled(self) -> list[int]:
        self._kernels.run(self._sampler.calls_for(self.num_seqs, 1))
        return self._sampler.output[: self.num_seqs].tolist()

    def _run_layers(self, n: int, splits: int) -> torch.Tensor:
        inputs, decoder = self._inputs.first(n), self._model.model
        decodes = Decodes(self._order[:n], inputs.block_tables, inputs.seq_lens, splits)
        batch = ForwardBatch(
            input_ids=inputs.input_ids,
            positions=inputs.positions,
            query_start_loc=self._starts[: n + 1],
            seq_lens=inputs.seq_lens,
            block_tables=inputs.block_tables,
            slot_mapping=inputs.slots,
            logits_indices=decodes.rows,
            max_query_len=1,
            max_seq_len=inputs.block_tables.shape[1] * self._kv_cache.block_size,
            plan=CPUPlan(decodes, None, [], []),
        )
        hidden, rotation = self._hidden[:n], (self._cos[:n], self._sin[:n])
        self._kernels.gather_rows(decoder.embed_tokens.weight, inputs.input_ids, hidden)
        decoder.rotary(inputs.positions, rotation)
        return decoder.run_layers(hidden, rotation, batch, self._kv_cache)

    def _sample(self, hidden: torch.Tensor) -> torch.Tensor:
        inputs = self._inputs.first(len(hidden))
        logits = self._model.compute_logits(hidden, None)
        return self._kernels.choose(logits, inputs.inverse_temperature, inputs.uniforms, SEGMENT)

    def _record(self, run: Callable[[int, int], torch.Tensor], workspace: Workspace) -> _Program:
        """run: of so many rows, and parts of each context."""
        most, parts = self._most, -(-most_parts(self._most) // self._most)  # memory for the most parts is handed out
        sizes = [(most, parts), (most - 1, parts), (most, parts + 1)]
        recordings, outputs = [], []
        for n, splits in sizes:
            recording, views = Recording(), _ViewsOnly()
            workspace.restart()
            with self._kernels.using(workspace, recording), views:
                outputs.append(run(n, splits))
            if views.others:
                raise NotReplayable(f"this model's layers compute with {', '.join(sorted(views.others))}, too")
            recordings.append(recording)
        base, fewer, more = recordings
        try:
            return _Program(base.calls(), most, parts, fewer.growth_to(base), base.growth_to(more), outputs[0])
        except ValueError as error:
            raise NotReplayable(str(error)) from error

    def _check(self, num_tokens: int) -> None:
        """Whether the programs do what the model does, over a cache of so many tokens that nothing is in yet.

        Models are of one kind throughout: what holds for one batch size does for the others.
        """
        longest = min(num_tokens, 200)
        # Two rows with a slot each, if there are two.
        n = min(2, longest)
        computed, width = longest - 1 - np.arange(n), self._inputs.block_tables.shape[1]
        tables = np.zeros((n, width), np.int32)
        tables[:, : -(-longest // self._kv_cache.block_size)] = range(-(-longest // self._kv_cache.block_size))
        none, seeds, temperature = np.zeros(n, np.int64), np.ones(n, np.uint64), np.arange(n, dtype=np.float64)
        last_token = np.arange(n) % self._model.config.vocab_size
        columns = DecodeColumns(last_token, computed, computed + 1, none, tables, seeds, temperature)
        self.load(np.arange(n), columns, longest)
        hidden = self._run_layers(n, self._splits).clone()
        token_ids = self._sample(hidden).tolist()
        # Results that don't live long enough become NaN.
        self._workspace.memory.fill_(0xFF)
        # Bits, since a broken model's NaN equal nothing; it is told of when it is used.
        if not torch.equal(self.hidden().view(torch.int16), hidden.view(torch.int16)) or self._sampled() != token_ids:
            raise NotReplayable("made on their own, these gave another result")


class _Program:
    """Calls as they were recorded for n rows and a number of parts, and how they change with one row or part more."""

    def __init__(
        self,
        calls: np.ndarray,
        n: int,
        parts: int,
        per_row: np.ndarray,
        per_part: np.ndarray,
        output: torch.Tensor,
    ) -> None:
        self._calls, self._sizes = calls, (n, parts)
        self._per_row, self._per_part = per_row, per_part
        self.output = output

    def calls_for(self, n: int, parts: int) -> np.ndarray:
        if (n, parts) != self._sizes:
            arguments = self._calls["arguments"]
            arguments += (n - self._sizes[0]) * self._per_row + (parts - self._sizes[1]) * self._per_part
            self._sizes = n, parts
        return self._calls


class _ViewsOnly(TorchDispatchMode):
    """Notes the torch operators that do more than look at memory in another way."""

    def __init__(self) -> None:
        super().__init__()
        self.others: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if not func.is_view:
            self.others.add(str(func))
        return func(*args, **(kwargs or {}))
