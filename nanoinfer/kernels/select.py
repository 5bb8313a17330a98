"""Which compiled kernels there are for a device: the CPU's, Triton's, or none, where the twins in reference.py compute.

Triton is imported when it is first asked for, so that the package runs where it is not installed.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from typing import TYPE_CHECKING

import torch

from nanoinfer.kernels.cpu.ops import CPUKernels, kernels_for

if TYPE_CHECKING:
    from nanoinfer.kernels.triton.ops import TritonKernels


def is_interpreted() -> bool:
    """Whether Triton's kernels run on CPU tensors in this process. The switch is Triton's own, for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@functools.cache
def triton_kernels(device: str) -> TritonKernels | None:
    if device != "cuda" and not is_interpreted():
        return None
    if importlib.util.find_spec("triton") is None:
        return None
    from nanoinfer.kernels.triton.ops import TritonKernels

    return TritonKernels()


def norm_kernels(dtype: torch.dtype, device: str) -> CPUKernels | TritonKernels | None:
    """Kernels with `rms_norm`."""
    return triton_kernels(device) or kernels_for(dtype, device)
