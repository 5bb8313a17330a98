"""Import this before anything of nanoinfer: Triton then believes in an H200 that loads any kernel and runs none.

Everything up to the launch itself is real (how arguments are bound and specialized, and, if asked for, the compiler),
on CPU tensors. A "launch" zeroes its tensors, large ones left out. For processes of their own only.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import gpu_stand_in
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from nanoinfer.kernels import select

assert not triton.knobs.runtime.interpret, "triton was imported to interpret"
# So that the layers and the backend take Triton's kernels for tensors on a CPU.
select.is_interpreted = lambda: True

# (name of the kernel, its key): each is compiled when it is first launched.
compiled: list[tuple[str, str]] = []
launched: list[str] = []
MAX_SHARED = 232448


class _Launcher:
    def __init__(self, source: Any, metadata: Any) -> None:
        self.name = source.fn.__name__

    def __call__(self, *arguments: Any) -> None:
        _launch(self.name, arguments)


def _launch(name: str, arguments: tuple[Any, ...]) -> None:
    launched.append(name)
    gpu_stand_in.check_launch(name, arguments)
    for argument in arguments:
        # Of a pool nothing is read: it would take long.
        if isinstance(argument, torch.Tensor) and argument.numel() < 2**22:
            argument.zero_()


class _Driver:
    launcher_cls = _Launcher
    utils = SimpleNamespace(
        get_device_properties=lambda device: {"max_shared_mem": MAX_SHARED},
        load_binary=lambda name, binary, shared, device: (1, 1, 0, 0, 1024),
    )

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


driver.set_active(_Driver())
_compile = JITFunction._do_compile


def compile_for_real(yes: bool) -> None:
    """Or take it that the compiler would do its part, which test_triton.py sees to, and save the time."""

    def do_compile(self: Any, key: str, *rest: Any) -> Any:
        compiled.append((self.fn.__name__, key))
        if yes:
            return _compile(self, key, *rest)
        kernel = _Nothing(self.fn.__name__)
        self.device_caches[0][0][key] = kernel
        return kernel

    JITFunction._do_compile = do_compile


def forget(kernels: list[Any]) -> None:
    """As in a new process: what is launched will be compiled. kernels: and anything else, which is left alone."""
    compiled.clear()
    for kernel in kernels:
        if isinstance(kernel, JITFunction):
            kernel.device_caches.clear()


class _Nothing:
    function = packed_metadata = None

    def __init__(self, name: str) -> None:
        self.name = name

    def launch_metadata(self, *arguments: Any) -> None:
        return None

    def run(self, *arguments: Any) -> None:
        _launch(self.name, arguments)
