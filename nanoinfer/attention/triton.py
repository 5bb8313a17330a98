"""Attention on a GPU by our own Triton kernels: one launch for sequences with one query, one for those with several.

With TRITON_INTERPRET=1 the same runs on a CPU, for tests.
"""

from __future__ import annotations

import functools
import importlib.util
from dataclasses import dataclass

import numpy as np
import torch

from nanoinfer.attention.base import AttentionBackend, ForwardBatch, LayerKV, Rotation
from nanoinfer.attention.upload import upload
from nanoinfer.config import ModelConfig
from nanoinfer.kernels.select import is_interpreted

# A tile of keys times the group's queries is kept in registers and shared memory.
_MAX_HEAD_DIM = 256
_H200_SMS = 132


@dataclass(frozen=True)
class _Decodes:
    """Sequences with one query. rows: [n] int32, their tokens in the batch. All on the device."""

    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    rows: torch.Tensor
    num_splits: int
    min_tiles: int


@dataclass(frozen=True)
class _Prefills:
    """All sequences; items: [m, 2] int32, the tiles of those with several queries. All on the device."""

    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    items: torch.Tensor


@dataclass(frozen=True)
class _Plan:
    decodes: _Decodes | None
    prefills: _Prefills | None


class TritonAttention(AttentionBackend):
    name = "triton"
    default_block_size = 32
    supports_cuda_graph = True

    @classmethod
    def rejects(
        cls,
        model_config: ModelConfig,
        device: str,
        dtype: torch.dtype | None = None,
        block_size: int | None = None,
    ) -> str | None:
        if device != "cuda" and not is_interpreted():
            return f"it runs on a GPU, not on {device!r}"
        if importlib.util.find_spec("triton") is None:
            return "the package triton is not installed (pip install 'nanoinfer[gpu]')"
        if dtype == torch.int8:
            return "it stores keys and values in the model's dtype only, and kv_cache_dtype is 'int8'"
        if model_config.head_dim > _MAX_HEAD_DIM:
            return f"head_dim is {model_config.head_dim}, and its tiles hold at most {_MAX_HEAD_DIM}"
        if device == "cuda" and torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 0):
            return "it needs a GPU of compute capability 8.0 (Ampere) or newer"
        return None

    def plan(self, batch: ForwardBatch, block_size: int) -> object:
        from nanoinfer.kernels.triton import prefill

        starts, seq_lens = batch.query_start_loc.numpy(), batch.seq_lens.numpy()
        query_lens = np.diff(starts)
        single, several = np.flatnonzero(query_lens == 1), np.flatnonzero(query_lens > 1)
        # Decode attention starts its programs in this order: none with a long context should start late.
        single = single[np.argsort(-seq_lens[single], kind="stable")]
        assert self.dtype is not None, "plan before allocate"
        num_queries = prefill.queries_per_tile(self.dtype, self.head_dim, self.num_heads // self.num_kv_heads)
        items = prefill.work_items(starts, seq_lens, several, num_queries)
        device = batch.block_tables.device
        on_device = upload([seq_lens, starts, single.astype(np.int32), starts[single], items], device)
        all_lens, all_starts, chosen, rows, all_items = on_device
        decodes = prefills = None
        if len(single):
            tables, lens = batch.block_tables.index_select(0, chosen), all_lens.index_select(0, chosen)
            decodes = self._decodes(tables, lens, rows, batch.max_seq_len)
        if len(several):
            prefills = _Prefills(batch.block_tables, all_lens, all_starts, all_items.view(-1, 2))
        return _Plan(decodes, prefills)

    def plan_decode(self, block_tables: torch.Tensor, seq_lens: torch.Tensor, max_seq_len: int) -> object:
        rows = torch.arange(len(seq_lens), dtype=torch.int32, device=seq_lens.device)
        return _Plan(self._decodes(block_tables, seq_lens, rows, max_seq_len), None)

    def _decodes(
        self, block_tables: torch.Tensor, seq_lens: torch.Tensor, rows: torch.Tensor, max_seq_len: int
    ) -> _Decodes:
        from nanoinfer.kernels.triton import decode

        num_sms = num_multiprocessors(seq_lens.device)
        splits = decode.splits_for(len(seq_lens), self.num_kv_heads, max_seq_len, num_sms)
        return _Decodes(block_tables, seq_lens, rows, splits.number, splits.min_tiles)

    def prepare(
        self,
        qkv: torch.Tensor,
        q_norm: torch.Tensor,
        k_norm: torch.Tensor,
        eps: float,
        rotation: Rotation,
        kv: LayerKV,
        batch: ForwardBatch,
    ) -> torch.Tensor:
        from nanoinfer.kernels.triton import kv_store

        q: torch.Tensor = kv_store.norm_rotate_store(qkv, q_norm, k_norm, *rotation, *kv, batch.slot_mapping, eps)
        return q

    def store(self, k: torch.Tensor, v: torch.Tensor, kv: LayerKV, batch: ForwardBatch) -> None:
        from nanoinfer.kernels.triton import kv_store

        kv_store.store_kv(k, v, *kv, batch.slot_mapping)

    def attend(self, q: torch.Tensor, kv: LayerKV, batch: ForwardBatch) -> torch.Tensor:
        from nanoinfer.kernels.triton import decode, prefill

        plan = batch.plan
        assert isinstance(plan, _Plan)
        out = torch.empty_like(q)
        if (one := plan.decodes) is not None:
            decode.paged_decode(
                q, *kv, one.block_tables, one.seq_lens, one.rows, out, self.scale, one.num_splits, one.min_tiles
            )
        if (many := plan.prefills) is not None:
            prefill.paged_prefill(
                q, *kv, many.block_tables, many.seq_lens, many.query_start_loc, many.items, out, self.scale
            )
        return out


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    """Of an H200 where there is none: in the interpreter, and with fake tensors."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return _H200_SMS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
