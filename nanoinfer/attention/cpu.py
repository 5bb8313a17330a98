"""Attention on the CPU.

Sequences with one query token (decodes, and chunks of one) go to one compiled kernel, which reads keys and values from
their blocks, each once for all query heads that share them; sequences with more query tokens go to another. There are
tiled kernels, on AMX, for bf16 and int8 caches, and a plain one for decodes in any shape. Where none can be had, keys
are gathered and torch's `scaled_dot_product_attention` is used: for decodes from a rectangle, short ones padded, else
sequence by sequence. Gathers go to scratch memory that is kept: with fresh memory each time, page faults made them
seven times slower (9 against 1.3 ms for 16k tokens).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from nanoinfer.attention.base import AttentionBackend, ForwardBatch, KVCache, LayerKV, Rotation
from nanoinfer.config import ModelConfig
from nanoinfer.kernels import reference
from nanoinfer.kernels.cpu.memory import huge_empty
from nanoinfer.kernels.cpu.ops import MAX_GROUP, MAX_HEAD_DIM, CPUKernels, kernels_for

# Bounds of one gather of decodes: tokens (the scratch is 2 x 8192 x 2 KiB = 32 MiB for Qwen3-0.6B), unless one
# sequence alone is longer, and the share of them that may be padding.
_MAX_GATHER_TOKENS = 8192
_MAX_PADDED_RATIO = 1.25
# The plain kernel's work is one (sequence, KV head), the tiled one's a sequence; contexts are split until each thread
# has this many pieces to take.
_ITEMS_PER_THREAD = 4
_MIN_SPLIT_TOKENS = 64


def most_parts(num_seqs: int) -> int:
    """Bound of the parts of all contexts together."""
    return num_seqs + _ITEMS_PER_THREAD * torch.get_num_threads()


@dataclass(frozen=True)
class Decodes:
    """All sequences with one query, for the kernel. rows: [n] tokens of the batch; seq_lens: [n] int32."""

    rows: torch.Tensor
    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    splits: int


@dataclass(frozen=True)
class _Prefills:
    """All sequences with several queries, for the kernel. starts, query_lens, seq_lens: [n] int64."""

    block_tables: torch.Tensor
    starts: torch.Tensor
    query_lens: torch.Tensor
    seq_lens: torch.Tensor
    parts: int


@dataclass(frozen=True)
class _DecodeGroup:
    """Sequences of similar length with one query each, for a gather. rows: [n] tokens of the batch.

    slots: [n * num_kv_heads * max_len] rows of the cache, as `_rows` shows it.
    """

    rows: torch.Tensor
    slots: torch.Tensor
    max_len: int
    mask: torch.Tensor | None


@dataclass(frozen=True)
class _GatheredPrefill:
    """One sequence with several queries, for a gather: tokens start to stop - 1. slots: [num_kv_heads * seq_len].

    mask: [num_queries, seq_len] to add, or None where the queries are the whole sequence (plainly causal).
    """

    start: int
    stop: int
    seq_len: int
    slots: torch.Tensor
    mask: torch.Tensor | None


@dataclass
class CPUPlan:
    """What goes to the kernels, and what has to be gathered."""

    decodes: Decodes | None
    prefills: _Prefills | None
    decode_groups: list[_DecodeGroup]
    gathered_prefills: list[_GatheredPrefill]


class CPUAttention(AttentionBackend):
    name = "cpu"
    default_block_size = 32

    def __init__(self, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
        super().__init__(num_heads, num_kv_heads, head_dim)
        self._kernels: CPUKernels | None = None
        self._tiled = False
        self._scratch: tuple[torch.Tensor, torch.Tensor] | None = None

    @classmethod
    def rejects(
        cls,
        model_config: ModelConfig,
        device: str,
        dtype: torch.dtype | None = None,
        block_size: int | None = None,
    ) -> str | None:
        return None if device == "cpu" else f"it runs on the CPU, not on {device!r}"

    def allocate(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: str,
        kv_dtype: torch.dtype | None = None,
    ) -> KVCache:
        if device != "cpu":
            return super().allocate(num_layers, num_blocks, block_size, dtype, device, kv_dtype)
        kv_dtype = kv_dtype or dtype
        group = self.num_heads // self.num_kv_heads
        kernels = kernels_for(dtype, device)
        if kernels is not None and dtype == torch.bfloat16:
            self._tiled = kernels.can_tile(kv_dtype, group, self.head_dim, block_size)
        # The plain kernel keeps a group's outputs of one head on its stack.
        if self._tiled or (group <= MAX_GROUP and self.head_dim <= MAX_HEAD_DIM and kv_dtype == dtype):
            self._kernels = kernels
        # A block's values follow its keys: scattered pieces of 128 KB are read faster than ones of 64 KB.
        shape = (num_layers, num_blocks, 2, self.num_kv_heads, block_size)
        # Low blocks are handed out first.
        data = huge_empty((*shape, self.head_dim), kv_dtype, mapped_parts=num_layers).permute(2, 0, 1, 3, 4, 5)
        if kv_dtype != torch.int8:
            return KVCache(data)
        return KVCache(data, huge_empty(shape, torch.float32, mapped_parts=num_layers).permute(2, 0, 1, 3, 4))

    def plan(self, batch: ForwardBatch, block_size: int) -> CPUPlan:
        if batch.is_decode_only and self._kernels is not None:
            n = len(batch.seq_lens)
            splits = self.splits(n, batch.max_seq_len)
            return CPUPlan(Decodes(torch.arange(n), batch.block_tables, batch.seq_lens, splits), None, [], [])
        query_lens = batch.query_start_loc.diff()
        seq_lens = batch.seq_lens.long()
        single = torch.nonzero(query_lens == 1).flatten()
        several = torch.nonzero(query_lens > 1).flatten()
        plan = CPUPlan(None, None, [], [])
        if len(single) and self._kernels is not None:
            plan.decodes = self._plan_decodes(single, batch)
        elif len(single):
            plan.decode_groups = self._plan_groups(single, seq_lens, batch, block_size)
        if len(several) and self._tiled:
            plan.prefills = self._plan_prefills(several, query_lens, seq_lens, batch)
        else:
            plan.gathered_prefills = [
                self._plan_gather(i, int(seq_lens[i]), batch, block_size) for i in several.tolist()
            ]
        return plan

    @property
    def can_replay(self) -> bool:
        """Whether a decode step, and the plan of one, consist of the tiled kernels' calls."""
        return self._tiled

    def _plan_decodes(self, seqs: torch.Tensor, batch: ForwardBatch) -> Decodes:
        seq_lens = batch.seq_lens[seqs]
        rows = batch.query_start_loc[seqs].long()
        return Decodes(rows, batch.block_tables[seqs], seq_lens, self.splits(len(seqs), int(seq_lens.max())))

    def splits(self, num_seqs: int, longest: int) -> int:
        """Parts that each context is cut into, so that all threads have work. longest: most tokens of a context."""
        num_items = num_seqs * (1 if self._tiled else self.num_kv_heads)
        wanted = -(-_ITEMS_PER_THREAD * torch.get_num_threads() // num_items)
        return max(1, min(wanted, longest // _MIN_SPLIT_TOKENS))

    def _plan_prefills(
        self, seqs: torch.Tensor, query_lens: torch.Tensor, seq_lens: torch.Tensor, batch: ForwardBatch
    ) -> _Prefills:
        starts = batch.query_start_loc[seqs].long()
        num_items = len(seqs) * self.num_kv_heads
        parts = max(1, -(-_ITEMS_PER_THREAD * torch.get_num_threads() // num_items))
        return _Prefills(
            batch.block_tables[seqs].contiguous(), starts, query_lens[seqs].long(), seq_lens[seqs].contiguous(), parts
        )

    def _plan_gather(self, seq: int, seq_len: int, batch: ForwardBatch, block_size: int) -> _GatheredPrefill:
        start, stop = int(batch.query_start_loc[seq]), int(batch.query_start_loc[seq + 1])
        mask = None
        if stop - start < seq_len:
            query_positions = torch.arange(seq_len - (stop - start), seq_len)
            mask = _additive(torch.arange(seq_len) <= query_positions.unsqueeze(1))
        slots = self._slots(batch.block_tables[seq : seq + 1], torch.arange(seq_len).unsqueeze(0), block_size)
        return _GatheredPrefill(start, stop, seq_len, slots, mask)

    def _plan_groups(
        self, seqs: torch.Tensor, seq_lens: torch.Tensor, batch: ForwardBatch, block_size: int
    ) -> list[_DecodeGroup]:
        """Cuts the decoding sequences, longest first, into groups that waste little on padding."""
        groups = []
        seqs = seqs[seq_lens[seqs].argsort(descending=True)]
        lens = seq_lens[seqs].tolist()
        start = 0
        while start < len(lens):
            max_len = lens[start]
            stop = start + 1
            while (
                stop < len(lens)
                and (stop + 1 - start) * max_len <= _MAX_GATHER_TOKENS
                and max_len <= _MAX_PADDED_RATIO * lens[stop] + 16
            ):
                stop += 1
            members = seqs[start:stop]
            positions = torch.arange(max_len).expand(len(members), -1)
            visible = positions < seq_lens[members].unsqueeze(1)
            # Padding reads the sequence's first slot, which is always written: a masked weight of zero times whatever
            # an unwritten slot holds could be NaN.
            slots = self._slots(batch.block_tables[members], positions.where(visible, 0), block_size)
            mask = None if bool(visible.all()) else _additive(visible)[:, None, None, :]
            groups.append(_DecodeGroup(batch.query_start_loc[members].long(), slots, max_len, mask))
            start = stop
        return groups

    def _slots(self, block_tables: torch.Tensor, positions: torch.Tensor, block_size: int) -> torch.Tensor:
        """Rows of the cache for each sequence, KV head and position, flat. positions: [n, length]."""
        blocks = block_tables.long().gather(1, positions // block_size).unsqueeze(1)
        heads = torch.arange(self.num_kv_heads).view(1, -1, 1)
        offsets = (positions % block_size).unsqueeze(1)
        return ((2 * blocks * self.num_kv_heads + heads) * block_size + offsets).flatten()

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
        if self._kernels is None:
            return super().prepare(qkv, q_norm, k_norm, eps, rotation, kv, batch)
        return self._kernels.norm_rotate_store(
            qkv, q_norm, k_norm, eps, *rotation, kv, batch.slot_mapping, tiled=self._tiled
        )

    def store(self, k: torch.Tensor, v: torch.Tensor, kv: LayerKV, batch: ForwardBatch) -> None:
        tiled = (reference.store_tiled_keys, reference.store_tiled_values)
        for i, x in enumerate((k, v)):
            if kv[i].dtype == torch.int8:
                x, scales = reference.quantize_kv(x)
                reference.store_kv(kv[2 + i], scales, batch.slot_mapping)
            store = tiled[i] if self._tiled else reference.store_kv
            store(kv[i], x, batch.slot_mapping)

    def attend(self, q: torch.Tensor, kv: LayerKV, batch: ForwardBatch) -> torch.Tensor:
        plan = batch.plan
        assert isinstance(plan, CPUPlan)
        out = torch.empty_like(q) if self._kernels is None else self._kernels.empty(tuple(q.shape), q.dtype)
        if (one := plan.decodes) is not None and self._kernels is not None:
            if self._tiled:
                self._kernels.tiled_decode(q, out, kv, one.block_tables, one.seq_lens, one.rows, self.scale, one.splits)
            else:
                self._kernels.paged_decode(
                    q, out, kv[0], kv[1], one.block_tables, one.seq_lens, one.rows, self.scale, one.splits
                )
        if (many := plan.prefills) is not None and self._kernels is not None:
            self._kernels.paged_prefill(
                q, out, kv, many.block_tables, many.starts, many.query_lens, many.seq_lens, self.scale, many.parts
            )
        for group in plan.decode_groups:
            k, v = self._gather(kv, group.slots, len(group.rows), group.max_len, q.dtype)
            # The query heads that share a KV head stand as its queries: each key is read once for all of them.
            grouped = q[group.rows].unflatten(1, (self.num_kv_heads, -1))
            mask = None if group.mask is None else group.mask.to(q.dtype)
            result = F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask, scale=self.scale)
            out[group.rows] = result.flatten(1, 2)
        for item in plan.gathered_prefills:
            k, v = self._gather(kv, item.slots, 1, item.seq_len, q.dtype)
            out[item.start : item.stop] = F.scaled_dot_product_attention(
                q[item.start : item.stop].transpose(0, 1).unsqueeze(0),
                k,
                v,
                attn_mask=None if item.mask is None else item.mask.to(q.dtype),
                is_causal=item.mask is None,
                scale=self.scale,
                enable_gqa=self.num_heads != self.num_kv_heads,
            )[0].transpose(0, 1)
        return out

    def _gather(
        self, kv: LayerKV, slots: torch.Tensor, num_seqs: int, max_len: int, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values at `slots`, each as [num_seqs, num_kv_heads, max_len, head_dim]."""
        if self._scratch is None or len(self._scratch[0]) < len(slots):
            size = max(len(slots), _MAX_GATHER_TOKENS * self.num_kv_heads)
            self._scratch = (kv[0].new_empty(size, self.head_dim), kv[0].new_empty(size, self.head_dim))
        gathered = []
        for i, scratch in enumerate(self._scratch):
            out = scratch[: len(slots)]
            torch.index_select(_rows(kv[i], self.head_dim), 0, slots, out=out)
            if out.dtype == torch.int8:
                out = (out * _rows(kv[2 + i], 1)[slots]).to(dtype)
            gathered.append(out.view(num_seqs, self.num_kv_heads, max_len, self.head_dim))
        return gathered[0], gathered[1]


def _rows(cache: torch.Tensor, size: int) -> torch.Tensor:
    """Keys, values or their scales as rows of that size, among which the others' lie, too: [rows, size]."""
    num_blocks, num_kv_heads, block_size = cache.shape[:3]
    return cache.as_strided(((2 * num_blocks - 1) * num_kv_heads * block_size, size), (size, 1))


def _additive(visible: torch.Tensor) -> torch.Tensor:
    """A mask to add to scores: 0 where visible, -inf elsewhere."""
    return torch.zeros(visible.shape, dtype=torch.float32).masked_fill_(~visible, float("-inf"))
