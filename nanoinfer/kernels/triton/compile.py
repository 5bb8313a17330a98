"""Compiles every kernel ahead of time, on any machine, in the configurations that a model's shape launches.

`python -m nanoinfer.kernels.triton.compile 80 89 90 100` prints registers, spilled bytes and shared memory for these
compute capabilities. What is compiled is what the operators launch: they are called with tensors that hold nothing, and
the launches are recorded instead of run.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from nanoinfer.kernels.triton import activation, decode, inputs, kv_store, norm, prefill, rotary, sampler, threshold

_MODULES: tuple[ModuleType, ...] = (activation, decode, inputs, kv_store, norm, prefill, rotary, sampler, threshold)
_LAUNCH_OPTIONS = ("num_warps", "num_stages", "num_ctas")
_TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.int32: "i32",
    torch.int64: "i64",
}


@dataclass(frozen=True)
class Shape:
    """What a rank's kernels are compiled for. Of Qwen3-0.6B unless said otherwise."""

    hidden_size: int = 1024
    intermediate_size: int = 3072
    num_heads: int = 16
    num_kv_heads: int = 8
    head_dim: int = 128
    vocab_size: int = 151936
    block_size: int = 32
    dtype: torch.dtype = torch.bfloat16


@dataclass(frozen=True)
class Launch:
    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    options: dict[str, Any]

    @property
    def name(self) -> str:
        return str(self.kernel.fn.__name__)


@dataclass(frozen=True)
class Report:
    """registers: per thread; spilled_bytes: stores and loads of them; shared_bytes: per program."""

    name: str
    capability: int
    num_warps: int
    registers: int
    spilled_bytes: int
    shared_bytes: int


class _Recorder:
    """Stands for a kernel: keeps the launches."""

    def __init__(self, kernel: Any, launches: list[Launch]) -> None:
        self._kernel, self._launches = kernel, launches

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments, **options: self._launches.append(Launch(self._kernel, grid, arguments, options))


@contextlib.contextmanager
def _recorded() -> Iterator[list[Launch]]:
    launches: list[Launch] = []
    with contextlib.ExitStack() as stack:
        for module in _MODULES:
            for name, kernel in list(vars(module).items()):
                if name.endswith("_kernel"):
                    stack.enter_context(mock.patch.object(module, name, _Recorder(kernel, launches)))
        yield launches


def launches_of(
    shape: Shape, capability: int = 90, num_seqs: int = 64, num_splits: tuple[int, ...] = (1, 8)
) -> list[Launch]:
    """Every kernel that a step with that shape launches on such a GPU, once per configuration."""
    dtype, heads, kv_heads, dim = shape.dtype, shape.num_heads, shape.num_kv_heads, shape.head_dim

    def empty(*size: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(size, dtype=dtype)

    n, i32, i64, f32, f64 = num_seqs, torch.int32, torch.int64, torch.float32, torch.float64
    hidden, weight = empty(n, shape.hidden_size), empty(shape.hidden_size)
    cache = empty(64, kv_heads, shape.block_size, dim)
    q, logits = empty(n, heads, dim), empty(n, shape.vocab_size)
    lens, tables = empty(n, dtype=i32), empty(n, 128, dtype=i32)
    ids, row, wide = empty(n, dtype=i64), empty(n, dtype=f32), empty(n, dtype=f64)
    with mock.patch.object(decode, "capability_major", lambda: capability // 10), _recorded() as launches:
        norm.rms_norm(hidden, weight, 1e-6)
        norm.add_rms_norm(hidden, hidden, weight, 1e-6)
        activation.silu_and_mul(empty(n, 2 * shape.intermediate_size))
        half = empty(n, dim // 2)
        rotary.rotary(ids, empty(dim // 2, dtype=f32), 1.0, dtype)
        qkv = empty(n, heads + 2 * kv_heads, dim)
        kv_store.norm_rotate_store(qkv, empty(dim), empty(dim), half, half, cache, cache, ids, 1e-6)
        kv_store.store_kv(qkv[:, :kv_heads], qkv[:, :kv_heads], cache, cache, ids)
        for splits in num_splits:
            decode.paged_decode(q, cache, cache, tables, lens, lens, q, 1.0, splits, decode.MIN_TILES)
        items = empty(n, 2, dtype=i32)
        prefill.paged_prefill(q, cache, cache, tables, lens, empty(n + 1, dtype=i32), items, q, 1.0)
        inputs.prepare_decode(lens, lens, ids, lens, ids, row, row, lens, row, tables, shape.block_size)
        inputs.store_tokens(ids, lens, ids)
        sampler.row_argmax(logits)
        sums = sampler.segment_sums(logits, row, row, row)
        sampler.draw(logits, row, row, row, sums, wide)
        sampler.choose(logits, row, ids, row, row, sums, wide)
        threshold.sampling_threshold(logits, row, row, row, lens, row)
        sampler.penalize(logits.float(), lens, empty(n, shape.vocab_size, dtype=i32), row, row, row)
    return launches


def shipped(capability: int) -> Iterator[tuple[str, Launch]]:
    """(shape, launch): every kernel for Qwen3-0.6B; attention for five heads to a group (14B), for the largest heads
    ("wide"), and in float32, too; the sampler's for logits in float32, as penalties leave them.

    Decode attention beside Qwen3-0.6B's is not split: its kernels take as many registers as split ones, or more.
    """
    for launch in launches_of(Shape(), capability):
        yield "0.6B", launch
    sampler_names = ("partial_argmax_kernel", "segment_sums_kernel", "draw_kernel", "threshold_kernel")
    others = {
        "14B": Shape(hidden_size=5120, num_heads=40),
        "wide": Shape(head_dim=256),
        "float32": Shape(dtype=torch.float32),
    }
    for name, shape in others.items():
        for launch in launches_of(shape, capability, num_splits=(1,)):
            is_float32 = shape.dtype == torch.float32
            if launch.name.startswith("paged_") or (is_float32 and launch.name in sampler_names):
                yield name, launch


def _source(launch: Launch) -> ASTSource:
    """Types and specializations as the launcher would find them: ones are constants, multiples of 16 are known."""
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {k: v for k, v in launch.options.items() if k not in _LAUNCH_OPTIONS}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for index, name in enumerate(launch.kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
            continue
        value = launch.arguments[index]
        is_aligned = True
        if isinstance(value, torch.Tensor):
            signature[name] = f"*{_TYPES[value.dtype]}"
        elif isinstance(value, float):
            signature[name], is_aligned = "fp32", False
        elif launch.kernel.params[index].do_not_specialize:
            signature[name], is_aligned = "i32", False
        elif value == 1:
            signature[name], constants[name], is_aligned = "constexpr", 1, False
        else:
            signature[name], is_aligned = "i32", value % 16 == 0
        if is_aligned:
            attributes[(index,)] = [["tt.divisibility", 16]]
    return ASTSource(launch.kernel, signature, constants, attributes)


def compile_launch(launch: Launch, capability: int) -> Report:
    """capability: 80, 89, 90, 100, ... Raises what triton or ptxas raises if the kernel cannot be compiled for it."""
    options = {k: v for k, v in launch.options.items() if k in _LAUNCH_OPTIONS}
    log = io.StringIO()
    with (
        tempfile.TemporaryDirectory() as cache,
        mock.patch.dict(os.environ, {"TRITON_CACHE_DIR": cache, "TRITON_DUMP_PTXAS_LOG": "1"}),
        contextlib.redirect_stdout(log),
    ):
        compiled = triton.compile(_source(launch), target=GPUTarget("cuda", capability, 32), options=options)
    text = log.getvalue()
    registers = re.search(r"Used (\d+) registers", text)
    if registers is None:
        raise RuntimeError(f"ptxas did not say how many registers {launch.name} uses:\n{text}")
    spilled = re.findall(r"(\d+) bytes spill (?:stores|loads)", text)
    return Report(
        launch.name, capability, compiled.metadata.num_warps, int(registers[1]), sum(map(int, spilled)),
        compiled.metadata.shared,
    )  # fmt: skip


def main() -> None:
    print(f"{'shape':9}{'kernel':28}{'sm':>5}{'warps':>7}{'registers':>11}{'spilled':>9}{'shared':>9}")
    for capability in map(int, sys.argv[1:] or ["80", "89", "90", "100"]):
        for shape, launch in shipped(capability):
            r = compile_launch(launch, capability)
            print(
                f"{shape:9}{r.name:28}{capability:5}{r.num_warps:7}{r.registers:11}{r.spilled_bytes:9}{r.shared_bytes:9}"
            )


if __name__ == "__main__":
    main()
