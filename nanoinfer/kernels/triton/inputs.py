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
    block_tables: tl.tensor,
    input_ids: tl.tensor,
    positions: tl.tensor,
    slots: tl.tensor,
    seq_lens: tl.tensor,
    uniforms: tl.tensor,
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
    block_tables: torch.Tensor,
    block_size: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    ids, positions, slots = (last_token.new_empty(len(rows)) for _ in range(3))
    return ids, positions, slots, rows.new_empty(len(rows)), rows.new_empty(len(rows), dtype=torch.float64)


@operator(
    "prepare_decode(Tensor rows, Tensor num_computed, Tensor last_token, Tensor num_prompt, Tensor seeds, "
    "Tensor block_tables, int block_size) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _fake_prepare_decode,
)
def prepare_decode(
    rows: torch.Tensor,
    num_computed: torch.Tensor,
    last_token: torch.Tensor,
    num_prompt: torch.Tensor,
    seeds: torch.Tensor,
    block_tables: torch.Tensor,
    block_size: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(input_ids, positions, slots: int64; seq_lens: int32; uniforms: float64), [n] each, one query per row.

    rows, num_computed: [n] int32. Kept rows: last_token [R] int64, num_prompt [R] int32, seeds [R] int64 (the bits of
    uint64), block_tables [R, columns] int32. Twin: reference.prepare_decode.
    """
    outputs = _fake_prepare_decode(rows, num_computed, last_token, num_prompt, seeds, block_tables, block_size)
    prepare_decode_kernel[(triton.cdiv(len(rows), BLOCK),)](
        rows, num_computed, last_token, num_prompt, seeds, block_tables, *outputs, len(rows), block_tables.stride(0),
        block_size, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    return outputs


def _fake_store_tokens(last_token: torch.Tensor, rows: torch.Tensor, tokens: torch.Tensor) -> None:
    return None


@operator("store_tokens(Tensor(a!) last_token, Tensor rows, Tensor tokens) -> ()", _fake_store_tokens)
def store_tokens(last_token: torch.Tensor, rows: torch.Tensor, tokens: torch.Tensor) -> None:
    """last_token[rows] = tokens, where rows are not padding. rows: [n] int32; last_token, tokens: int64."""
    store_tokens_kernel[(triton.cdiv(len(rows), BLOCK),)](last_token, rows, tokens, len(rows), BLOCK=BLOCK, num_warps=4)
