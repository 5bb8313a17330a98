"""Attention of one query per sequence over paged keys and values: split-KV "flash decoding" (Dao et al., 2023).

A program reads one part of one sequence's context for one KV head, once for all query heads that share it: these are
packed into the 16 rows that a tensor core's tile has at least. Where a context has several parts, a second kernel
merges them. The grid depends on the batch's size and on the number of splits alone, so a CUDA graph can hold it; how
much of a context each split takes, and how many splits a short one uses, is decided on the device from its length.

Programs start in the order of the grid. The heads of a sequence come one after the other, since what they read lies
side by side; sequences come in the caller's order, which had better be the longest first: then none starts late.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from nanoinfer.kernels.triton.operator import operator

# Keys per tile. Not the block size: a tile may span several blocks, or be part of one.
TILE = 64
# A split takes at least so many tiles: a shorter one costs more to merge than to read. Where the sequences alone fill
# the GPU, only far longer contexts than most are split, so that one of them does not hold up all others.
MIN_TILES, MIN_TILES_OF_MANY = 2, 256
MAX_SPLITS = 32
# Programs wanted per multiprocessor; three are resident.
_PROGRAMS_PER_SM = 3
_LOG2_E = 1.4426950408889634


@dataclass(frozen=True)
class Splits:
    """Into how many parts a context may be cut, and how many tiles a part has at least."""

    number: int
    min_tiles: int = MIN_TILES


def splits_for(num_seqs: int, num_kv_heads: int, max_seq_len: int, num_sms: int) -> Splits:
    """Enough programs for all multiprocessors, as far as `max_seq_len` has work for them.

    A power of two, because each number is a kernel of its own, compiled when it is first launched.
    """

    def number(wanted: int, min_tiles: int) -> int:
        useful = -(-max_seq_len // (TILE * min_tiles))
        floor: int = 1 << (max(1, min(wanted, MAX_SPLITS)).bit_length() - 1)
        return min(floor, int(triton.next_power_of_2(useful)))

    by_programs = number(_PROGRAMS_PER_SM * num_sms // max(1, num_seqs * num_kv_heads), MIN_TILES)
    by_length = number(MAX_SPLITS, MIN_TILES_OF_MANY)
    if by_programs >= by_length:
        return Splits(by_programs)
    return Splits(by_length, MIN_TILES_OF_MANY if by_programs == 1 else MIN_TILES)


@triton.jit
def _keys_per_split(
    seq_len: tl.tensor, TILE: tl.constexpr, NUM_SPLITS: tl.constexpr, MIN_TILES: tl.constexpr
) -> tl.tensor:
    return tl.maximum(tl.cdiv(tl.cdiv(seq_len, TILE), NUM_SPLITS), MIN_TILES) * TILE


# The number of columns changes from step to step: kernels for kinds of it would be compiled in the middle of a run.
@triton.jit(do_not_specialize=["table_stride"])
def paged_decode_kernel(
    q: tl.tensor, k_cache: tl.tensor, v_cache: tl.tensor, block_tables: tl.tensor, seq_lens: tl.tensor,
    rows: tl.tensor, out: tl.tensor, partial_out: tl.tensor, partial_lse: tl.tensor,
    scale: tl.tensor, table_stride: tl.tensor, num_heads: tl.tensor,
    BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_GROUP: tl.constexpr, TILE: tl.constexpr, NUM_SPLITS: tl.constexpr, MIN_TILES: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    """Program (KV head, split, sequence). scale includes log2(e): exponentials are powers of two."""
    kv_head, split, seq = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_kv_heads = num_heads // GROUP
    seq_len = tl.load(seq_lens + seq)
    row = tl.load(rows + seq).to(tl.int64)
    keys_per_split = _keys_per_split(seq_len, TILE, NUM_SPLITS, MIN_TILES)
    start = split * keys_per_split
    stop = tl.minimum(start + keys_per_split, seq_len)

    member, dim = tl.arange(0, BLOCK_GROUP), tl.arange(0, BLOCK_DIM)
    head = kv_head * GROUP + member
    in_dim = dim < HEAD_DIM
    in_q = (member < GROUP)[:, None] & in_dim[None, :]
    queries = tl.load(q + (row * num_heads + head)[:, None] * HEAD_DIM + dim[None, :], mask=in_q, other=0.0)
    best = tl.full([BLOCK_GROUP], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_GROUP], tl.float32)
    acc = tl.zeros([BLOCK_GROUP, BLOCK_DIM], tl.float32)
    table = block_tables + seq.to(tl.int64) * table_stride
    for first in range(start, stop, TILE):
        visible = first + tl.arange(0, TILE) < stop
        # Beyond the end, the last key again: it costs no memory traffic, where masks on loads cost instructions.
        position = tl.minimum(first + tl.arange(0, TILE), stop - 1)
        block = tl.load(table + position // BLOCK_SIZE)
        slot = ((block.to(tl.int64) * num_kv_heads + kv_head) * BLOCK_SIZE + position % BLOCK_SIZE) * HEAD_DIM
        k_source, v_source = k_cache + slot[None, :] + dim[:, None], v_cache + slot[:, None] + dim[None, :]
        keys = tl.load(k_source) if HEAD_DIM == BLOCK_DIM else tl.load(k_source, mask=in_dim[:, None], other=0.0)
        scores = tl.dot(queries, keys, input_precision=PRECISION) * scale
        scores = tl.where(visible[None, :], scores, float("-inf"))
        new_best = tl.maximum(best, tl.max(scores, axis=1))
        weights = tl.exp2(scores - new_best[:, None])
        decay = tl.exp2(best - new_best)
        values = tl.load(v_source) if HEAD_DIM == BLOCK_DIM else tl.load(v_source, mask=in_dim[None, :], other=0.0)
        acc = tl.dot(weights.to(values.dtype), values, acc * decay[:, None], input_precision=PRECISION)
        total = total * decay + tl.sum(weights, axis=1)
        best = new_best
    # An empty context (a padding row) gives zeros.
    result = acc / tl.where(total > 0, total, 1.0)[:, None]
    if keys_per_split >= seq_len:
        # The whole context: there is nothing to merge.
        if split == 0:
            target = out + (row * num_heads + head)[:, None] * HEAD_DIM + dim[None, :]
            tl.store(target, result.to(out.dtype.element_ty), mask=in_q)
    elif start < seq_len:
        part = (seq.to(tl.int64) * num_heads + head) * NUM_SPLITS + split
        tl.store(partial_out + part[:, None] * HEAD_DIM + dim[None, :], result, mask=in_q)
        tl.store(partial_lse + part, best + tl.log2(total), mask=member < GROUP)


@triton.jit
def merge_splits_kernel(
    partial_out: tl.tensor,
    partial_lse: tl.tensor,
    seq_lens: tl.tensor,
    rows: tl.tensor,
    out: tl.tensor,
    num_heads: tl.tensor,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    TILE: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    MIN_TILES: tl.constexpr,
) -> None:
    """Program (head, sequence): the parts' means, each weighted by its sum of exponentials."""
    head, seq = tl.program_id(0), tl.program_id(1)
    seq_len = tl.load(seq_lens + seq)
    keys_per_split = _keys_per_split(seq_len, TILE, NUM_SPLITS, MIN_TILES)
    if keys_per_split < seq_len:
        row = tl.load(rows + seq).to(tl.int64)
        split, dim = tl.arange(0, NUM_SPLITS), tl.arange(0, BLOCK_DIM)
        is_used = split * keys_per_split < seq_len
        part = (seq.to(tl.int64) * num_heads + head) * NUM_SPLITS + split
        lse = tl.load(partial_lse + part, mask=is_used, other=float("-inf"))
        weights = tl.exp2(lse - tl.max(lse, axis=0))
        mask = is_used[:, None] & (dim < HEAD_DIM)[None, :]
        values = tl.load(partial_out + part[:, None] * HEAD_DIM + dim[None, :], mask=mask, other=0.0)
        result = tl.sum(values * weights[:, None], axis=0) / tl.sum(weights, axis=0)
        target = out + (row * num_heads + head) * HEAD_DIM + dim
        tl.store(target, result.to(out.dtype.element_ty), mask=dim < HEAD_DIM)


def _fake_paged_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    rows: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    num_splits: int,
    min_tiles: int,
) -> None:
    return None


@operator(
    "paged_decode(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_tables, Tensor seq_lens, Tensor rows, "
    "Tensor(a!) out, float scale, int num_splits, int min_tiles) -> ()",
    _fake_paged_decode,
)
def paged_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    rows: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    num_splits: int,
    min_tiles: int,
) -> None:
    """Fills the rows `rows` [n] (int32) of out with the attention of those rows of q over n contexts.

    q, out: [T, num_heads, head_dim], contiguous. caches: [blocks, num_kv_heads, block_size, head_dim], contiguous.
    block_tables: [n, columns] int32, rows contiguous; seq_lens: [n] int32, 0 for a padding row, which gets zeros.
    num_splits, a power of two, and min_tiles: see `Splits`.
    Twin: reference.paged_attention.
    """
    num_seqs, (num_heads, head_dim) = len(seq_lens), q.shape[1:]
    num_kv_heads, block_size = k_cache.shape[1:3]
    if not num_seqs:
        return
    partial_out, partial_lse = out, out
    if num_splits > 1:
        partial_out = torch.empty(num_seqs, num_heads, num_splits, head_dim, dtype=torch.float32, device=q.device)
        partial_lse = torch.empty(num_seqs, num_heads, num_splits, dtype=torch.float32, device=q.device)
    block_dim, group = max(16, triton.next_power_of_2(head_dim)), num_heads // num_kv_heads
    paged_decode_kernel[(num_kv_heads, num_splits, num_seqs)](
        q, k_cache, v_cache, block_tables, seq_lens, rows, out, partial_out, partial_lse, scale * _LOG2_E,
        block_tables.stride(0), num_heads, BLOCK_SIZE=block_size, HEAD_DIM=head_dim, BLOCK_DIM=block_dim, GROUP=group,
        BLOCK_GROUP=max(16, triton.next_power_of_2(group)), TILE=tile_for(q.dtype), NUM_SPLITS=num_splits,
        MIN_TILES=min_tiles, PRECISION=precision_for(q.dtype), num_warps=num_warps_for(q.dtype),
        num_stages=num_stages_for(q.dtype, head_dim),
    )  # fmt: skip
    if num_splits > 1:
        merge_splits_kernel[(num_heads, num_seqs)](
            partial_out, partial_lse, seq_lens, rows, out, num_heads, HEAD_DIM=head_dim, BLOCK_DIM=block_dim,
            TILE=tile_for(q.dtype), NUM_SPLITS=num_splits, MIN_TILES=min_tiles, num_warps=4,
        )  # fmt: skip


@functools.cache
def capability_major() -> int:
    """Of the GPU; 9 where there is none."""
    return torch.cuda.get_device_capability()[0] if torch.cuda.is_available() else 9


def tile_for(dtype: torch.dtype) -> int:
    return TILE if dtype.itemsize == 2 else TILE // 2


def num_warps_for(dtype: torch.dtype) -> int:
    """With four, float32 spills on Hopper."""
    return 4 if dtype.itemsize == 2 else 8


def has_large_shared_memory() -> bool:
    """228 KiB to a multiprocessor: Hopper and Blackwell for data centres. An A100 has 164, and Ada and Blackwell for
    desktops (8.9, 12.0), newer than Hopper though the latter is, 100."""
    return capability_major() in (9, 10, 11)


def num_stages_for(dtype: torch.dtype, head_dim: int) -> int:
    """The addresses of keys and values depend on a load, of the block table, which takes half of the stages: five are
    two tiles of each ahead, 64 KiB in flight per program, three of which a Hopper multiprocessor holds. Three are one
    tile ahead, for those with less shared memory, and for heads so large that one tile is as much."""
    return 5 if dtype.itemsize == 2 and head_dim <= 128 and has_large_shared_memory() else 3


def precision_for(dtype: torch.dtype) -> str:
    """float32 is multiplied as such, not as TF32; for 16-bit inputs the setting has no effect."""
    return "ieee" if dtype == torch.float32 else "tf32"
