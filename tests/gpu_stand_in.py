"""For dry runs of what runs on GPUs only: either "cuda" means the CPU, nothing is pinned, events do not measure, graphs
are called again; or tensors are fake ones of a "cuda" that torch was not built with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.overrides import TorchFunctionMode


class CudaIsCPU(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.Tensor.cuda:
            return args[0]
        kwargs = {name: _on_cpu(value) for name, value in (kwargs or {}).items() if name != "pin_memory"}
        return function(*map(_on_cpu, args), **kwargs)


def _on_cpu(value: Any) -> Any:
    return "cpu" if isinstance(value, str | torch.device) and str(value).startswith("cuda") else value


class OnFakeGPU(TorchFunctionMode):
    """`x[...]`, `x.copy_(y)` and `x.to("cuda")` want torch to be built with CUDA even where tensors are fake; the
    operators below do not. What has values, on the host, may be read."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.Tensor.__getitem__:
            return self.view(*args)
        if function is torch.Tensor.__setitem__:
            return self.view(*args[:2]).fill_(args[2])
        if function is torch.Tensor.to and len(args) == 2:
            if isinstance(args[1], torch.Tensor):
                return torch.ops.aten._to_copy(args[0], device=args[1].device, dtype=args[1].dtype)
            if str(args[1]).startswith("cuda"):
                return torch.ops.aten._to_copy(args[0], device=args[1])
        if function is torch.Tensor.copy_:
            return torch.ops.aten.copy_(*args)
        if function is torch.Tensor.numpy and not isinstance(args[0], FakeTensor):
            with unset_fake_temporarily():
                return function(*args)
        return function(*args, **(kwargs or {}))

    def view(self, x: torch.Tensor, index: Any) -> torch.Tensor:
        dim = 0
        for one in index if isinstance(index, tuple) else (index,):
            if isinstance(one, int):
                x = x.select(dim, one)
            elif isinstance(one, slice):
                x, dim = torch.ops.aten.slice.Tensor(x, dim, one.start, one.stop), dim + 1
            else:
                x, dim = x.index_select(dim, one), dim + 1
        return x


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
