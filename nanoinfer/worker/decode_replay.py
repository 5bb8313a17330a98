"""Decode steps on a CPU without Python between the kernels: what a CUDA graph is on a GPU.

A layer is seven kernel calls of 50 to 600 us. Python needs 20 to 40 us for each, since the weights that went through
the caches meanwhile have thrown its own data out of them: a fifth of a step at batch 1. So the calls of a decode step
are noted once, for any batch size, and one function makes them.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nanoinfer.attention.base import ForwardBatch, KVCache
from nanoinfer.attention.cpu import CPUAttention, CPUPlan, Decodes, most_parts
from nanoinfer.config import ModelConfig, SchedulerConfig
from nanoinfer.kernels.cpu.memory import Workspace
from nanoinfer.kernels.cpu.ops import CPUKernels
from nanoinfer.kernels.cpu.recording import Recording
from nanoinfer.layers.linear import ParallelLinear
from nanoinfer.models.decoder import Decoder

logger = logging.getLogger(__name__)


# Rows of logits that have a place in the workspace.
_LOGITS_ROWS = 64


def make_workspace(config: ModelConfig, dtype: torch.dtype, limits: SchedulerConfig) -> Workspace:
    """For steps of any kind: what is computed in a layer is not read after the same place in the next one."""
    heads, kv_heads, head_dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    widths = [(heads + 2 * kv_heads) * head_dim, config.intermediate_size, config.hidden_size]
    width = sum(widths) + 2 * heads * head_dim + 3 * config.hidden_size
    # Attention leaves float32 for each part of a context. Recordings have up to three parts for each sequence.
    parts_bytes = 4 * heads * (head_dim + 2) * most_parts(3 * max(2, limits.max_num_seqs))
    num_tokens = max(limits.max_num_batched_tokens, limits.max_num_seqs, 2)
    logits_bytes = min(_LOGITS_ROWS, limits.max_num_seqs) * config.vocab_size * dtype.itemsize
    largest = max(num_tokens * max(widths) * dtype.itemsize, parts_bytes, logits_bytes)
    # Up to 63 bytes of each result are left unused for alignment.
    return Workspace(num_tokens * width * dtype.itemsize + parts_bytes + 10 * 64, largest)


class DecodeReplay:
    """Runs a decoder's layers over a step of decodes. The result is valid until the workspace is used again."""

    def __init__(
        self,
        decoder: Decoder,
        kernels: CPUKernels,
        kv_cache: KVCache,
        workspace: Workspace,
        limits: SchedulerConfig,
    ) -> None:
        self._decoder, self._kernels, self._kv_cache, self._workspace = decoder, kernels, kv_cache, workspace
        self._is_checked = False
        config = decoder.config
        # Two recordings differ in the number of rows.
        most = max(2, limits.max_num_seqs)
        dtype, half = decoder.norm.weight.dtype, config.head_dim // 2
        self._hidden = torch.zeros(most, config.hidden_size, dtype=dtype)
        self._cos, self._sin = torch.zeros(2, most, half, dtype=dtype)
        self._input_ids, self._positions, self._slots = torch.zeros(3, most, dtype=torch.int64)
        self._tables = torch.zeros(most, -(-limits.max_model_len // kv_cache.block_size), dtype=torch.int32)
        self._seq_lens = torch.zeros(most, dtype=torch.int32)
        self._rows = torch.arange(most)
        self._program = self._record()

    @classmethod
    def can_run(cls, decoder: Decoder, backend: object, tensor_parallel_size: int) -> bool:
        """Whether a decode step is nothing but calls of kernels."""
        linears = [module for module in decoder.modules() if isinstance(module, ParallelLinear)]
        is_packed = all(layer.method.is_packed for layer in linears)
        return isinstance(backend, CPUAttention) and backend.can_replay and is_packed and tensor_parallel_size == 1

    def __call__(self, batch: ForwardBatch) -> torch.Tensor | None:
        """Hidden states, [num_tokens, hidden_size], or None where the step has to be run the ordinary way."""
        plan = batch.plan
        assert isinstance(plan, CPUPlan)
        if self._program is None or not batch.is_decode_only or plan.decodes is None:
            return None
        # Models are of one kind throughout: what holds for one batch size does for the others.
        if not self._is_checked and not self._check(self._program, batch, plan.decodes):
            logger.warning(
                "decode steps run with Python between the kernels: made on their own, these gave another result"
            )
            self._program = None
            return None
        self._is_checked = True
        return self._replay(self._program, batch, plan.decodes)

    def _replay(self, program: _Program, batch: ForwardBatch, decodes: Decodes) -> torch.Tensor:
        n = self._load(batch, decodes)
        self._kernels.run(program.calls_for(n, decodes.splits))
        return program.output[:n]

    def _load(self, batch: ForwardBatch, decodes: Decodes) -> int:
        n, num_columns = decodes.block_tables.shape
        # In numpy: a copy by torch takes ten times as long when its code has to come from memory.
        self._input_ids.numpy()[:n] = batch.input_ids.numpy()
        self._positions.numpy()[:n] = batch.positions.numpy()
        self._slots.numpy()[:n] = batch.slot_mapping.numpy()
        self._tables.numpy()[:n, :num_columns] = decodes.block_tables.numpy()
        self._seq_lens.numpy()[:n] = decodes.seq_lens.numpy()
        return n

    def _batch(self, n: int, splits: int) -> ForwardBatch:
        """The step that was loaded, as far as layers look at it."""
        decodes = Decodes(self._rows[:n], self._tables[:n], self._seq_lens[:n], splits)
        return ForwardBatch(
            input_ids=self._input_ids[:n],
            positions=self._positions[:n],
            query_start_loc=torch.arange(n + 1, dtype=torch.int32),
            seq_lens=self._seq_lens[:n],
            block_tables=self._tables[:n],
            slot_mapping=self._slots[:n],
            logits_indices=self._rows[:n],
            max_query_len=1,
            max_seq_len=self._tables.shape[1] * self._kv_cache.block_size,
            plan=CPUPlan(decodes, None, [], []),
        )

    def _run_layers(self, batch: ForwardBatch) -> torch.Tensor:
        n = len(batch.input_ids)
        hidden, rotation = self._hidden[:n], (self._cos[:n], self._sin[:n])
        self._kernels.gather_rows(self._decoder.embed_tokens.weight, batch.input_ids, hidden)
        self._decoder.rotary(batch.positions, rotation)
        return self._decoder.run_layers(hidden, rotation, batch, self._kv_cache)

    def _record(self) -> _Program | None:
        """None if layers do more than call kernels."""
        most = len(self._rows)
        parts = -(-most_parts(most) // most)  # so that memory for the most parts is handed out
        sizes = [(most, parts), (most - 1, parts), (most, parts + 1)]
        recordings, outputs = [], []
        for n, splits in sizes:
            batch, recording, views = self._batch(n, splits), Recording(), _ViewsOnly()
            self._workspace.restart()
            with self._kernels.using(self._workspace, recording), views:
                outputs.append(self._run_layers(batch))
            if views.others:
                logger.warning(
                    "decode steps run with Python between the kernels, since this model's layers compute with %s, too",
                    ", ".join(sorted(views.others)),
                )
                return None
            recordings.append(recording)
        base, fewer, more = recordings
        return _Program(base.calls(), most, parts, fewer.growth_to(base), base.growth_to(more), outputs[0])

    def _check(self, program: _Program, batch: ForwardBatch, decodes: Decodes) -> bool:
        """Whether the program does what the layers do. Results that don't live long enough would be NaN."""
        n = self._load(batch, decodes)
        expected = self._run_layers(self._batch(n, decodes.splits)).clone()
        self._workspace.memory.fill_(0xFF)  # NaN in every dtype
        return torch.equal(self._replay(program, batch, decodes), expected)


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
