"""Rotary position embedding (Su et al., 2021), with YaRN (Peng et al., 2023) where the checkpoint asks for it.

Cosines and sines are computed once per step for the positions at hand, not kept in a table: the 2507 models' limit of
262,144 positions would cost 128 MiB a rank, and a step's few thousand values cost nothing beside its matrix products.
"""

from __future__ import annotations

import math

import torch

from nanoinfer.config import ModelConfig, YarnScaling
from nanoinfer.kernels import reference
from nanoinfer.kernels.cpu.ops import kernels_for
from nanoinfer.kernels.select import triton_kernels


class RotaryEmbedding:
    """cos and sin of a step's positions, each [T, head_dim / 2], in the model's dtype."""

    def __init__(self, config: ModelConfig, options: dict) -> None:
        self.dtype: torch.dtype = options["dtype"]
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        inv_freq = 1.0 / config.rope_theta**exponents
        self.amplitude = 1.0
        if config.yarn is not None:
            inv_freq = _yarn_frequencies(inv_freq, config.head_dim, config.rope_theta, config.yarn)
            self.amplitude = _yarn_amplitude(config.yarn)
        self.inv_freq = inv_freq.to(options["device"])
        self._triton = triton_kernels(str(options["device"]))
        self._cpu = kernels_for(self.dtype, str(options["device"]))

    def __call__(
        self, positions: torch.Tensor, out: tuple[torch.Tensor, torch.Tensor] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """out: where the compiled CPU kernel is to leave them; without it, nothing asks for a place."""
        if self._triton is not None:
            return self._triton.rotary(positions, self.inv_freq, self.amplitude, self.dtype)
        if self._cpu is not None:
            if out is None:
                cos, sin = torch.empty(2, len(positions), len(self.inv_freq), dtype=self.dtype)
                out = cos, sin
            self._cpu.rotary(positions, self.inv_freq, self.amplitude, out)
            return out
        assert out is None
        return reference.rotary(positions, self.inv_freq, self.amplitude, self.dtype)


def _yarn_frequencies(inv_freq: torch.Tensor, head_dim: int, theta: float, yarn: YarnScaling) -> torch.Tensor:
    """Frequencies that turn often within the original context are kept, slow ones divided by the factor.

    A linear ramp over the dimensions joins the two, between those that make beta_fast and beta_slow full turns.
    """

    def dimension_of(num_turns: float) -> float:
        wavelength = yarn.original_max_position_embeddings / (num_turns * 2 * math.pi)
        return head_dim * math.log(wavelength) / (2 * math.log(theta))

    low, high = dimension_of(yarn.beta_fast), dimension_of(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return inv_freq * (1 - ramp) + inv_freq / yarn.factor * ramp


def _yarn_amplitude(yarn: YarnScaling) -> float:
    """The factor on cos and sin that stands for YaRN's attention temperature."""
    if yarn.attention_factor is not None:
        return float(yarn.attention_factor)

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(yarn.factor) + 1.0 if yarn.factor > 1 else 1.0

    if yarn.mscale and yarn.mscale_all_dim:
        return mscale(yarn.mscale) / mscale(yarn.mscale_all_dim)
    return mscale(1.0)
