"""What the layers call on a GPU. Attention's kernels are called by their backend, the sampler's by its layer."""

from __future__ import annotations

import torch

from nanoinfer.kernels.triton import activation, norm
from nanoinfer.kernels.triton import rotary as rotary_kernels


class TritonKernels:
    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        """norm(x), or norm(residual += x). x, residual: [..., size], contiguous."""
        out: torch.Tensor
        out = norm.rms_norm(x, weight, eps) if residual is None else norm.add_rms_norm(x, residual, weight, eps)
        return out

    def rotary(
        self, positions: torch.Tensor, inv_freq: torch.Tensor, amplitude: float, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(cos, sin), [T, half] each, of positions [T] times inv_freq [half]."""
        cos, sin = rotary_kernels.rotary(positions, inv_freq, amplitude, dtype)
        return cos, sin

    def silu_and_mul(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., 2 * size], the gate first; returns [..., size]."""
        out: torch.Tensor = activation.silu_and_mul(x.contiguous())
        return out
