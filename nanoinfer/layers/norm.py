"""RMSNorm, alone or fused with the addition of the residual stream. Every rank holds the whole weight."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from nanoinfer.kernels import reference
from nanoinfer.kernels.select import norm_kernels
from nanoinfer.layers.shard import ShardSpec, whole


class RMSNorm(nn.Module):
    """Over the last dimension, of `size`: the hidden state, or one head for Qwen3's q and k norms."""

    def __init__(self, size: int, eps: float, options: dict) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size, **options), requires_grad=False)
        self._kernels = norm_kernels(**options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._kernels is not None:
            return self._kernels.rms_norm(x.contiguous(), self.weight, self.eps)
        return reference.rms_norm(x, self.weight, self.eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm(x + residual), x + residual); `residual` may be overwritten."""
        if self._kernels is not None:
            return self._kernels.rms_norm(x.contiguous(), self.weight, self.eps, residual), residual
        return reference.add_rms_norm(x, residual, self.weight, self.eps)

    def shards(self, name: str) -> Iterator[ShardSpec]:
        yield whole(f"{name}.weight", self.weight)
