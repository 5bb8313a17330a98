"""Calls into the compiled CPU kernels with torch tensors. Each function's twin in `reference.py` computes the same.

`load()` gives the kernels, or None where they cannot be had; layers ask once and keep what they got.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from nanoinfer.kernels.cpu.build import BuildError, build_kernels
from nanoinfer.kernels.cpu.inputs import DecodeColumns, DecodeInputs
from nanoinfer.kernels.cpu.memory import Workspace, huge_empty
from nanoinfer.kernels.cpu.recording import Recording
from nanoinfer.kernels.reference import LayerKV

logger = logging.getLogger(__name__)

_POINTER, _INT64, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float
_SIGNATURES: dict[str, list[type]] = {
    "linear_bf16": [_POINTER, *[_INT64] * 3, _POINTER, _INT64, _POINTER, _INT, _POINTER, _INT64],
    "run_calls": [_POINTER, _INT64],
    "pack_bf16": [_POINTER, *[_INT64] * 3, _INT, _POINTER],
    "linear_int8": [_POINTER, *[_INT64] * 3, *[_POINTER] * 2, _INT64, _POINTER, _INT, _POINTER, _INT64],
    "pack_int8": [_POINTER, *[_INT64] * 3, _INT, *[_POINTER] * 2],
    "paged_decode": [*[_POINTER] * 4, _INT64, *[_POINTER] * 2, *[_INT64] * 6, _FLOAT, _INT64, *[_POINTER] * 2],
    "tiled_decode_bf16": [*[_POINTER] * 6, _INT64, *[_POINTER] * 2, *[_INT64] * 6, _FLOAT, _INT64, *[_POINTER] * 2],
    "tiled_decode_int8": [*[_POINTER] * 6, _INT64, *[_POINTER] * 2, *[_INT64] * 6, _FLOAT, _INT64, *[_POINTER] * 2],
    "paged_prefill_bf16": [*[_POINTER] * 6, _INT64, *[_POINTER] * 3, *[_INT64] * 6, _FLOAT, _INT64, _POINTER],
    "paged_prefill_int8": [*[_POINTER] * 6, _INT64, *[_POINTER] * 3, *[_INT64] * 6, _FLOAT, _INT64, _POINTER],
    "rms_norm": [*[_POINTER] * 3, *[_INT64] * 2, _FLOAT, _POINTER],
    "row_argmax": [_POINTER, *[_INT64] * 3, *[_POINTER] * 2],
    "segment_sums": [_POINTER, *[_INT64] * 3, *[_POINTER] * 2, _INT64, _POINTER],
    "choose": [_POINTER, *[_INT64] * 3, *[_POINTER] * 2, _INT64, *[_POINTER] * 3],
    "decode_inputs": [_POINTER, _INT64, *[_POINTER] * 5, *[_INT64] * 2, *[_POINTER] * 9],
    "rotary": [*[_POINTER] * 2, *[_INT64] * 2, _FLOAT, *[_POINTER] * 2],
    "gather_rows": [*[_POINTER] * 2, *[_INT64] * 2, _POINTER],
    "norm_rotate_store": [*[_POINTER] * 6, *[_INT64] * 6, _FLOAT, *[_POINTER] * 5],
    "norm_rotate_store_tiled_bf16": [*[_POINTER] * 6, *[_INT64] * 6, _FLOAT, *[_POINTER] * 5],
    "norm_rotate_store_tiled_int8": [*[_POINTER] * 6, *[_INT64] * 6, _FLOAT, *[_POINTER] * 5],
}
_TYPED = {"paged_decode", "rms_norm", "norm_rotate_store", "row_argmax", "segment_sums", "choose", "rotary"}
_SUFFIXES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.int8: "int8"}
# As in decode.cpp.
MAX_GROUP = 16
MAX_HEAD_DIM = 256


@dataclass(frozen=True)
class PackedWeight:
    """A bf16 matrix in the order of linear.cpp. Gated: rows of gate and up, interleaved, for linear + SiLU-and-mul."""

    data: torch.Tensor
    out_features: int
    in_features: int
    gated: bool


@dataclass(frozen=True)
class Int8Weight:
    """A matrix quantized to int8 in the order of linear.cpp, with the scales of its outputs. Gated as above."""

    data: torch.Tensor
    scales: torch.Tensor
    out_features: int
    in_features: int
    gated: bool


class CPUKernels:
    """The loaded library. has_amx, has_amx_int8: whether the linear kernel of bf16, and that of int8, is there."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.has_amx = bool(library.enable_amx()) and hasattr(library, "linear_bf16")
        self.has_amx_int8 = self.has_amx and hasattr(library, "linear_int8")
        self._functions: dict[str, Any] = {}
        self._local = threading.local()
        for name, arguments in _SIGNATURES.items():
            names = [f"{name}_f32", f"{name}_bf16"] if name in _TYPED else [name]
            for full_name in names:
                if hasattr(library, full_name):
                    function = getattr(library, full_name)
                    function.argtypes, function.restype = arguments, None
                    self._functions[full_name] = function

    @contextmanager
    def using(self, workspace: Workspace, recording: Recording | None = None) -> Iterator[None]:
        """Meanwhile, this thread's results lie in the workspace. With a recording, calls are noted and not made."""
        self._local.workspace, self._local.recording = workspace, recording
        try:
            yield
        finally:
            self._local.workspace = self._local.recording = None

    def run(self, calls: np.ndarray) -> None:
        """Makes calls that were recorded, in one go."""
        self._functions["run_calls"](calls.ctypes.data, len(calls))

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """For a kernel's result; everything that a recorded call writes must come from here."""
        workspace: Workspace | None = getattr(self._local, "workspace", None)
        if workspace is None:
            return torch.empty(shape, dtype=dtype)
        result = workspace.empty(shape, dtype)
        is_recording = getattr(self._local, "recording", None) is not None
        assert not is_recording or workspace.holds(result), "calls that are made later need memory that is kept"
        return result

    def _call(self, name: str, *args: int | float | None) -> None:
        function = self._functions[name]
        recording: Recording | None = getattr(self._local, "recording", None)
        if recording is None:
            function(*args)
        else:
            recording.note(function, args)

    def supports(self, dtype: torch.dtype) -> bool:
        return dtype in (torch.float32, torch.bfloat16)

    def pack(self, weight: torch.Tensor, gated: bool = False) -> PackedWeight:
        """weight: [out_features, in_features] bf16; gated: [2 * out_features, in_features], gate's rows first."""
        rows, k = weight.shape
        n = rows // 2 if gated else rows
        strips = -(-n // 16) if gated else -(-n // 32)
        data = huge_empty((strips * -(-k // 32) * 1024,), torch.bfloat16)
        self._functions["pack_bf16"](weight.data_ptr(), n, k, weight.stride(0), gated, data.data_ptr())
        return PackedWeight(data, n, k, gated)

    def linear(self, x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x W^T + b, or silu(x gate^T) * (x up^T). x: [T, in_features] bf16; returns [T, out_features]."""
        x = x if x.stride(-1) == 1 else x.contiguous()
        rows, k = x.shape
        out = self.empty((rows, weight.out_features), x.dtype)
        self._call(
            "linear_bf16", x.data_ptr(), rows, k, x.stride(0), weight.data.data_ptr(), weight.out_features,
            None if bias is None else bias.data_ptr(), weight.gated, out.data_ptr(), weight.out_features,
        )  # fmt: skip
        return out

    def pack_int8(self, weight: torch.Tensor, gated: bool = False) -> Int8Weight:
        """Quantizes, per row. weight: [out_features, in_features] bf16; gated: [2 * out_features, ...], gate first."""
        rows, k = weight.shape
        n = rows // 2 if gated else rows
        strips = -(-n // 16) if gated else -(-n // 32)
        data = huge_empty((strips * -(-k // 64) * 2048,), torch.int8)
        scales = torch.empty(strips * 32, dtype=torch.float32)
        self._call("pack_int8", weight.data_ptr(), n, k, weight.stride(0), gated, data.data_ptr(), scales.data_ptr())
        return Int8Weight(data, scales, n, k, gated)

    def linear_int8(self, x: torch.Tensor, weight: Int8Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
        """`linear` with rows of x quantized to int8 on the way. x: [T, in_features] bf16; returns [T, out_features]."""
        x = x if x.stride(-1) == 1 else x.contiguous()
        rows, k = x.shape
        out = self.empty((rows, weight.out_features), x.dtype)
        self._call(
            "linear_int8",
            x.data_ptr(), rows, k, x.stride(0), weight.data.data_ptr(), weight.scales.data_ptr(), weight.out_features,
            None if bias is None else bias.data_ptr(), weight.gated, out.data_ptr(), weight.out_features,
        )  # fmt: skip
        return out

    def paged_decode(
        self,
        q: torch.Tensor,
        out: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        block_tables: torch.Tensor,
        seq_lens: torch.Tensor,
        rows: torch.Tensor,
        scale: float,
        splits: int,
    ) -> None:
        """Attention of one query per sequence, read from the blocks.

        q, out: [T, num_heads, head_dim], of which `rows` [n] int64 are computed. caches: [blocks, num_kv_heads,
        block_size, head_dim]. block_tables: [n, columns] int32. seq_lens: [n] int32. splits: parts of each context.
        """
        num_heads, head_dim = q.shape[1:]
        size = len(rows) * num_heads * splits * (head_dim + 2) + 16 if splits > 1 else 16
        scratch = torch.empty(size, dtype=torch.float32, device="cpu")
        self._call(
            f"paged_decode_{_SUFFIXES[q.dtype]}",
            q.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(), block_tables.data_ptr(), block_tables.stride(0),
            seq_lens.data_ptr(), rows.data_ptr(), len(rows), num_heads, *_geometry((k_cache, v_cache)),
            scale, splits, scratch.data_ptr(), out.data_ptr(),
        )  # fmt: skip

    def can_tile(self, kv_dtype: torch.dtype, group: int, head_dim: int, block_size: int) -> bool:
        """Whether the tiled kernels (AMX; bf16 or int8 caches of a bf16 model) can take that shape."""
        if not self.has_amx or kv_dtype not in (torch.bfloat16, torch.int8):
            return False
        tile_rows = group * 2 // kv_dtype.itemsize  # int8 takes two
        whole = head_dim * kv_dtype.itemsize % 64 == 0 and block_size % 32 == 0
        return whole and tile_rows <= 16 and head_dim <= MAX_HEAD_DIM

    def tiled_decode(
        self,
        q: torch.Tensor,
        out: torch.Tensor,
        kv: LayerKV,
        block_tables: torch.Tensor,
        seq_lens: torch.Tensor,
        rows: torch.Tensor,
        scale: float,
        parts: int,
    ) -> None:
        """`paged_decode` on AMX, for caches that `can_tile`; parts: of each context, done by several threads."""
        num_heads, head_dim = q.shape[1:]
        memory = self.empty((len(rows) * parts * num_heads * (head_dim + 2),), torch.float32)
        self._call(
            f"tiled_decode_{_SUFFIXES[kv[0].dtype]}",
            q.data_ptr(), *_pointers(kv), block_tables.data_ptr(), block_tables.stride(0), seq_lens.data_ptr(),
            rows.data_ptr(), len(rows), num_heads, *_geometry(kv), scale, parts,
            memory.data_ptr(), out.data_ptr(),
        )  # fmt: skip

    def paged_prefill(
        self,
        q: torch.Tensor,
        out: torch.Tensor,
        kv: LayerKV,
        block_tables: torch.Tensor,
        starts: torch.Tensor,
        query_lens: torch.Tensor,
        seq_lens: torch.Tensor,
        scale: float,
        parts: int,
    ) -> None:
        """Causal attention of several queries per sequence, read from caches that `can_tile`; AMX, bf16 queries.

        q, out: [T, num_heads, head_dim]. block_tables: [n, columns] int32. starts, query_lens, seq_lens: [n] int64;
        sequence i's queries are the rows starts[i] .. starts[i] + query_lens[i] - 1 of q. parts: shares of the work of
        one (sequence, KV head).
        """
        num_heads = q.shape[1]
        self._call(
            f"paged_prefill_{_SUFFIXES[kv[0].dtype]}",
            q.data_ptr(), *_pointers(kv), block_tables.data_ptr(), block_tables.stride(0), starts.data_ptr(),
            query_lens.data_ptr(), seq_lens.data_ptr(), len(starts), num_heads, *_geometry(kv), scale, parts,
            out.data_ptr(),
        )  # fmt: skip

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        """norm(x), or norm(residual += x). x, residual: [..., size], contiguous."""
        out = self.empty(tuple(x.shape), x.dtype)
        self._call(
            f"rms_norm_{_SUFFIXES[x.dtype]}",
            x.data_ptr(), None if residual is None else residual.data_ptr(), weight.data_ptr(),
            x.numel() // x.shape[-1], x.shape[-1], eps, out.data_ptr(),
        )  # fmt: skip
        return out

    def norm_rotate_store(
        self,
        qkv: torch.Tensor,
        q_weight: torch.Tensor,
        k_weight: torch.Tensor,
        eps: float,
        cos: torch.Tensor,
        sin: torch.Tensor,
        kv: LayerKV,
        slots: torch.Tensor,
        tiled: bool = False,
    ) -> torch.Tensor:
        """q and k norm, rotary, and the store of k and v to their slots, in one pass. Returns the queries.

        qkv: [T, num_heads + 2 * num_kv_heads, head_dim]; cos, sin: [T, head_dim / 2]; slots: [T] int64. tiled: values
        go to the order of decode_tiled.cpp.
        """
        tokens, num_heads = qkv.shape[0], qkv.shape[1] - 2 * kv[0].shape[1]
        q = self.empty((tokens, num_heads, qkv.shape[2]), qkv.dtype)
        self._call(
            f"norm_rotate_store_{'tiled_' if tiled else ''}{_SUFFIXES[kv[0].dtype]}",
            qkv.data_ptr(), q_weight.data_ptr(), k_weight.data_ptr(), cos.data_ptr(), sin.data_ptr(), slots.data_ptr(),
            tokens, num_heads, *_geometry(kv), eps, q.data_ptr(), *_pointers(kv),
        )  # fmt: skip
        return q

    def row_argmax(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Largest value, float32, and first column that has it, per row of [rows, columns]; NaN beats all."""
        best = torch.empty(len(logits), dtype=torch.float32)
        winners = torch.empty(len(logits), dtype=torch.int64)
        self._call(
            f"row_argmax_{_SUFFIXES[logits.dtype]}",
            logits.data_ptr(),
            *logits.shape,
            logits.stride(0),
            best.data_ptr(),
            winners.data_ptr(),
        )
        return best, winners

    def segment_sums(
        self, logits: torch.Tensor, best: torch.Tensor, inverse_temperature: torch.Tensor, segment: int
    ) -> torch.Tensor:
        """[rows, segments] float64: sums of exp((logit - best) / temperature). best, ...: [rows] float32."""
        sums = torch.empty(len(logits), -(-logits.shape[1] // segment), dtype=torch.float64)
        self._call(
            f"segment_sums_{_SUFFIXES[logits.dtype]}",
            logits.data_ptr(), *logits.shape, logits.stride(0), best.data_ptr(), inverse_temperature.data_ptr(),
            segment, sums.data_ptr(),
        )  # fmt: skip
        return sums

    def choose(
        self, logits: torch.Tensor, inverse_temperature: torch.Tensor, uniforms: torch.Tensor, segment: int
    ) -> torch.Tensor:
        """[rows] int64: the columns at which the cumulative weight passes `uniforms` of its total.

        A column weighs exp((logit - best) / temperature); where the inverse is 0, the answer is the best column, and
        where the best logit is not finite, -1. inverse_temperature: [rows] float32; uniforms: [rows] float64. Sums are
        made segment by segment, as `segment_sums` does.
        """
        rows = len(logits)
        best, tokens = self.empty((rows,), torch.float32), self.empty((rows,), torch.int64)
        sums = self.empty((rows, -(-logits.shape[1] // segment)), torch.float64)
        self._call(
            f"choose_{_SUFFIXES[logits.dtype]}",
            logits.data_ptr(), *logits.shape, logits.stride(0), inverse_temperature.data_ptr(), uniforms.data_ptr(),
            segment, best.data_ptr(), sums.data_ptr(), tokens.data_ptr(),
        )  # fmt: skip
        return tokens

    def decode_inputs(self, rows: torch.Tensor, columns: DecodeColumns, block_size: int, out: DecodeInputs) -> None:
        """The inputs of a step in which `rows`, [n] int64, each compute their last token: first n entries of `out`."""
        width = columns.block_tables.shape[1]
        assert out.block_tables.shape[1] == width
        *rest, seeds, temperature = (column.ctypes.data for column in columns)
        self._call(
            "decode_inputs", rows.data_ptr(), len(rows), *rest, width, block_size, seeds, temperature,
            *(x.data_ptr() for x in out),
        )  # fmt: skip

    def rotary(
        self, positions: torch.Tensor, inv_freq: torch.Tensor, amplitude: float, out: tuple[torch.Tensor, torch.Tensor]
    ) -> None:
        """cos and sin, [T, half] each, of positions [T] int64 times inv_freq [half] float32, times amplitude."""
        self._call(
            f"rotary_{_SUFFIXES[out[0].dtype]}",
            positions.data_ptr(), inv_freq.data_ptr(), len(positions), len(inv_freq), amplitude, out[0].data_ptr(),
            out[1].data_ptr(),
        )  # fmt: skip

    def gather_rows(self, table: torch.Tensor, indices: torch.Tensor, out: torch.Tensor) -> None:
        """out [T, size] = table [rows, size] at indices [T] int64."""
        row_bytes = table.shape[1] * table.itemsize
        self._call("gather_rows", table.data_ptr(), indices.data_ptr(), len(indices), row_bytes, out.data_ptr())


def _geometry(kv: LayerKV) -> tuple[int, int, int, int]:
    """(num_kv_heads, head_dim, block_size, block_rows) as in common.h."""
    _, num_kv_heads, block_size, head_dim = kv[0].shape
    block_rows = kv[0].stride(0) // head_dim
    rows = (block_rows, block_size, 1)
    for tensor in kv[:2]:
        assert tensor.stride() == (*(count * head_dim for count in rows), 1), "a layout that the kernels don't know"
    assert all(scales.stride() == rows for scales in kv[2:]), "scales lie otherwise than what they scale"
    return num_kv_heads, head_dim, block_size, block_rows


def _pointers(kv: LayerKV) -> list[int | None]:
    """Of keys, values, and their scales, if there are any."""
    return [tensor.data_ptr() for tensor in kv] + [None] * (4 - len(kv))


@functools.cache
def load() -> CPUKernels | None:
    """The kernels, compiled if need be; None, with one warning, where that fails."""
    try:
        return CPUKernels(ctypes.CDLL(str(build_kernels())))
    except (BuildError, OSError) as error:
        logger.warning("no compiled CPU kernels, running on stock torch at about half the speed: %s", error)
        return None


def kernels_for(dtype: torch.dtype, device: str) -> CPUKernels | None:
    """The kernels, if they are there and compute in that dtype on that device."""
    kernels = load() if device == "cpu" else None
    return kernels if kernels is not None and kernels.supports(dtype) else None
