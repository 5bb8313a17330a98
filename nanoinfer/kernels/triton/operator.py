"""`operator`: makes a torch operator of a function that launches a kernel.

`torch.library.Library` is used as it stands, without the wrappers of `custom_op`, which are host time in every call: a
step without a graph makes several calls a layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_LIBRARY = torch.library.Library("nanoinfer", "FRAGMENT")


def operator(schema: str, fake: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers the decorated function as `nanoinfer::<schema>` for CUDA, and for the CPU where triton interprets.

    fake: gives empty outputs of the right shapes, dtypes and devices.
    """
    name = schema.split("(")[0]

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        _LIBRARY.define(schema)
        for key in ("CUDA", "CPU"):
            _LIBRARY.impl(name, function, key)
        torch.library.register_fake(f"nanoinfer::{name}", fake, lib=_LIBRARY)
        return getattr(torch.ops.nanoinfer, name).default

    return register
