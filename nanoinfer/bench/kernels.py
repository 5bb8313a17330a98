"""The CPU kernels alone, against what the machine can do: `python bench.py --kernels`.

Each kernel runs over enough layers' data (more than 1 GB) that no cache can flatter it; bytes moved are the weights or
the keys and values, which have to be read once. Best of several passes, as for the machine's own rates.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from nanoinfer.attention.cpu import CPUAttention
from nanoinfer.bench.machine import Machine, measure_machine
from nanoinfer.kernels.cpu import ops
from nanoinfer.kernels.cpu.memory import Workspace, huge_empty
from nanoinfer.kernels.cpu.recording import Recording

_TOTAL_BYTES = 1.2e9
_PASSES = 5
# Qwen3-0.6B: inputs x outputs of each linear layer and of the head, with the rows of a decode step.
_LINEARS = {"qkv_proj": (1024, 4096), "o_proj": (2048, 1024), "gate_up_proj": (1024, 6144), "down_proj": (3072, 1024)}
_HEAD = (1024, 151936)
_DECODES = {"decode 32 x 400": (32, 400), "decode 8 x 1600": (8, 1600), "decode 1 x 8192": (1, 8192)}
_PREFILL_TOKENS = 512
# Two of the largest results: 1,024 rows of gate_up_proj.
_LARGEST_RESULT = 1024 * 6144 * 2
Weight = TypeVar("Weight", ops.PackedWeight, ops.Int8Weight)
_HEADS, _KV_HEADS, _HEAD_DIM, _BLOCK_SIZE = 16, 8, 128, 32


def measure_kernels() -> dict[str, Any]:
    """Per kernel: bytes, microseconds a call, GB/s and the fraction of the reading speed (or of the GEMM rate)."""
    machine = measure_machine("cpu", torch.bfloat16, 1)
    kernels = ops.load()
    if kernels is None or not kernels.has_amx:
        raise SystemExit("bench.py --kernels: there are no compiled kernels with AMX on this machine")
    report: dict[str, Any] = {
        "benchmark": "kernels",
        "read_gb_s": machine.read_gb_s,
        "gemm_tflop_s": machine.gemm_tflop_s,
    }
    for name, (k, n) in {**_LINEARS, "lm_head": _HEAD}.items():
        for rows in (1, 32):
            seconds = _linear_seconds(kernels, rows, k, n)
            report[f"{name} x {rows}"] = _memory_row(2 * k * n, seconds, machine.read_gb_s)
    for rows in (512, 1024):
        flops = sum(2 * rows * k * n for k, n in _LINEARS.values())
        seconds = sum(_linear_seconds(kernels, rows, k, n) for k, n in _LINEARS.values())
        report[f"linears x {rows}"] = _compute_row(flops, seconds, machine.gemm_tflop_s)
    if kernels.has_amx_int8:
        report |= _int8_rows(kernels, machine)
    for name, (num_seqs, length) in _DECODES.items():
        num_bytes = num_seqs * length * _KV_HEADS * _HEAD_DIM * 4
        for suffix, in_order in (("", False), (" in order", True)):
            seconds = _decode_seconds(kernels, num_seqs, length, in_order=in_order)
            report[name + suffix] = _memory_row(num_bytes, seconds, machine.read_gb_s)
    flops = 4 * _HEADS * _HEAD_DIM * _PREFILL_TOKENS * (_PREFILL_TOKENS + 1) // 2
    report[f"prefill {_PREFILL_TOKENS}"] = _compute_row(flops, _prefill_seconds(kernels), machine.gemm_tflop_s)
    return report


def _int8_rows(kernels: ops.CPUKernels, machine: Machine) -> dict[str, dict[str, float]]:
    """The linear layers again with int8 weights: half the bytes. A GEMM fraction above 1 is int8's doubled rate."""
    report = {}
    for name, (k, n) in {**_LINEARS, "lm_head": _HEAD}.items():
        for rows in (1, 32):
            seconds = _linear_seconds(kernels, rows, k, n, int8=True)
            report[f"int8 {name} x {rows}"] = _memory_row(k * n, seconds, machine.read_gb_s)
    rows = 1024
    flops = sum(2 * rows * k * n for k, n in _LINEARS.values())
    seconds = sum(_linear_seconds(kernels, rows, k, n, int8=True) for k, n in _LINEARS.values())
    report[f"int8 linears x {rows}"] = _compute_row(flops, seconds, machine.gemm_tflop_s)
    return report


def _memory_row(num_bytes: int, seconds: float, read_gb_s: float) -> dict[str, float]:
    rate = num_bytes / seconds / 1e9
    return {"bytes": num_bytes, "us": 1e6 * seconds, "gb_s": rate, "fraction": rate / read_gb_s}


def _compute_row(flops: int, seconds: float, gemm_tflop_s: float) -> dict[str, float]:
    rate = flops / seconds / 1e12
    return {"flops": flops, "us": 1e6 * seconds, "tflop_s": rate, "fraction": rate / gemm_tflop_s}


def _best_seconds(kernels: ops.CPUKernels, call: Callable[[int], object], num_layers: int) -> float:
    """Of one call, averaged over all layers, in the best pass; recorded, as decode steps are."""
    recording, workspace = Recording(), Workspace(2 * _LARGEST_RESULT, _LARGEST_RESULT)
    with kernels.using(workspace, recording):
        for layer in range(num_layers):
            call(layer)
    calls = recording.calls()
    best = float("inf")
    for _ in range(_PASSES):
        start = time.perf_counter()
        kernels.run(calls)
        best = min(best, (time.perf_counter() - start) / num_layers)
    return best


def _linear_seconds(kernels: ops.CPUKernels, rows: int, k: int, n: int, int8: bool = False) -> float:
    x, weight = torch.randn(rows, k).bfloat16(), torch.randn(n, k).bfloat16()
    if int8:
        int8_weights = _copies(kernels.pack_int8(weight))
        return _best_seconds(kernels, lambda layer: kernels.linear_int8(x, int8_weights[layer]), len(int8_weights))
    weights = _copies(kernels.pack(weight))
    return _best_seconds(kernels, lambda layer: kernels.linear(x, weights[layer]), len(weights))


def _copies(weight: Weight) -> list[Weight]:
    copies = [weight]
    for _ in range(int(_TOTAL_BYTES / weight.data.nbytes)):
        data = huge_empty(tuple(weight.data.shape), weight.data.dtype)
        copies.append(dataclasses.replace(weight, data=data.copy_(weight.data)))
    return copies


def _decode_seconds(kernels: ops.CPUKernels, num_seqs: int, length: int, *, in_order: bool = False) -> float:
    """in_order: blocks as an engine that has just begun hands them out, not scattered as they are after a while."""
    columns = -(-length // _BLOCK_SIZE)
    num_blocks = num_seqs * columns
    num_layers = int(_TOTAL_BYTES / (num_blocks * _BLOCK_SIZE * _KV_HEADS * _HEAD_DIM * 4)) + 1
    attention = CPUAttention(_HEADS, _KV_HEADS, _HEAD_DIM)
    kv_cache = attention.allocate(num_layers, num_blocks, _BLOCK_SIZE, torch.bfloat16, "cpu")
    kv_cache.data.copy_(torch.randn(num_blocks, _KV_HEADS, _BLOCK_SIZE, _HEAD_DIM).bfloat16())
    order = torch.arange(num_blocks) if in_order else torch.randperm(num_blocks)
    tables = order.to(torch.int32).view(num_seqs, columns)
    lens = torch.full((num_seqs,), length, dtype=torch.int32)
    q = torch.randn(num_seqs, _HEADS, _HEAD_DIM).bfloat16()
    out, rows = torch.empty_like(q), torch.arange(num_seqs)
    parts = -(-8 // num_seqs)

    def call(layer: int) -> None:
        kernels.tiled_decode(q, out, kv_cache.layer(layer), tables, lens, rows, _HEAD_DIM**-0.5, parts)

    return _best_seconds(kernels, call, num_layers)


def _prefill_seconds(kernels: ops.CPUKernels) -> float:
    columns, num_layers = _PREFILL_TOKENS // _BLOCK_SIZE, 28
    kv = torch.randn(2, columns, _KV_HEADS, _BLOCK_SIZE, _HEAD_DIM).bfloat16().expand(num_layers, -1, -1, -1, -1, -1)
    kv = kv.contiguous()
    q = torch.randn(_PREFILL_TOKENS, _HEADS, _HEAD_DIM).bfloat16()
    out, tables = torch.empty_like(q), torch.arange(columns, dtype=torch.int32).unsqueeze(0)
    start, length = torch.tensor([0]), torch.tensor([_PREFILL_TOKENS])

    def call(layer: int) -> None:
        kernels.paged_prefill(q, out, (*kv[layer],), tables, start, length, length, _HEAD_DIM**-0.5, 1)

    return _best_seconds(kernels, call, num_layers)
