"""Attention on the CPU in plain torch: keys and values are gathered from the pool, then `scaled_dot_product_attention`.

Sequences with one query token (decodes, and chunks of one) are computed together: their keys are gathered to a
rectangle, short ones padded. Sequences with more are computed one by one. The gather goes to scratch memory that is
kept: with fresh memory each time, page faults made it seven times slower (9 against 1.3 ms for 16k tokens).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from nanoinfer.attention.base import AttentionBackend, ForwardBatch
from nanoinfer.config import ModelConfig
from nanoinfer.kernels import reference

# Bounds of one gather of decodes: tokens (the scratch is 2 x 8192 x 2 KiB = 32 MiB for Qwen3-0.6B), unless one
# sequence alone is longer, and the share of them that may be padding.
_MAX_GATHER_TOKENS = 8192
_MAX_PADDED_RATIO = 1.25


@dataclass(frozen=True)
class _DecodeGroup:
    """Sequences of similar length with one query each. rows: [n] tokens of the batch; slots: [n * max_len]."""

    rows: torch.Tensor
    slots: torch.Tensor
    max_len: int
    mask: torch.Tensor | None


@dataclass(frozen=True)
class _Prefill:
    """One sequence with several queries, tokens start to stop - 1 of the batch. slots: [seq_len].

    mask: [num_queries, seq_len] to add, or None where the queries are the whole sequence (plainly causal).
    """

    start: int
    stop: int
    slots: torch.Tensor
    mask: torch.Tensor | None


@dataclass(frozen=True)
class _Plan:
    decodes: list[_DecodeGroup]
    prefills: list[_Prefill]


class CPUAttention(AttentionBackend):
    name = "cpu"
    default_block_size = 32

    def __init__(self, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
        super().__init__(num_heads, num_kv_heads, head_dim)
        self._scratch: tuple[torch.Tensor, torch.Tensor] | None = None

    @classmethod
    def rejects(cls, model_config: ModelConfig, device: str) -> str | None:
        return None if device == "cpu" else f"it runs on the CPU, not on {device!r}"

    def plan(self, batch: ForwardBatch, block_size: int) -> _Plan:
        query_lens = batch.query_start_loc.diff()
        # Slot of every token position of every sequence: [num_seqs, columns * block_size]
        num_columns = -(-batch.max_seq_len // block_size)
        first_slots = batch.block_tables[:, :num_columns].long() * block_size
        slots = (first_slots.unsqueeze(-1) + torch.arange(block_size)).flatten(1)
        seq_lens = batch.seq_lens.long()
        decodes = self._plan_decodes(torch.nonzero(query_lens == 1).flatten(), slots, seq_lens, batch)
        prefills = []
        for i in torch.nonzero(query_lens > 1).flatten().tolist():
            start, stop, seq_len = int(batch.query_start_loc[i]), int(batch.query_start_loc[i + 1]), int(seq_lens[i])
            mask = None
            if stop - start < seq_len:
                query_positions = torch.arange(seq_len - (stop - start), seq_len)
                mask = _additive(torch.arange(seq_len) <= query_positions.unsqueeze(1))
            prefills.append(_Prefill(start, stop, slots[i, :seq_len].contiguous(), mask))
        return _Plan(decodes, prefills)

    @staticmethod
    def _plan_decodes(
        seqs: torch.Tensor, slots: torch.Tensor, seq_lens: torch.Tensor, batch: ForwardBatch
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
            visible = torch.arange(max_len) < seq_lens[members].unsqueeze(1)
            # Padding reads the sequence's first slot, which is always written: a masked weight of zero times whatever
            # an unwritten slot holds could be NaN.
            group_slots = torch.where(visible, slots[members, :max_len], slots[members, :1])
            mask = None if bool(visible.all()) else _additive(visible)[:, None, None, :]
            rows = batch.query_start_loc[members].long()
            groups.append(_DecodeGroup(rows, group_slots.flatten(), max_len, mask))
            start = stop
        return groups

    def store(
        self, k: torch.Tensor, v: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], batch: ForwardBatch
    ) -> None:
        reference.store_kv(kv[0], k, batch.slot_mapping)
        reference.store_kv(kv[1], v, batch.slot_mapping)

    def attend(self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], batch: ForwardBatch) -> torch.Tensor:
        plan = batch.plan
        assert isinstance(plan, _Plan)
        out = torch.empty_like(q)
        for group in plan.decodes:
            k, v = self._gather(kv, group.slots, len(group.rows), group.max_len)
            # The query heads that share a KV head stand as its queries: each key is read once for all of them.
            grouped = q[group.rows].unflatten(1, (self.num_kv_heads, -1))
            mask = None if group.mask is None else group.mask.to(q.dtype)
            result = F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask, scale=self.scale)
            out[group.rows] = result.flatten(1, 2)
        for item in plan.prefills:
            k, v = self._gather(kv, item.slots, 1, len(item.slots))
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
        self, kv: tuple[torch.Tensor, torch.Tensor], slots: torch.Tensor, num_seqs: int, max_len: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values at `slots` [num_seqs * max_len], each as [num_seqs, num_kv_heads, max_len, head_dim]."""
        width = self.num_kv_heads * self.head_dim
        if self._scratch is None or len(self._scratch[0]) < len(slots):
            size = max(len(slots), _MAX_GATHER_TOKENS)
            self._scratch = (kv[0].new_empty(size, width), kv[0].new_empty(size, width))
        gathered = []
        for cache, scratch in zip(kv, self._scratch, strict=True):
            out = scratch[: len(slots)]
            torch.index_select(cache.view(-1, width), 0, slots, out=out)
            gathered.append(out.view(num_seqs, max_len, self.num_kv_heads, self.head_dim).transpose(1, 2))
        return gathered[0], gathered[1]


def _additive(visible: torch.Tensor) -> torch.Tensor:
    """A mask to add to scores: 0 where visible, -inf elsewhere."""
    return torch.zeros(visible.shape).masked_fill_(~visible, float("-inf"))
