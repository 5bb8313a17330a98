"""A decode step's inputs, made on the device from the rows kept there; and the way back for the sampled tokens.

The host says only which rows decode and at which positions. Row -1 is padding: it gets an empty context and a slot
below zero, so that it reads nothing and writes nothing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from nanoinfer.kernels.triton.operator import operator

BLOCK = 128
_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)


@triton.jit
def _mix(z: tl.tensor) -> tl.tensor:
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def uniform_of(seed: tl.tensor, index: tl.tensor) -> tl.tensor:
    """In [0, 1), float64: two rounds of SplitMix64, as `layers.sampler.uniforms`. seed, index: uint64."""
    z = _mix(_mix(seed + _GOLDEN) + index * _GOLDEN + _GOLDEN)
    return (z >> 32).to(tl.float64) * (1.0 / 4294967296.0)


@triton.jit(do_not_specialize=["num_rows"])
def prepare_decode_kernel(
    rows: tl.tensor,
    num_computed: tl.tensor,
    last_token: tl.tensor,
    num_prompt: tl.tensor,
    seeds: tl.tensor,
    inverse: tl.tensor,
    min_p: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    block_tables: tl.tensor,
    input_ids: tl.tensor,
    positions: tl.tensor,
    slots: tl.tensor,
    seq_lens: tl.tensor,
    uniforms: tl.tensor,
    table_rows: tl.tensor,
    inverse_out: tl.tensor,
    min_p_out: tl.tensor,
    top_k_out: tl.tensor,
    top_p_out: tl.tensor,
    num_rows: tl.tensor,
    table_stride: tl.tensor,
    block_size: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < num_rows
    row = tl.load(rows + index, mask=inside, other=-1).to(tl.int64)
    is_live = inside & (row >= 0)
    position = tl.load(num_computed + index, mask=is_live, other=0).to(tl.int64)
    token = tl.load(last_token + row, mask=is_live, other=0)
    block = tl.load(block_tables + row * table_stride + position // block_size, mask=is_live, other=0)
    slot = tl.where(is_live, block.to(tl.int64) * block_size + position % block_size, -1)
    seed = tl.load(seeds + row, mask=is_live, other=0).to(tl.uint64, bitcast=True)
    output_index = position + 1 - tl.load(num_prompt + row, mask=is_live, other=0).to(tl.int64)
    tl.store(input_ids + index, token, mask=inside)
    tl.store(positions + index, position, mask=inside)
    tl.store(slots + index, slot, mask=inside)
    tl.store(seq_lens + index, tl.where(is_live, position + 1, 0).to(tl.int32), mask=inside)
    tl.store(uniforms + index, uniform_of(seed, output_index.to(tl.uint64, bitcast=True)), mask=inside)
    tl.store(table_rows + index, tl.maximum(row, 0).to(tl.int32), mask=inside)
    tl.store(inverse_out + index, tl.load(inverse + row, mask=is_live, other=0.0), mask=inside)
    tl.store(min_p_out + index, tl.load(min_p + row, mask=is_live, other=0.0), mask=inside)
    tl.store(top_k_out + index, tl.load(top_k + row, mask=is_live, other=0), mask=inside)
    tl.store(top_p_out + index, tl.load(top_p + row, mask=is_live, other=0.0), mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def store_tokens_kernel(
    last_token: tl.tensor, rows: tl.tensor, tokens: tl.tensor, num_rows: tl.tensor, BLOCK: tl.constexpr
) -> None:
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(rows + index, mask=index < num_rows, other=-1).to(tl.int64)
    token = tl.load(tokens + index, mask=index < num_rows, other=0)
    # A row whose logits were not finite has no token; the host learns of it from the -1 itself.
    tl.store(last_token + row, tl.maximum(token, 0), mask=(index < num_rows) & (row >= 0))


def _fake_prepare_decode(
    rows: torch.Tensor,
    num_computed: torch.Tensor,
    last_token: torch.Tensor,
    num_prompt: torch.Tensor,
    seeds: torch.Tensor,
    inverse: torch.Tensor,
    min_p: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    block_tables: torch.Tensor,
    block_size: int,
) -> tuple[torch.Tensor, ...]:
    i32, i64, f32, f64 = torch.int32, torch.int64, torch.float32, torch.float64
    dtypes = (i64, i64, i64, i32, f64, i32, f32, f32, i32, f32)
    return tuple(rows.new_empty(len(rows), dtype=dtype) for dtype in dtypes)


@operator(
    "prepare_decode(Tensor rows, Tensor num_computed, Tensor last_token, Tensor num_prompt, Tensor seeds, "
    "Tensor inverse, Tensor min_p, Tensor top_k, Tensor top_p, Tensor block_tables, int block_size) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _fake_prepare_decode,
)
def prepare_decode(
    rows: torch.Tensor,
    num_computed: torch.Tensor,
    last_token: torch.Tensor,
    num_prompt: torch.Tensor,
    seeds: torch.Tensor,
    inverse: torch.Tensor,
    min_p: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    block_tables: torch.Tensor,
    block_size: int,
) -> tuple[torch.Tensor, ...]:
    """(input_ids, positions, slots: int64; seq_lens: int32; uniforms: float64; table_rows: int32; inverse, min_p:
    float32; top_k: int32; top_p: float32), [n] each, one query per row.

    rows, num_computed: [n] int32. Kept rows: last_token [R] int64, num_prompt [R] int32, seeds [R] int64 (the bits of
    uint64), the settings of `DeviceSampling` [R], block_tables [R, columns] int32. table_rows: `rows` with 0 for
    padding, which is greedy. Twin: reference.prepare_decode.
    """
    kept = (last_token, num_prompt, seeds, inverse, min_p, top_k, top_p, block_tables)
    outputs = _fake_prepare_decode(rows, num_computed, *kept, block_size)
    prepare_decode_kernel[(triton.cdiv(len(rows), BLOCK),)](
        rows, num_computed, *kept, *outputs, len(rows), block_tables.stride(0), block_size, BLOCK=BLOCK, num_warps=4
    )
    return outputs


def _fake_store_tokens(last_token: torch.Tensor, rows: torch.Tensor, tokens: torch.Tensor) -> None:
    return None


@operator("store_tokens(Tensor(a!) last_token, Tensor rows, Tensor tokens) -> ()", _fake_store_tokens)
def store_tokens(last_token: torch.Tensor, rows: torch.Tensor, tokens: torch.Tensor) -> None:
    """last_token[rows] = tokens, where rows are not padding. rows: [n] int32; last_token, tokens: int64."""
    store_tokens_kernel[(triton.cdiv(len(rows), BLOCK),)](last_token, rows, tokens, len(rows), BLOCK=BLOCK, num_warps=4)
