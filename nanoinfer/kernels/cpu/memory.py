"""Memory for the CPU kernels: huge pages, and a workspace for the results of a step.

Fresh memory is mapped page by page at first use, and the allocator gives large pieces back as soon as they are free: of
a prefill step with 1,024 tokens that was a quarter (Qwen3-0.6B: 820 -> 600 ms).
"""

from __future__ import annotations

import ctypes
import math
import mmap
import sys
import threading
import time

import torch

_HUGE_PAGE = 2 << 20
_MADV_POPULATE_WRITE = 23
_MAPPING_SECONDS = 3.0
_LINE = 64


class Workspace:
    """Hands memory out in a ring, for results that are read soon.

    num_bytes: a result is overwritten when as much has been handed out, itself included.
    largest: bytes of the largest piece that is handed out; for a larger one there is other memory.
    """

    def __init__(self, num_bytes: int, largest: int) -> None:
        self._largest = largest
        # A piece that does not fit into the ring's end leaves it unused.
        self.memory = huge_empty((_whole_lines(num_bytes) + _whole_lines(largest),), torch.uint8)
        self._at = 0

    def restart(self) -> None:
        """Goes on at the ring's beginning."""
        self._at = 0

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Uninitialized, aligned to cache lines."""
        count = math.prod(shape)
        if count * dtype.itemsize > self._largest:
            return torch.empty(shape, dtype=dtype)
        size = _whole_lines(count * dtype.itemsize)
        if self._at + size > len(self.memory):
            self._at = 0
        result = self.memory[self._at : self._at + size].view(dtype)[:count].view(shape)
        self._at += size
        return result

    def holds(self, result: torch.Tensor) -> bool:
        """Whether a result lies in the ring."""
        return 0 <= result.data_ptr() - self.memory.data_ptr() < len(self.memory)


def _whole_lines(num_bytes: int) -> int:
    return -(-num_bytes // _LINE) * _LINE


def huge_empty(shape: tuple[int, ...], dtype: torch.dtype, *, mapped_parts: int = 0) -> torch.Tensor:
    """Uninitialized (zero) memory on huge pages where the kernel grants them: read about a fifth faster here.

    mapped_parts: if not 0, pages are mapped now and not at first use, as many as a few seconds allow, and equally many
    from the front of each of so many equal parts. In a virtual machine whose host has to find the memory first, one
    huge page was seen to take 5 ms, which a step would pay for; elsewhere it is 0.1.
    """
    size = math.prod(shape) * dtype.itemsize
    if size < _HUGE_PAGE:
        return torch.zeros(shape, dtype=dtype)
    # Whole huge pages, from the first byte to the last: mmap promises no alignment to them.
    whole = -(-size // _HUGE_PAGE) * _HUGE_PAGE
    region = mmap.mmap(-1, whole + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        region.madvise(mmap.MADV_HUGEPAGE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(region))
    offset = -start % _HUGE_PAGE
    if mapped_parts and sys.platform == "linux":
        part = size // mapped_parts
        _map_pages(
            sorted(range(start + offset, start + offset + whole, _HUGE_PAGE), key=lambda p: (p - start - offset) % part)
        )
    return torch.frombuffer(region, dtype=dtype, count=math.prod(shape), offset=offset).view(shape)


def _map_pages(pages: list[int]) -> None:
    """Maps huge pages at these addresses, in this order, until all are or time is over."""
    madvise, stop, left = ctypes.CDLL(None).madvise, time.monotonic() + _MAPPING_SECONDS, iter(pages)

    def work() -> None:
        for page in left:
            # Linux 5.14 and later; where it is refused, pages are mapped at first use.
            refused = madvise(ctypes.c_void_p(page), ctypes.c_size_t(_HUGE_PAGE), _MADV_POPULATE_WRITE)
            if refused or time.monotonic() > stop:
                return

    threads = [threading.Thread(target=work) for _ in range(torch.get_num_threads())]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
