"""SiLU-and-mul, the gate of Qwen3's MLP."""

import torch

from nanoinfer.kernels import reference
from nanoinfer.kernels.select import triton_kernels


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """x: [..., 2 * size] with the gate's half first; returns [..., size]."""
    kernels = triton_kernels(x.device.type)
    return reference.silu_and_mul(x) if kernels is None else kernels.silu_and_mul(x)
