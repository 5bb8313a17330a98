"""Import this before anything that imports triton: its kernels then run in Triton's interpreter, on CPU tensors.

For processes of their own only, since the switch is read when triton is imported.
"""

# ruff: noqa: E402

from __future__ import annotations

import os
import sys
from typing import Any

assert "triton" not in sys.modules, "triton was imported before its interpreter was asked for"
os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

_patch_tensor = interpreter._patch_lang_tensor


def _patch(tensor: Any, scope: Any) -> None:
    """triton 3.6 makes a loop's bound an int by `int(array)`, which numpy 2.4 refuses for arrays of one dimension."""
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


interpreter._patch_lang_tensor = _patch

_create_dot = interpreter.InterpreterBuilder.create_dot


def _dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
    """The interpreter holds bf16 as uint16 and multiplies these as the integers that they are not."""
    a, b = (self.cast_impl(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b))
    return _create_dot(self, a, b, *rest)


_cast = interpreter.InterpreterBuilder.cast_impl


def _cast_rounded(self: Any, source: Any, target: Any) -> Any:
    """The interpreter cuts float32 off to bf16; a GPU rounds to the nearest, as torch does."""
    if source.dtype.scalar != tl.float32 or target.scalar != tl.bfloat16:
        return _cast(self, source, target)
    rounded = torch.from_numpy(np.ascontiguousarray(source.data)).bfloat16().view(torch.int16).numpy()
    return interpreter.TensorHandle(rounded.view(np.uint16), tl.bfloat16)


interpreter.InterpreterBuilder.create_dot = _dot
interpreter.InterpreterBuilder.cast_impl = _cast_rounded
