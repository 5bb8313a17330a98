"""SiLU-and-mul, the gate of Qwen3's MLP."""

from nanoinfer.kernels.reference import silu_and_mul

__all__ = ["silu_and_mul"]
