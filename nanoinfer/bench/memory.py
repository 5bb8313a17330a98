"""What a process holds beside weights and KV cache: `rss_beyond_gib` of the benchmark's report. Linux only.

Weights are the parameters and what each `LinearMethod` made of them, so a tied table that is held twice counts twice.
Of the KV pool only resident pages count, since the pool takes memory as its blocks are first written.
"""

from __future__ import annotations

import ctypes
import mmap
import re
from collections.abc import Iterator
from pathlib import Path

import torch

from nanoinfer.executor.base import Executor
from nanoinfer.executor.uniproc import UniprocExecutor

_STATUS, _CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def reset_peak_rss() -> None:
    """Forgets the peak so far; without effect where the kernel does not offer it."""
    if _CLEAR_REFS.exists():
        _CLEAR_REFS.write_text("5")


def rss_beyond(executor: Executor) -> int | None:
    """Bytes of this process's peak since `reset_peak_rss`, beyond weights and KV; None where that cannot be told."""
    if not isinstance(executor, UniprocExecutor) or not _CLEAR_REFS.exists():
        return None
    runner = executor.runner
    if runner.device != "cpu":
        return None
    peak = re.search(r"VmHWM:\s*(\d+) kB", _STATUS.read_text())
    assert peak is not None
    kv_bytes = sum(resident_bytes(tensor) for tensor in _distinct(tensors_of(runner.kv_cache)))
    return 1024 * int(peak[1]) - weight_bytes(runner.model) - kv_bytes


def weight_bytes(model: torch.nn.Module) -> int:
    found: list[torch.Tensor] = []
    for module in model.modules():
        found += module.parameters(recurse=False)
        found += tensors_of(getattr(module, "method", None))
    return sum(tensor.nbytes for tensor in _distinct(found))


def tensors_of(value: object) -> Iterator[torch.Tensor]:
    """All tensors in a value of ours, its containers and its own parts."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from tensors_of(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from tensors_of(part)
    elif type(value).__module__.startswith("nanoinfer."):
        yield from tensors_of(vars(value))


def _distinct(tensors: list[torch.Tensor] | Iterator[torch.Tensor]) -> list[torch.Tensor]:
    return list({tensor.data_ptr(): tensor for tensor in tensors}.values())


def resident_bytes(tensor: torch.Tensor) -> int:
    """How much of a contiguous CPU tensor is in memory, in whole pages. Raises OSError if the kernel refuses."""
    page = mmap.PAGESIZE
    start = tensor.data_ptr() // page * page
    size = tensor.data_ptr() + tensor.nbytes - start
    pages = (ctypes.c_ubyte * -(-size // page))()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mincore(ctypes.c_void_p(start), ctypes.c_size_t(size), pages) != 0:
        raise OSError(ctypes.get_errno(), "mincore")
    return page * int(torch.frombuffer(pages, dtype=torch.uint8).bitwise_and(1).sum())
