"""For dry runs of what runs on GPUs only, two ways. Either "cuda" means the CPU, nothing is pinned, events do not
measure, graphs are called again, and tensors remember that they would be on the GPU: what could not run there does not
run here. Or tensors are fake ones of a "cuda" that torch was not built with: they have no values for the host to read.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

CUDA = torch.device("cuda", 0)
# The storages of tensors that would be on the GPU, by their address, which they keep as long as they are referred to.
_on_gpu: dict[int, StorageWeakRef] = {}


def is_on_gpu(value: Any) -> bool:
    if not isinstance(value, torch.Tensor):
        return False
    with torch._C.DisableTorchFunction():
        found = _on_gpu.get(value.untyped_storage()._cdata)
    return found is not None and not found.expired()


def _mark(value: Any) -> None:
    if isinstance(value, torch.Tensor):
        with torch._C.DisableTorchFunction():
            storage = value.untyped_storage()
            _on_gpu[storage._cdata] = StorageWeakRef(storage)


def check_devices(name: str, values: list[Any]) -> None:
    """As torch and Triton do on a GPU: numbers may come from anywhere, all else from one device."""
    tensors = [value for value in values if isinstance(value, torch.Tensor) and value.dim() > 0]
    if len({is_on_gpu(tensor) for tensor in tensors}) > 1:
        where = ", ".join(f"{list(tensor.shape)} on the {'GPU' if is_on_gpu(tensor) else 'CPU'}" for tensor in tensors)
        raise RuntimeError(f"{name}: expected all tensors to be on the same device, but got {where}")


def check_launch(kernel: str, arguments: tuple[Any, ...]) -> None:
    """As Triton does where there is a GPU."""
    for argument in arguments:
        if CudaIsCPU.is_active and isinstance(argument, torch.Tensor) and not is_on_gpu(argument):
            raise ValueError(f"{kernel}: a tensor {list(argument.shape)} cannot be accessed from Triton (cpu tensor?)")


class CudaIsCPU(TorchFunctionMode):
    is_active = False
    _is_in_operator = False

    def __enter__(self) -> CudaIsCPU:
        CudaIsCPU.is_active = True
        self._devices = _Devices(self)
        self._devices.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        CudaIsCPU.is_active = False
        super().__exit__(*error)
        self._devices.__exit__(*error)

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Within one of our operators, which the mode has seen already."""
        super().__enter__()
        self._is_in_operator = True
        try:
            yield
        finally:
            self._is_in_operator = False
            super().__exit__(None, None, None)

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        source = args[0] if args else None
        if function == torch.Tensor.device.__get__ and is_on_gpu(source):
            return CUDA
        if function == torch.Tensor.is_cuda.__get__:
            return is_on_gpu(source)
        if function in (torch.Tensor.numpy, torch.Tensor.__array__) and is_on_gpu(source):
            raise TypeError("can't convert a cuda tensor to numpy")
        if function is torch.Tensor.data_ptr and is_on_gpu(source) and not self._is_in_operator:
            raise RuntimeError("the address of a cuda tensor, outside of our operators")
        if function is torch.Tensor.cuda:
            function, args = torch.Tensor.to, (source, CUDA)
        if function is torch.Tensor.cpu:
            function, args = torch.Tensor.to, (source, torch.device("cpu"))
        if function in (torch.device, torch._C._nn._parse_to):  # the latter is what Module.to makes of its arguments
            return function(*args, **(kwargs or {}))
        kwargs = {name: value for name, value in (kwargs or {}).items() if name != "pin_memory"}
        named = [value for value in (*args, *kwargs.values()) if _is_device(value)]
        result = function(*tree_map(_on_cpu, args), **tree_map(_on_cpu, kwargs))
        if function is torch.Tensor.to and named:
            return _moved(result, is_on_gpu(source), str(named[0]).startswith("cuda"))
        if function is torch.Tensor.to and len(args) > 1 and isinstance(args[1], torch.Tensor):
            return _moved(result, is_on_gpu(source), is_on_gpu(args[1]))
        if any(str(device).startswith("cuda") for device in named):
            _mark(result)
        return result


def _is_device(value: Any) -> bool:
    return isinstance(value, torch.device) or (isinstance(value, str) and value.startswith(("cuda", "cpu")))


def _on_cpu(value: Any) -> Any:
    return "cpu" if _is_device(value) else value


def _moved(result: torch.Tensor, was_on_gpu: bool, is_to_be: bool) -> torch.Tensor:
    if was_on_gpu == is_to_be:
        return result
    result = result.clone()
    with torch._C.DisableTorchFunction():
        _on_gpu.pop(result.untyped_storage()._cdata, None)
    if is_to_be:
        _mark(result)
    return result


class _Devices(TorchDispatchMode):
    """What comes out is where what went in is."""

    # The target keeps its place; indices on the CPU are sent.
    COPIES = ("aten.copy_", "aten.index.", "aten.index_put", "aten._index_put")

    def __init__(self, functions: CudaIsCPU) -> None:
        super().__init__()
        self._functions = functions

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, values = str(function), tree_leaves((args, kwargs or {}))
        if not name.startswith(self.COPIES):
            check_devices(name, values)
        elif name.startswith("aten.copy_"):
            return function(*args, **(kwargs or {}))
        elif not is_on_gpu(args[0]) and any(map(is_on_gpu, values)):
            raise RuntimeError(f"{name}: indices on the GPU for a tensor on the CPU")
        if name.startswith("nanoinfer."):
            # What our operators do is seen as well: the results that they allocate.
            with self._functions.again(), self:
                keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
                result = function.redispatch(keys, *args, **(kwargs or {}))
        else:
            result = function(*args, **(kwargs or {}))
        if any(map(is_on_gpu, values)):
            tree_map(_mark, result)
        return result


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
    def __init__(self, enable_timing: bool = False) -> None:
        self.enable_timing = enable_timing

    def record(self) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Event) -> float:
        assert self.enable_timing and other.enable_timing
        return 1.0


def pretend(monkeypatch: pytest.MonkeyPatch) -> None:
    """That there is an H200, with 100 GiB free, on which a step takes nothing; graphs are called again."""
    from nanoinfer.worker import cuda_graph, model_runner

    gib = 2**30
    properties = SimpleNamespace(multi_processor_count=132)
    answers: dict[str, Any] = {
        "is_available": True, "device_count": 1, "get_device_capability": (9, 0), "get_device_properties": properties,
        "get_device_name": "NVIDIA H200", "mem_get_info": (100 * gib, 140 * gib), "memory_reserved": 0,
        "max_memory_reserved": 0, "graph_pool_handle": (0, 1), "empty_cache": None, "synchronize": None,
        "reset_peak_memory_stats": None,
    }  # fmt: skip
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(model_runner, "graph_factory", cuda_graph.graph_factory)
    monkeypatch.setattr(cuda_graph, "CudaGraph", Graph)
