"""Cosines and sines of a step's positions, once for all layers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from nanoinfer.kernels.triton.operator import operator

TOKENS = 8


@triton.jit(do_not_specialize=["num_tokens"])
def rotary_kernel(
    positions: tl.tensor,
    inv_freq: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    amplitude: tl.tensor,
    num_tokens: tl.tensor,
    half: tl.tensor,
    TOKENS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
) -> None:
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    dim = tl.arange(0, BLOCK_HALF)
    position = tl.load(positions + token, mask=token < num_tokens, other=0).to(tl.float32)
    angle = position[:, None] * tl.load(inv_freq + dim, mask=dim < half, other=0.0)[None, :]
    offset, mask = token[:, None] * half + dim[None, :], (token < num_tokens)[:, None] & (dim < half)[None, :]
    tl.store(cos + offset, (tl.cos(angle) * amplitude).to(cos.dtype.element_ty), mask=mask)
    tl.store(sin + offset, (tl.sin(angle) * amplitude).to(sin.dtype.element_ty), mask=mask)


def _fake_rotary(
    positions: torch.Tensor, inv_freq: torch.Tensor, amplitude: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    cos, sin = (inv_freq.new_empty(len(positions), len(inv_freq), dtype=dtype) for _ in range(2))
    return cos, sin


@operator(
    "rotary(Tensor positions, Tensor inv_freq, float amplitude, ScalarType dtype) -> (Tensor, Tensor)", _fake_rotary
)
def rotary(
    positions: torch.Tensor, inv_freq: torch.Tensor, amplitude: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """(cos, sin), [T, half] each, of positions [T] int64 times inv_freq [half] float32. Twin: reference.rotary."""
    cos, sin = _fake_rotary(positions, inv_freq, amplitude, dtype)
    if len(positions):
        rotary_kernel[(triton.cdiv(len(positions), TOKENS),)](
            positions, inv_freq, cos, sin, amplitude, len(positions), len(inv_freq), TOKENS=TOKENS,
            BLOCK_HALF=triton.next_power_of_2(len(inv_freq)), num_warps=2,
        )  # fmt: skip
    return cos, sin
