"""Causal attention of several queries per sequence over paged keys and values, some of them cached before this step.

A program takes one tile of rows, each row one query and one of the query heads that share a KV head, and walks over the
keys up to its last query (Dao, FlashAttention-2, 2023): tiles that no row may see are never read, and only those that
some rows may not see are masked.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl

from nanoinfer.kernels.triton import decode
from nanoinfer.kernels.triton.decode import precision_for
from nanoinfer.kernels.triton.operator import operator

_LOG2_E = 1.4426950408889634


@dataclass(frozen=True)
class Config:
    """rows: queries times heads of a group, keys: those of a tile."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int


def config_for(dtype: torch.dtype, head_dim: int) -> Config:
    """What fits the registers without spilling; float32, for checks, fills them faster and has no tensor cores."""
    if dtype.itemsize > 2:
        return Config(rows=16, keys=32, num_warps=8, num_stages=2)
    if head_dim > 128:
        return Config(rows=64, keys=32, num_warps=8, num_stages=2)
    if not decode.has_large_shared_memory():
        return Config(rows=64, keys=32, num_warps=4, num_stages=3)
    return Config(rows=128, keys=64, num_warps=8, num_stages=2)


def queries_per_tile(dtype: torch.dtype, head_dim: int, group: int) -> int:
    return max(1, config_for(dtype, head_dim).rows // group)


def work_items(query_start_loc: np.ndarray, seq_lens: np.ndarray, seqs: np.ndarray, num_queries: int) -> np.ndarray:
    """[n, 2] int32 (sequence, its first query of the tile) for tiles of so many queries; long contexts first, what is
    cached included.

    query_start_loc: [num_seqs + 1]; seq_lens: [num_seqs]; seqs: those to work on.
    """
    query_lens = query_start_loc[seqs + 1] - query_start_loc[seqs]
    tiles = -(-query_lens // num_queries)
    index = np.arange(tiles.sum()) - np.repeat(tiles.cumsum() - tiles, tiles)
    items = np.stack((np.repeat(seqs, tiles), index * num_queries), axis=1)
    first_positions = np.repeat(seq_lens[seqs] - query_lens, tiles) + items[:, 1]
    return items[np.argsort(-first_positions, kind="stable")].astype(np.int32)


@triton.jit
def _walk(
    queries: tl.tensor,
    best: tl.tensor,
    total: tl.tensor,
    acc: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    table: tl.tensor,
    kv_head: tl.tensor,
    num_kv_heads: tl.tensor,
    query_position: tl.tensor,
    start: tl.tensor,
    stop: tl.tensor,
    scale: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    TILE: tl.constexpr,
    PRECISION: tl.constexpr,
    MASKED: tl.constexpr,
) -> tl.tensor:
    """Takes in keys start to stop - 1. Not MASKED: whole tiles that every row may see."""
    dim = tl.arange(0, BLOCK_DIM)
    for first in range(start, stop, TILE):
        position = first + tl.arange(0, TILE)
        inside = position < stop
        if MASKED:
            block = tl.load(table + position // BLOCK_SIZE, mask=inside, other=0)
        else:
            block = tl.load(table + position // BLOCK_SIZE)
        slot = ((block.to(tl.int64) * num_kv_heads + kv_head) * BLOCK_SIZE + position % BLOCK_SIZE) * HEAD_DIM
        k_source, v_source = k_cache + slot[None, :] + dim[:, None], v_cache + slot[:, None] + dim[None, :]
        if MASKED or HEAD_DIM != BLOCK_DIM:
            keys = tl.load(k_source, mask=inside[None, :] & (dim < HEAD_DIM)[:, None], other=0.0)
        else:
            keys = tl.load(k_source)
        scores = tl.dot(queries, keys, input_precision=PRECISION) * scale
        if MASKED:
            visible = inside[None, :] & (position[None, :] <= query_position[:, None])
            scores = tl.where(visible, scores, float("-inf"))
        new_best = tl.maximum(best, tl.max(scores, axis=1))
        weights = tl.exp2(scores - new_best[:, None])
        decay = tl.exp2(best - new_best)
        if MASKED or HEAD_DIM != BLOCK_DIM:
            values = tl.load(v_source, mask=inside[:, None] & (dim < HEAD_DIM)[None, :], other=0.0)
        else:
            values = tl.load(v_source)
        acc = tl.dot(weights.to(values.dtype), values, acc * decay[:, None], input_precision=PRECISION)
        total = total * decay + tl.sum(weights, axis=1)
        best = new_best
    return best, total, acc


@triton.jit(do_not_specialize=["table_stride"])
def paged_prefill_kernel(
    q: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    block_tables: tl.tensor,
    seq_lens: tl.tensor,
    query_start_loc: tl.tensor,
    items: tl.tensor,
    out: tl.tensor,
    scale: tl.tensor,
    table_stride: tl.tensor,
    num_heads: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Program work item * KV heads + KV head: only a grid's first dimension may be above 65535. scale includes log2(e):
    exponentials are powers of two."""
    num_kv_heads = num_heads // GROUP
    kv_head, item = tl.program_id(0) % num_kv_heads, tl.program_id(0) // num_kv_heads
    seq = tl.load(items + 2 * item).to(tl.int64)
    first_query = tl.load(items + 2 * item + 1)
    query_start, query_stop = tl.load(query_start_loc + seq), tl.load(query_start_loc + seq + 1)
    num_queries = query_stop - query_start
    context = tl.load(seq_lens + seq) - num_queries

    row, dim = tl.arange(0, ROWS), tl.arange(0, BLOCK_DIM)
    is_row = (row < QUERIES * GROUP) & (first_query + row // GROUP < num_queries)
    # Surplus rows see what the first query sees, so that no row is without any key.
    query = tl.where(is_row, first_query + row // GROUP, first_query)
    offset = ((query_start + query).to(tl.int64) * num_heads + kv_head * GROUP + row % GROUP) * HEAD_DIM
    mask = is_row[:, None] & (dim < HEAD_DIM)[None, :]
    queries = tl.load(q + offset[:, None] + dim[None, :], mask=mask, other=0.0)
    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, BLOCK_DIM], tl.float32)
    table = block_tables + seq * table_stride
    last_query = tl.minimum(first_query + QUERIES, num_queries) - 1
    whole = (context + first_query + 1) // TILE * TILE
    best, total, acc = _walk(
        queries, best, total, acc, k_cache, v_cache, table, kv_head, num_kv_heads, context + query,
        0, whole, scale, BLOCK_SIZE, HEAD_DIM, BLOCK_DIM, TILE, PRECISION, False,
    )  # fmt: skip
    best, total, acc = _walk(
        queries, best, total, acc, k_cache, v_cache, table, kv_head, num_kv_heads, context + query,
        whole, context + last_query + 1, scale, BLOCK_SIZE, HEAD_DIM, BLOCK_DIM, TILE, PRECISION, True,
    )  # fmt: skip
    tl.store(out + offset[:, None] + dim[None, :], (acc / total[:, None]).to(out.dtype.element_ty), mask=mask)


def _fake_paged_prefill(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    items: torch.Tensor,
    out: torch.Tensor,
    scale: float,
) -> None:
    return None


@operator(
    "paged_prefill(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_tables, Tensor seq_lens, "
    "Tensor query_start_loc, Tensor items, Tensor(a!) out, float scale) -> ()",
    _fake_paged_prefill,
)
def paged_prefill(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    items: torch.Tensor,
    out: torch.Tensor,
    scale: float,
) -> None:
    """Fills out for the queries of the work items; other rows of it are left alone.

    q, out: [T, num_heads, head_dim], contiguous. caches: [blocks, num_kv_heads, block_size, head_dim], contiguous.
    block_tables: [num_seqs, columns] int32; seq_lens: [num_seqs] and query_start_loc: [num_seqs + 1] int32, on the
    device; items: [n, 2] int32 from `work_items` with `queries_per_tile`. Twin: reference.paged_attention.
    """
    num_heads, head_dim = q.shape[1:]
    num_kv_heads, block_size = k_cache.shape[1:3]
    group, config = num_heads // num_kv_heads, config_for(q.dtype, head_dim)
    if len(items):
        paged_prefill_kernel[(num_kv_heads * len(items),)](
            q, k_cache, v_cache, block_tables, seq_lens, query_start_loc, items, out, scale * _LOG2_E,
            block_tables.stride(0), num_heads, BLOCK_SIZE=block_size, HEAD_DIM=head_dim,
            BLOCK_DIM=max(16, triton.next_power_of_2(head_dim)), GROUP=group,
            QUERIES=queries_per_tile(q.dtype, head_dim, group), ROWS=max(config.rows, triton.next_power_of_2(group)),
            TILE=config.keys, PRECISION=precision_for(q.dtype), num_warps=config.num_warps,
            num_stages=config.num_stages,
        )  # fmt: skip
