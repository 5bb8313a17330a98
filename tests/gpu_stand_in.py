"""For dry runs of what runs on GPUs only: "cuda" means the CPU, nothing is pinned, events do not measure, graphs are
called again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class CudaIsCPU(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.Tensor.cuda:
            return args[0]
        kwargs = {name: _on_cpu(value) for name, value in (kwargs or {}).items() if name != "pin_memory"}
        return function(*map(_on_cpu, args), **kwargs)


def _on_cpu(value: Any) -> Any:
    return "cpu" if isinstance(value, str | torch.device) and str(value).startswith("cuda") else value


class Graph:
    def __init__(self, pool: Any = None) -> None:
        pass

    def capture(self, function: Callable[[], None]) -> None:
        self.function = function
        function()

    def replay(self) -> None:
        self.function()


class Event:
    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None: ...

    def elapsed_time(self, other: Event) -> float:
        return 1.0
