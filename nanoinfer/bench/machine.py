"""What this machine can do: reading speed and the rate of matrix products. Measured before an engine is loaded."""

from __future__ import annotations

import ctypes
import mmap
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

# About the bytes of Qwen3-0.6B's weights, so that a large shared cache flatters this reading as much as the model's.
READ_BYTES = 1280 << 20
GEMM_SHAPES = ((1024, 1024, 6144), (4096, 4096, 4096))  # rows, input width, output width

READ_LOOP = """
#include <stdint.h>
uint64_t read_all(const uint64_t *words, uint64_t n) {
    uint64_t sum = 0;
    for (uint64_t i = 0; i < n; ++i) sum += words[i];
    return sum;
}
"""


@dataclass(frozen=True)
class Machine:
    """What the device (or, with one per rank, the devices) can do, per second, and how that was measured."""

    read_gb_s: float
    gemm_tflop_s: float
    read_method: str = ""
    gemm_method: str = ""


def best_rate(methods: dict[str, tuple[float, Callable[[], object]]], repeats: int, device: str) -> tuple[float, str]:
    """Amount per second of the fastest of `methods`, name -> (amount per call, call), in its best repeat; and its name.

    On a GPU one repeat is ten calls, so that launching them does not count.
    """
    calls, synchronize = (10, torch.cuda.synchronize) if device == "cuda" else (1, lambda: None)
    rates: dict[str, float] = {}
    for name, (amount, call) in methods.items():
        for repeat in range(repeats + 1):
            synchronize()
            start = time.perf_counter()
            for _ in range(calls):
                call()
            synchronize()
            if repeat:  # the first one warms up
                rates[name] = max(rates.get(name, 0.0), amount * calls / (time.perf_counter() - start))
    best = max(rates, key=lambda name: rates[name])
    return rates[best], best


def compiled_read(memory: torch.Tensor, directory: str) -> Callable[[], object] | None:
    """A C loop over `memory`, split among as many threads as torch uses; None where no C compiler works."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    library = f"{directory}/read.so"
    command = [compiler or "", "-O3", "-march=native", "-fPIC", "-shared", "-xc", "-", "-o", library]
    if compiler is None or subprocess.run(command, input=READ_LOOP.encode(), capture_output=True).returncode != 0:
        return None
    read = ctypes.CDLL(library).read_all
    read.restype, read.argtypes = ctypes.c_uint64, [ctypes.c_void_p, ctypes.c_uint64]
    threads = torch.get_num_threads()
    words = memory.nbytes // 8 // threads
    starts = [memory.data_ptr() + 8 * words * i for i in range(threads)]
    pool = ThreadPoolExecutor(threads)  # ctypes releases the GIL
    return lambda: list(pool.map(lambda start: read(start, words), starts))


def huge_page_bytes() -> int:
    rollup = Path("/proc/self/smaps_rollup")  # Linux only
    found = re.search(r"AnonHugePages:\s*(\d+) kB", rollup.read_text() if rollup.exists() else "")
    return 1024 * int(found[1]) if found else 0


def measure_cpu_read() -> tuple[float, str]:
    """Bytes per second and the method. What is fastest differs between machines, so several are tried."""
    before = huge_page_bytes()
    region = mmap.mmap(-1, READ_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared ones get no huge pages
    if hasattr(mmap, "MADV_HUGEPAGE"):
        region.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(region, dtype=torch.float32)
    memory.fill_(1.0)  # maps the pages
    share = (huge_page_bytes() - before) / READ_BYTES
    calls: dict[str, Callable[[], object]] = {
        "torch.sum int64": memory.view(torch.int64).sum,
        "torch.sum float32": memory.sum,
        "torch.dot float32 with itself": lambda: torch.dot(memory, memory),
    }
    with tempfile.TemporaryDirectory() as directory:
        if loop := compiled_read(memory, directory):
            calls["C loop"] = loop
        rate, name = best_rate({name: (READ_BYTES, call) for name, call in calls.items()}, 5, "cpu")
    return rate, f"{name}, {share:.0%} on huge pages"


def cuda_read_methods() -> dict[str, tuple[float, Callable[[], object]]]:
    """Over numbers that are not all the same, as a model's are not."""
    source = torch.randn(2 * READ_BYTES // 4, dtype=torch.float32, device="cuda")
    target, size = torch.empty_like(source), source.nbytes
    return {
        "torch.sum float32": (size, source.sum),
        "torch.dot float32 with itself": (size, lambda: torch.dot(source, source)),
        "copy, read plus write": (2 * size, lambda: target.copy_(source)),
    }


def measure_cuda_read() -> tuple[float, str]:
    return best_rate(cuda_read_methods(), 5, "cuda")


def measure_gemm(device: str, dtype: torch.dtype) -> tuple[float, str]:
    """FLOPs per second of x @ w.T in the dtype of the run: a float32 run is not held to the bf16 units' rate."""
    found: list[tuple[float, str]] = []
    for rows, width, out in GEMM_SHAPES:
        x, weight = (torch.randn(n, width, device=device).to(dtype) for n in (rows, out))
        calls: dict[str, Callable[[], object]] = {"F.linear": partial(F.linear, x, weight)}
        if device == "cpu" and dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported():
            # Up to 10 % faster than F.linear, and what an engine that packs its weights at load reaches.
            packed = torch.ops.mkldnn._reorder_linear_weight(weight, rows)
            calls["prepacked linear"] = partial(torch.ops.mkldnn._linear_pointwise, x, packed, None, "none", [], "")
        flops = 2.0 * rows * width * out
        methods = {f"{name} {rows}x{width}x{out}": (flops, call) for name, call in calls.items()}
        found.append(best_rate(methods, 20 if flops < 5e10 else 5, device))
    return max(found)


def measure_machine(device: str, dtype: torch.dtype, ranks: int) -> Machine:
    read_rate, read_method = measure_cuda_read() if device == "cuda" else measure_cpu_read()
    gemm_rate, gemm_method = measure_gemm(device, dtype)
    devices = ranks if device == "cuda" else 1  # ranks on a CPU share what was measured
    if device == "cuda":
        torch.cuda.empty_cache()
    return Machine(devices * read_rate / 1e9, devices * gemm_rate / 1e12, read_method, gemm_method)
