"""RMSNorm, alone or with the addition of the residual stream. One program per row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from nanoinfer.kernels.triton.operator import operator


@triton.jit
def rms_norm_kernel(
    x: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    size: tl.tensor,
    eps: tl.tensor,
    BLOCK: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
) -> None:
    """Rounds where the twin rounds: the sum, the normed value, the product with the weight."""
    dtype = out.dtype.element_ty
    row = tl.program_id(0).to(tl.int64) * size
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    values = tl.load(x + row + columns, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        values += tl.load(residual + row + columns, mask=inside, other=0.0).to(tl.float32)
        rounded = values.to(dtype)
        tl.store(residual + row + columns, rounded, mask=inside)
        values = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, axis=0) / size + eps)
    normed = (values * scale).to(dtype).to(tl.float32)
    gain = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row + columns, (gain * normed).to(dtype), mask=inside)


def num_warps_for(size: int) -> int:
    return 4 if size <= 2048 else 8


def _launch(x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
    out = torch.empty_like(x)
    size = x.shape[-1]
    rows = x.numel() // size
    if rows:
        rms_norm_kernel[(rows,)](
            x, x if residual is None else residual, weight, out, size, eps, BLOCK=triton.next_power_of_2(size),
            HAS_RESIDUAL=residual is not None, num_warps=num_warps_for(size),
        )  # fmt: skip
    return out


def _fake_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return torch.empty_like(x)


@operator("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor", _fake_rms_norm)
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x: [..., size], contiguous; weight: [size]. Twin: reference.rms_norm."""
    return _launch(x, None, weight, eps)


def _fake_add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return torch.empty_like(x)


@operator("add_rms_norm(Tensor x, Tensor(a!) residual, Tensor weight, float eps) -> Tensor", _fake_add_rms_norm)
def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The norm of residual += x. x, residual: [..., size], contiguous. Twin: reference.add_rms_norm."""
    return _launch(x, residual, weight, eps)
