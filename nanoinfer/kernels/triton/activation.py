"""SiLU-and-mul, the gate of Qwen3's MLP."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from nanoinfer.kernels.triton.operator import operator

BLOCK = 1024


@triton.jit
def silu_and_mul_kernel(x: tl.tensor, out: tl.tensor, size: tl.tensor, BLOCK: tl.constexpr) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    gate = tl.load(x + row * 2 * size + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * size + size + columns, mask=inside, other=0.0).to(tl.float32)
    # exp(-gate) of a very negative gate is infinite, and gate / infinity is the zero that is wanted.
    value = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * size + columns, value.to(out.dtype.element_ty), mask=inside)


def _fake(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], x.shape[-1] // 2)


@operator("silu_and_mul(Tensor x) -> Tensor", _fake)
def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """x: [..., 2 * size], contiguous, the gate first. Returns [..., size]. Twin: reference.silu_and_mul."""
    out = _fake(x)
    size = out.shape[-1]
    rows = out.numel() // size
    if rows:
        silu_and_mul_kernel[(rows, triton.cdiv(size, BLOCK))](x, out, size, BLOCK=BLOCK, num_warps=4)
    return out
