"""Calls of kernels that are noted instead of made, to be made later for any batch size and without Python in between.

A call's pointers are the same for every batch size if its tensors begin at the same places; its whole numbers are then
affine functions of the sizes (rows: n; elements: n * hidden_size; head_dim: constant), which two recordings tell.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

_MOST_ARGUMENTS = 18
_CALL = np.dtype(
    [("function", np.uint64), ("arguments", np.int64, _MOST_ARGUMENTS), ("number", np.float32)], align=True
)


class Recording:
    """The calls that were noted while it was active (`CPUKernels.using`), laid out as replay.cpp reads them."""

    def __init__(self) -> None:
        self._calls: list[tuple[int, list[int], float]] = []
        self._is_pointer: list[list[bool]] = []

    def note(self, function: Any, args: tuple[int | float | None, ...]) -> None:
        kinds = [kind for kind, arg in zip(function.argtypes, args, strict=True) if not isinstance(arg, float)]
        whole = [int(arg or 0) for arg in args if not isinstance(arg, float)]
        unused = _MOST_ARGUMENTS - len(whole)
        number = next((arg for arg in args if isinstance(arg, float)), 0.0)
        address = ctypes.cast(function, ctypes.c_void_p).value or 0
        self._calls.append((address, [*whole, *[0] * unused], number))
        self._is_pointer.append([kind is ctypes.c_void_p for kind in kinds] + [False] * unused)

    def calls(self) -> np.ndarray:
        """[calls] records."""
        return np.array(self._calls, _CALL)

    def growth_to(self, larger: Recording) -> np.ndarray:
        """By how much whole numbers (not pointers) of the other recording are larger, [calls, arguments] int64.

        Raises ValueError if the two are not the same calls.
        """
        mine, other = self.calls(), larger.calls()
        if len(mine) != len(other) or (mine["function"] != other["function"]).any():
            raise ValueError("the calls depend on the batch size")
        return np.where(self._is_pointer, 0, other["arguments"] - mine["arguments"])
