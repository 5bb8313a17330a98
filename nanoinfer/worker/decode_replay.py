"""Decode steps on a CPU without Python between the kernels: what a CUDA graph is on a GPU.

A layer is seven kernel calls of 50 to 600 us. Python needs 20 to 40 us for each, since the weights that went through
the caches meanwhile have thrown its own data out of them: a fifth of a step at batch 1. So the calls of the first step
of a batch size are recorded, over buffers of their own, and made again by one function in the steps after it.
"""

from __future__ import annotations

import ctypes
import logging
from dataclasses import dataclass

import torch

from nanoinfer.attention.base import ForwardBatch, KVCache
from nanoinfer.attention.cpu import CPUAttention, CPUPlan, Decodes
from nanoinfer.kernels.cpu.ops import CPUKernels, Recording
from nanoinfer.layers.linear import ParallelLinear
from nanoinfer.models.decoder import Decoder

logger = logging.getLogger(__name__)

_MOST_PROGRAMS = 512


@dataclass(frozen=True)
class _Program:
    calls: ctypes.Array
    output: torch.Tensor
    num_bytes: int  # of all results


class DecodeReplay:
    """Runs a decoder's layers over a step of decodes. The result is valid until the next call."""

    def __init__(
        self, decoder: Decoder, kernels: CPUKernels, kv_cache: KVCache, max_num_seqs: int, max_model_len: int
    ) -> None:
        self._decoder, self._kernels, self._kv_cache = decoder, kernels, kv_cache
        self._programs: dict[tuple[int, int], _Program] = {}
        self._is_usable = True
        config = decoder.config
        dtype, half = decoder.norm.weight.dtype, config.head_dim // 2
        self._hidden = torch.zeros(max_num_seqs, config.hidden_size, dtype=dtype)
        self._cos, self._sin = torch.zeros(2, max_num_seqs, half, dtype=dtype)
        self._slots = torch.zeros(max_num_seqs, dtype=torch.int64)
        self._tables = torch.zeros(max_num_seqs, -(-max_model_len // kv_cache.block_size), dtype=torch.int32)
        self._seq_lens = torch.zeros(max_num_seqs, dtype=torch.int32)
        self._rows = torch.arange(max_num_seqs)
        # Twice what one layer writes: nothing is read after the layer that follows. Attention writes float32 for each
        # of its parts, of which there are few where there are many sequences.
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        width = 5 * config.hidden_size + config.intermediate_size + (3 * heads + 2 * kv_heads) * config.head_dim
        attention = 4 * heads * (config.head_dim + 2)
        self._memory = torch.empty(
            2 * (max_num_seqs * (2 * width + attention) + 64 * attention) + 4096, dtype=torch.uint8
        )

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
        if not self._is_usable or not batch.is_decode_only or plan.decodes is None:
            return None
        key = (len(batch.input_ids), plan.decodes.splits)
        self._load(batch, plan.decodes)
        if (program := self._programs.get(key)) is not None:
            self._kernels.run(program.calls)
            return program.output
        if len(self._programs) >= _MOST_PROGRAMS:
            self._programs.clear()
        program = self._record(*key)
        # Models are of one kind throughout: what holds for one batch size does for the others.
        if not self._programs and not self._is_repeatable(program, batch, plan.decodes):
            logger.warning("decode steps cannot be replayed with this model; they run with Python between the kernels")
            self._is_usable = False
            return None
        self._programs[key] = program
        return program.output

    def _load(self, batch: ForwardBatch, decodes: Decodes) -> None:
        n = len(batch.input_ids)
        self._hidden[:n] = self._decoder.embed_tokens(batch.input_ids)
        self._cos[:n], self._sin[:n] = self._decoder.rotary(batch.positions)
        self._slots[:n] = batch.slot_mapping
        self._tables[:n, : decodes.block_tables.shape[1]] = decodes.block_tables
        self._seq_lens[:n] = decodes.seq_lens

    def _record(self, n: int, splits: int) -> _Program:
        """Runs the step that was loaded."""
        decodes = Decodes(self._rows[:n], self._tables[:n], self._seq_lens[:n], splits)
        batch = ForwardBatch(
            input_ids=self._rows[:n],
            positions=self._rows[:n],
            query_start_loc=torch.arange(n + 1, dtype=torch.int32),
            seq_lens=self._seq_lens[:n],
            block_tables=self._tables[:n],
            slot_mapping=self._slots[:n],
            logits_indices=self._rows[:n],
            max_query_len=1,
            max_seq_len=int(self._seq_lens[:n].max()),
            plan=CPUPlan(decodes, None, [], []),
        )
        recording = Recording(self._memory)
        with self._kernels.recording(recording):
            output = self._decoder.run_layers(self._hidden[:n], (self._cos[:n], self._sin[:n]), batch, self._kv_cache)
        return _Program(recording.calls(), output, recording.num_bytes)

    def _is_repeatable(self, program: _Program, batch: ForwardBatch, decodes: Decodes) -> bool:
        """Whether the calls alone do the step that was just recorded, and results lived long enough."""
        expected = program.output.clone()
        self._load(batch, decodes)
        self._memory.fill_(0xFF)  # NaN in every dtype
        self._kernels.run(program.calls)
        fits = 2 * program.num_bytes <= len(self._memory) * self._decoder.config.num_hidden_layers
        return fits and torch.equal(program.output, expected)
