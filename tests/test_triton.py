"""Triton without a GPU, in processes of their own: the interpreter's tests, those of launches that run nothing, and
what compiling ahead of time says."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nanoinfer.worker.cuda_graph import graph_sizes
from nanoinfer.worker.model_runner import MAX_GPU_SEQS

pytest.importorskip("triton", reason="triton is for Linux on x86-64")

TESTS = Path(__file__).resolve().parent
# What a program of an H100, H200 or B200 may have; an A100's multiprocessor has 164 KiB, an Ada's or an RTX 50's 100.
SHARED_LIMIT = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}


CASES = ("triton_engine_cases.py", "triton_cases.py", "triton_launch_cases.py")


@pytest.fixture(scope="module")
def say() -> Iterator[Callable[[str], str]]:
    """Triton's switch is read at import, so what is interpreted and what is compiled have processes of their own. They
    run side by side, or one by one in a worker of pytest-xdist, which has other workers beside it.

    Returns what waits for one of them, which must succeed, and returns what it has said."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS)])}
    arguments = {cases: ["pytest", "-p", "no:cacheprovider", "--durations=3", str(TESTS / cases)] for cases in CASES}
    arguments["compile"] = ["nanoinfer.kernels.triton.compile", *map(str, SHARED_LIMIT)]
    running: dict[str, subprocess.Popen[str]] = {}

    def start(name: str) -> None:
        running[name] = subprocess.Popen(
            [sys.executable, "-m", *arguments[name]],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=TESTS.parent,
            env=environment,
        )

    def say(name: str) -> str:
        if name not in running:
            start(name)
        said, _ = running[name].communicate(timeout=300)
        assert running[name].returncode == 0, said[-8000:]
        return said

    if "PYTEST_XDIST_WORKER" not in os.environ:
        for name in arguments:
            start(name)
    yield say
    for process in running.values():
        process.kill()
        process.wait()


@pytest.mark.parametrize("cases", CASES)
def test_in_a_process_of_its_own(say: Callable[[str], str], cases: str) -> None:
    said = say(cases)
    assert " passed" in said and "skipped" not in said, said


def test_every_kernel_compiles_for_every_generation_and_spills_nothing(say: Callable[[str], str]) -> None:
    said = say("compile")
    print(said)  # for whoever runs pytest -s, and in CI's log when something is over the bound
    rows = [line.split() for line in said.splitlines()[1:]]
    for capability, limit in SHARED_LIMIT.items():
        mine = [row for row in rows if int(row[2]) == capability]
        assert {row[1] for row in mine} >= {
            "rms_norm_kernel", "silu_and_mul_kernel", "norm_rotate_store_kernel", "store_kv_kernel",
            "paged_decode_kernel", "merge_splits_kernel", "paged_prefill_kernel", "prepare_decode_kernel",
            "store_tokens_kernel", "partial_argmax_kernel", "merge_argmax_kernel", "segment_sums_kernel",
            "draw_kernel", "threshold_kernel", "penalize_kernel", "rotary_kernel",
        }  # fmt: skip
        assert sum(row[1] == "paged_decode_kernel" for row in mine) == 5, "four shapes, and one with splits"
        assert sum(row[1] == "threshold_kernel" for row in mine) == 2, "logits in bf16 and in float32"
        for shape, name, sm, warps, registers, spilled, shared in mine:
            assert int(spilled) == 0, f"{name} ({shape}) spills {spilled} bytes on sm_{sm}"
            assert int(shared) <= limit, f"{name} ({shape}) wants {shared} bytes of shared memory on sm_{sm}"
            # A multiprocessor has 65536 registers, and as much shared memory as a program may have, 1 KiB of it the
            # system's per program: so many programs of decode attention are resident at least.
            resident = min(65536 // (int(registers) * int(warps) * 32), (limit + 1024) // (int(shared) + 1024))
            wanted = (2 if limit < 128 << 10 else 3) if name == "paged_decode_kernel" and shape != "wide" else 1
            assert resident >= wanted, f"{name}: {registers} registers, {shared} bytes on sm_{sm}"


def test_what_is_compiled_is_what_is_launched() -> None:
    from nanoinfer.kernels.triton import compile as tool

    launches = tool.launches_of(tool.Shape(), num_splits=(1, 8))
    names = [launch.name for launch in launches]
    assert names.count("paged_decode_kernel") == 2 and names.count("merge_splits_kernel") == 1
    assert {name for module in tool._MODULES for name in vars(module) if name.endswith("_kernel")} == set(names)
    other = tool.launches_of(replace(tool.Shape(), num_heads=32, dtype=torch.float16))
    (decode,) = (one for one in other if one.name == "paged_decode_kernel" and one.options["NUM_SPLITS"] == 1)
    assert decode.options["GROUP"] == 4 and decode.arguments[0].dtype == torch.float16


def test_grids_are_within_cuda_s_limits() -> None:
    """Of a hundred thousand tokens, each a tile of its own, and as many sequences as there may be."""
    from nanoinfer.kernels.triton import compile as tool

    small = tool.Shape(8, 8, 2, 1, 2, 600, 1)
    by_sequence = ("paged_decode_kernel", "merge_splits_kernel")
    launches = [one for one in tool.launches_of(small, num_seqs=MAX_GPU_SEQS) if one.name in by_sequence]
    launches += [one for one in tool.launches_of(small, num_seqs=100_000) if one.name not in by_sequence]
    for launch in launches:
        assert launch.grid[0] < 2**31 and max((1, *launch.grid[1:])) < 2**16, launch.name


@pytest.mark.parametrize(
    ("num_seqs", "max_seq_len", "expected"),
    [(1, 64, 1), (1, 8192, 32), (8, 8192, 4), (20, 8192, 2), (64, 8192, 1), (256, 8192, 1)],
)
def test_number_of_splits(num_seqs: int, max_seq_len: int, expected: int) -> None:
    """3 programs for each of an H200's 132 multiprocessors, 8 KV heads; 128 tokens or more each; powers of two."""
    from nanoinfer.kernels.triton import decode

    assert decode.splits_for(num_seqs, 8, max_seq_len, 132) == decode.Splits(expected)


@given(st.integers(1, 600), st.integers(1, 16), st.integers(1, 2**18), st.integers(1, 200))
def test_graphs_have_compiled_each_number_of_splits(max_num_seqs: int, kv_heads: int, length: int, sms: int) -> None:
    """Decodes beside a prefill are not padded to a graph's size: any number of them may be the first of its kind."""
    from nanoinfer.kernels.triton import decode

    known = {decode.splits_for(size, kv_heads, length, sms) for size in graph_sizes(max_num_seqs)}
    assert known == {decode.splits_for(n, kv_heads, length, sms) for n in range(1, max_num_seqs + 1)}


@given(st.integers(1, 2000), st.integers(1, 16), st.integers(1, 2**18), st.integers(1, 200))
def test_no_program_is_alone_with_a_long_context(num_seqs: int, kv_heads: int, max_seq_len: int, num_sms: int) -> None:
    from nanoinfer.kernels.triton import decode

    splits = decode.splits_for(num_seqs, kv_heads, max_seq_len, num_sms)
    assert splits.number & (splits.number - 1) == 0 and 1 <= splits.number <= decode.MAX_SPLITS
    longest = max(-(-max_seq_len // splits.number), splits.min_tiles * decode.TILE)
    assert longest <= max(2**14, decode.TILE * decode.MIN_TILES) or max_seq_len > 2**14 * decode.MAX_SPLITS
    if splits.number > 1:
        assert max_seq_len > splits.number // 2 * splits.min_tiles * decode.TILE, "parts that nothing could fill"
