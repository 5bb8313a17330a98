"""How large the pool of KV blocks may be: what is asked for, or what memory allows.

Memory comes from the cgroup (version 1 or 2) as well as from the host: in a container the host's total is not ours.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

from nanoinfer.config import EngineConfig

GIB = 2**30
_DEFAULT_CPU_BYTES = 4 * GIB
_DEFAULT_CPU_FRACTION = 0.4


def num_cpu_blocks(config: EngineConfig, bytes_per_block: int, available: int) -> int:
    """Blocks for one rank on a CPU with `available` bytes left, which all ranks share, as they do `cpu_kvcache_gib`.

    Raises ValueError if they don't fit, with the bytes.
    """
    available //= config.tensor_parallel_size
    if config.num_kvcache_blocks is not None:
        needed = config.num_kvcache_blocks * bytes_per_block
        source = f"num_kvcache_blocks={config.num_kvcache_blocks}"
    elif config.cpu_kvcache_gib is not None:
        needed = int(config.cpu_kvcache_gib * GIB) // config.tensor_parallel_size
        source = f"cpu_kvcache_gib={config.cpu_kvcache_gib}"
    else:
        needed = min(_DEFAULT_CPU_BYTES // config.tensor_parallel_size, int(_DEFAULT_CPU_FRACTION * available))
        source = "the default pool"
    num_blocks = config.num_kvcache_blocks or needed // bytes_per_block
    if num_blocks < 1:
        raise ValueError(
            f"one KV block needs {bytes_per_block} bytes, but {source} allows {needed} of {available} available bytes; "
            "raise cpu_kvcache_gib, free memory, or use a smaller kvcache_block_size"
        )
    if needed > available:
        raise ValueError(
            f"{source} needs {needed} bytes for the KV cache, but only {available} bytes of memory are available; "
            "lower it, or leave it out to use 40 % of what is available"
        )
    return num_blocks


def return_freed_memory() -> None:
    """Gives free pages in the middle of the heap back to the system, which glibc does not do by itself.

    Packing replaces the weights one by one and so leaves holes of their size (0.8 GiB for Qwen3-0.6B).
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def available_memory(root: Path = Path("/")) -> int:
    """Bytes that this process may still take: the least of the host's and of every enclosing cgroup's.

    Page cache that the kernel would drop under pressure counts as available, as in /proc/meminfo's MemAvailable.
    `root` is where /proc and /sys are found.
    """
    left = [_meminfo_available(root)]
    for directory, limit_name, usage_name in _cgroup_directories(root):
        limit, usage = _read_int(directory / limit_name), _read_int(directory / usage_name)
        if limit is not None and usage is not None:
            left.append(limit - usage + _reclaimable(directory))
    return max(0, min(left))


def _meminfo_available(root: Path) -> int:
    meminfo = root / "proc/meminfo"
    for line in meminfo.read_text().splitlines() if meminfo.is_file() else ():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    # No Linux: what there is in all.
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _cgroup_directories(root: Path) -> list[tuple[Path, str, str]]:
    """(directory, name of the limit file, name of the usage file) of our memory cgroup and all its parents."""
    membership = root / "proc/self/cgroup"
    if not membership.is_file():
        return []
    found = []
    for line in membership.read_text().splitlines():
        hierarchy, controllers, path = line.split(":", 2)
        if hierarchy == "0" and not controllers:
            base, names = root / "sys/fs/cgroup", ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            base, names = root / "sys/fs/cgroup/memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        directory = base / path.lstrip("/")
        # In a container the path may be the host's, and only the mount's root be visible.
        while base in (directory, *directory.parents):
            found.append((directory, *names))
            directory = directory.parent
    return found


def _reclaimable(directory: Path) -> int:
    stat = directory / "memory.stat"
    if not stat.is_file():
        return 0
    fields = dict(line.split() for line in stat.read_text().splitlines() if len(line.split()) == 2)
    return int(fields.get("total_inactive_file", fields.get("inactive_file", 0)))


def _read_int(path: Path) -> int | None:
    """None if the file is not there or says "max"."""
    if not path.is_file():
        return None
    text = path.read_text().strip()
    return int(text) if text.isdigit() else None
