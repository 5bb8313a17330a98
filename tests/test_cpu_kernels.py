"""The compiled CPU kernels against their twins, odd shapes included; how they are built; life without them."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import tiny
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nanoinfer import LLM, SamplingParams
from nanoinfer.kernels import reference
from nanoinfer.kernels.cpu import build, memory, ops

KERNELS = ops.load()
DTYPES = (torch.float32, torch.bfloat16)
needs_kernels = pytest.mark.skipif(KERNELS is None, reason="no C++ compiler here")
needs_amx = pytest.mark.skipif(KERNELS is None or not KERNELS.has_amx, reason="this processor has no AMX")
needs_amx_int8 = pytest.mark.skipif(KERNELS is None or not KERNELS.has_amx_int8, reason="there is no AMX_INT8 here")


def relative_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    return float((out.double() - expected.double()).norm() / expected.double().norm())


def tolerance(dtype: torch.dtype) -> float:
    return 1e-5 if dtype == torch.float32 else 1e-2


def randn(*shape: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


# Widths of outputs: any, those that are whole cache lines, which are stored in another way, and one with so many strips
# for each of up to two threads that activations are copied. Of inputs: any, and whole tiles, which need no copy.
WIDTHS = st.one_of(st.integers(1, 100), st.integers(1, 10).map(lambda lines: 32 * lines), st.just(6432))
INPUTS = st.one_of(st.integers(1, 200), st.integers(1, 6).map(lambda tiles: 32 * tiles))
# Rows and strips are shared out by the number of threads, however many cores there are; some get nothing.
THREADS = st.sampled_from([1, 2, 3, 5, 8])


@contextlib.contextmanager
def on_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def at_the_end_of_memory(x: torch.Tensor) -> torch.Tensor:
    """A copy of x, right behind which nothing can be read."""
    page = mmap.PAGESIZE
    size = -(-x.nbytes // page) * page
    memory = mmap.mmap(-1, size + page)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(address + size), page, 0) == 0
    return torch.frombuffer(memory, dtype=x.dtype, count=x.numel(), offset=size - x.nbytes).view(x.shape).copy_(x)


@needs_amx
@settings(max_examples=120, deadline=None)
@given(st.integers(1, 300), INPUTS, WIDTHS, st.booleans(), THREADS, st.integers(0, 1000))
def test_packed_linear_is_the_plain_product(rows: int, k: int, n: int, has_bias: bool, threads: int, seed: int) -> None:
    assert KERNELS is not None
    x, weight = (randn(size, k, seed=seed + i, dtype=torch.bfloat16) for i, size in enumerate((rows, n)))
    bias = randn(n, seed=seed + 2, dtype=torch.bfloat16) if has_bias else None
    expected = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
    packed = KERNELS.pack(weight)
    with on_threads(threads):
        out = KERNELS.linear(at_the_end_of_memory(x), packed, bias)
    assert relative_error(out, expected) < 1e-2


@needs_amx_int8
@settings(max_examples=30, deadline=None)
@example(200, 6144, 40, True, 1)
@example(200, 6144, 40, False, 2)
@given(st.integers(150, 360), st.sampled_from([6144, 3050]), st.integers(1, 64), st.booleans(), THREADS)
def test_rows_beyond_what_stays_in_the_cache_are_multiplied_too(
    rows: int, k: int, n: int, gated: bool, threads: int
) -> None:
    """96 or 192 at once, of so many inputs; the last 32 may begin among those before."""
    assert KERNELS is not None
    x, weight = (randn(size, k, seed=i, dtype=torch.bfloat16) for i, size in enumerate((rows, n * (1 + gated))))
    packed, packed_int8 = KERNELS.pack(weight, gated=gated), KERNELS.pack_int8(weight, gated)
    with on_threads(threads):
        out, out_int8 = KERNELS.linear(at_the_end_of_memory(x), packed), KERNELS.linear_int8(x, packed_int8)
    expected = F.linear(x.float(), weight.float())
    assert relative_error(out, reference.silu_and_mul(expected) if gated else expected) < 1e-2
    # Whatever other rows there are.
    for row in (0, rows // 2, rows - 1):
        assert torch.equal(out[row : row + 1], KERNELS.linear(x[row : row + 1], packed))
        assert torch.equal(out_int8[row : row + 1], KERNELS.linear_int8(x[row : row + 1], packed_int8))


@needs_amx
@settings(max_examples=60, deadline=None)
@given(st.one_of(st.integers(1, 70), st.integers(250, 300)), INPUTS, WIDTHS, THREADS, st.integers(0, 1000))
def test_packed_gated_linear_is_product_then_silu_and_mul(rows: int, k: int, n: int, threads: int, seed: int) -> None:
    assert KERNELS is not None
    x, weight = (randn(size, k, seed=seed + i, dtype=torch.bfloat16) for i, size in enumerate((rows, 2 * n)))
    expected = reference.silu_and_mul(F.linear(x.float(), weight.float()))
    packed = KERNELS.pack(weight, gated=True)
    with on_threads(threads):
        out = KERNELS.linear(at_the_end_of_memory(x), packed)
    assert relative_error(out, expected) < 1e-2


@needs_amx
def test_packed_linear_takes_rows_that_lie_apart_and_extreme_gates() -> None:
    assert KERNELS is not None
    wide = randn(40, 128, seed=0, dtype=torch.bfloat16)
    weight = randn(64, 64, seed=1, dtype=torch.bfloat16)
    packed = KERNELS.pack(weight)
    assert torch.equal(KERNELS.linear(wide[:, 64:], packed), KERNELS.linear(wide[:, 64:].contiguous(), packed))
    x = torch.tensor([[1e4], [-1e4], [0.0]], dtype=torch.bfloat16)
    gate_up = torch.ones(2, 1, dtype=torch.bfloat16)
    out = KERNELS.linear(x, KERNELS.pack(gate_up, gated=True)).float()
    torch.testing.assert_close(out, (F.silu(x) * x).float(), rtol=1e-2, atol=1e-6)


@needs_amx_int8
@settings(max_examples=120, deadline=None)
@given(st.integers(0, 300), st.integers(1, 200), WIDTHS, st.booleans(), st.booleans(), THREADS, st.integers(0, 1000))
def test_int8_linear_is_its_twin(
    rows: int, k: int, n: int, gated: bool, has_bias: bool, threads: int, seed: int
) -> None:
    assert KERNELS is not None
    x = randn(rows, k, seed=seed, dtype=torch.bfloat16) * randn(rows, 1, seed=seed + 1, dtype=torch.bfloat16).exp()
    weight = randn(n * (1 + gated), k, seed=seed + 2, dtype=torch.bfloat16)
    bias = randn(n, seed=seed + 3, dtype=torch.bfloat16) if has_bias and not gated else None
    quantized, scales = reference.quantize_rows(weight)
    packed = KERNELS.pack_int8(weight, gated)
    with on_threads(threads):
        out = KERNELS.linear_int8(at_the_end_of_memory(x) if rows else x, packed, bias)
    expected = reference.linear_int8(x, quantized, scales.flatten(), bias, gated)
    if gated or has_bias:
        # float32 may round otherwise, and bfloat16 then once in a while.
        torch.testing.assert_close(out, expected, rtol=2**-7, atol=1e-6)
    else:
        assert torch.equal(out, expected)


@needs_amx_int8
def test_int8_linear_takes_rows_that_lie_apart_zeros_and_nan() -> None:
    assert KERNELS is not None
    wide = randn(40, 128, seed=0, dtype=torch.bfloat16)
    packed = KERNELS.pack_int8(randn(64, 64, seed=1, dtype=torch.bfloat16))
    out = KERNELS.linear_int8(wide[:, 64:], packed)
    assert torch.equal(out, KERNELS.linear_int8(wide[:, 64:].contiguous(), packed))
    wide[1], wide[2, 70] = 0, float("nan")
    again = KERNELS.linear_int8(wide[:, 64:], packed)
    assert (again[1] == 0).all() and again[2].isnan().all() and torch.equal(again[3:], out[3:])
    weight = torch.stack([torch.zeros(64), torch.full((64,), 1e-38), torch.ones(64)]).bfloat16()
    out = KERNELS.linear_int8(torch.ones(1, 64, dtype=torch.bfloat16), KERNELS.pack_int8(weight))
    assert out.tolist() == [[0, 0, 64]]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.integers(1, 100), st.integers(1, 60), st.integers(0, 1000))
def test_the_int8_twin_is_exact_integer_arithmetic_near_the_product(rows: int, k: int, n: int, seed: int) -> None:
    x, weight = (randn(size, k, seed=seed + i, dtype=torch.float32) for i, size in enumerate((rows, n)))
    (q, x_scales), (w, w_scales) = reference.quantize_rows(x), reference.quantize_rows(weight)
    for values, (ints, scales) in {x: (q, x_scales), weight: (w, w_scales)}.items():
        assert (ints.abs().amax(dim=1) == 127).all()
        assert ((values - ints * scales).abs() <= scales * 0.5001).all()
    expected = (q.long() @ w.long().T).double() * x_scales.double() * w_scales.double().T
    out = reference.linear_int8(x, w, w_scales.flatten())
    torch.testing.assert_close(out.double(), expected, rtol=1e-6, atol=0)
    without_vnni = F.linear(q.float(), w.float())
    assert torch.equal(without_vnni, (q.long() @ w.long().T).float())


@st.composite
def paged(draw: st.DrawFn) -> dict[str, int | list[int]]:
    return {
        "seq_lens": draw(st.lists(st.integers(1, 150), min_size=1, max_size=6)),
        "block_size": draw(st.sampled_from([1, 4, 5, 16, 32, 64])),
        "num_kv_heads": draw(st.integers(1, 3)),
        "group": draw(st.sampled_from([1, 2, 3, 8, 16])),
        "head_dim": draw(st.sampled_from([8, 32, 48, 64, 128, 256])),
        "splits": draw(st.integers(1, 5)),
        "seed": draw(st.integers(0, 1000)),
    }


def side_by_side(keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same caches, or their scales, as `CPUAttention` lays them out."""
    both = torch.stack((keys, values), dim=1)
    return both[:, 0], both[:, 1]


def written_caches(case: dict, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """(keys and values in shuffled blocks, the block tables); every slot that no sequence owns is NaN."""
    generator = torch.Generator().manual_seed(case["seed"])
    seq_lens, block_size, kv_heads, dim = (case[k] for k in ("seq_lens", "block_size", "num_kv_heads", "head_dim"))
    counts = [-(-n // block_size) for n in seq_lens]
    ids = torch.randperm(sum(counts) + 2, generator=generator, dtype=torch.int32)
    tables = torch.full((len(seq_lens), max(counts)), -1, dtype=torch.int32)
    caches = torch.full((2, len(ids), kv_heads, block_size, dim), float("nan"), dtype=dtype)
    for i, n in enumerate(seq_lens):
        tables[i, : counts[i]] = ids[sum(counts[:i]) : sum(counts[: i + 1])]
        position = torch.arange(n)
        values = torch.randn((2, n, kv_heads, dim), generator=generator).to(dtype)
        for cache, value in zip(caches, values, strict=True):
            cache[tables[i, position // block_size].long(), :, position % block_size] = value
    return caches, tables


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=100, deadline=None)
@given(case=paged())
def test_paged_decode_is_the_oracle_and_reads_no_unwritten_slot(dtype: torch.dtype, case: dict) -> None:
    assert KERNELS is not None
    caches, tables = written_caches(case, dtype)
    seq_lens, dim = case["seq_lens"], case["head_dim"]
    # The queries stand at odd rows of a longer batch; the even ones are somebody else's.
    rows = torch.arange(len(seq_lens)) * 2 + 1
    q = randn(2 * len(seq_lens), case["num_kv_heads"] * case["group"], dim, seed=case["seed"] + 1, dtype=dtype)
    out = torch.full_like(q, 7.0)
    lens = torch.tensor(seq_lens, dtype=torch.int32)
    KERNELS.paged_decode(q, out, *side_by_side(*caches), tables, lens, rows, dim**-0.5, case["splits"])
    expected = reference.paged_attention(q[rows], *caches, tables, torch.arange(len(seq_lens) + 1), lens, dim**-0.5)
    assert relative_error(out[rows], expected) < tolerance(dtype)
    assert (out[rows - 1] == 7.0).all()


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 3, 17])
@pytest.mark.parametrize("size", [1, 7, 128, 1024, 1030])
def test_rms_norm_is_its_twin(dtype: torch.dtype, rows: int, size: int) -> None:
    assert KERNELS is not None
    x, residual = (randn(rows, size, seed=s, dtype=dtype) for s in (0, 1))
    weight = randn(size, seed=2, dtype=dtype)
    assert relative_error(KERNELS.rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6)) < tolerance(dtype)
    expected, total = reference.add_rms_norm(x, residual, weight, 1e-6)
    out = KERNELS.rms_norm(x, weight, 1e-6, residual)
    assert relative_error(out, expected) < tolerance(dtype) and torch.equal(residual, total)


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lay_out", [side_by_side, lambda *caches: caches])
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "block_size"), [(4, 2, 32, 4), (3, 1, 10, 5), (16, 8, 128, 32)])
def test_norm_rotate_store_is_its_twins_and_writes_nothing_else(
    dtype: torch.dtype, heads: int, kv_heads: int, dim: int, block_size: int, lay_out: Callable
) -> None:
    assert KERNELS is not None
    tokens = 11
    qkv = randn(tokens, heads + 2 * kv_heads, dim, seed=0, dtype=dtype)
    q_weight, k_weight = (randn(dim, seed=s, dtype=dtype) for s in (1, 2))
    angles = torch.rand(tokens, dim // 2) * 6
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    slots = torch.randperm(7 * block_size)[:tokens]
    twins = torch.full((2, 7, kv_heads, block_size, dim), 5.0, dtype=dtype)
    caches = lay_out(*twins.clone())
    q = KERNELS.norm_rotate_store(qkv, q_weight, k_weight, 1e-6, cos, sin, caches, slots)
    ours = torch.stack(caches)
    expected_q, k, v = qkv.split([heads, kv_heads, kv_heads], dim=1)
    expected_q = reference.apply_rotary(reference.rms_norm(expected_q, q_weight, 1e-6), cos, sin)
    reference.store_kv(twins[0], reference.apply_rotary(reference.rms_norm(k, k_weight, 1e-6), cos, sin), slots)
    reference.store_kv(twins[1], v, slots)
    assert relative_error(q, expected_q) < tolerance(dtype)
    assert relative_error(ours[0], twins[0]) < tolerance(dtype) and torch.equal(ours[1], twins[1])
    written = torch.zeros(7, block_size, dtype=torch.bool)
    written[slots // block_size, slots % block_size] = True
    assert (ours.transpose(2, 3)[:, ~written] == 5.0).all()


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=100, deadline=None)
@given(st.integers(1, 40), st.integers(1, 1300), st.integers(0, 1000), st.floats(1e-3, 50))
def test_passes_over_logits_are_their_twins(
    dtype: torch.dtype, rows: int, columns: int, seed: int, temperature: float
) -> None:
    assert KERNELS is not None
    # Rounded to a few values, so that there are ties; some are masked.
    wide = (randn(rows, columns + 3, seed=seed, dtype=torch.float32) * 4).round().to(dtype)
    logits = wide[:, :columns]
    logits[randn(rows, columns, seed=seed + 1, dtype=torch.float32) > 2] = float("-inf")
    logits[:, seed % columns] = 3.0
    best, winners = KERNELS.row_argmax(logits)
    expected_best, expected_winners = reference.row_argmax(logits)
    assert torch.equal(best, expected_best) and torch.equal(winners, expected_winners)
    inverse = torch.full((rows,), 1 / temperature)
    sums = KERNELS.segment_sums(logits, best, inverse, 512)
    torch.testing.assert_close(sums, reference.segment_sums(logits, best, inverse, 512), rtol=1e-5, atol=1e-30)


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=80, deadline=None)
@given(
    st.integers(1, 2100), st.floats(0.02, 4), st.floats(0, 0.95), st.sampled_from([1, 7, 64, 512]), st.integers(0, 1000)
)
def test_choose_inverts_the_cumulative_distribution(
    dtype: torch.dtype, columns: int, temperature: float, share_masked: float, segment: int, seed: int
) -> None:
    """Also with whole segments masked, at the row's end too, where the largest uniform number's sum may round up."""
    assert KERNELS is not None
    logits = randn(12, columns, seed=seed, dtype=dtype) * 5
    logits[torch.rand(12, columns, generator=torch.Generator().manual_seed(seed + 1)) < share_masked] = float("-inf")
    logits[:, seed % columns] = 1.0
    logits[8, seed % columns], logits[9] = [float("nan"), float("inf")][seed % 2], float("-inf")
    uniforms = torch.rand(12, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + 2))
    uniforms[:4] = torch.tensor([0.0, *[1 - 2**-53] * 3])
    inverse = torch.full((12,), 1 / temperature)
    inverse[10:] = 0.0
    all_ids = KERNELS.choose(logits, inverse, uniforms, segment)
    assert (all_ids[8:10] == -1).all(), "rows without a finite maximum"
    assert torch.equal(all_ids[10:], reference.row_argmax(logits[10:])[1]), "greedy rows"
    logits, ids, uniforms, inverse = logits[:8], all_ids[:8], uniforms[:8], inverse[:8]
    best = logits.float().amax(dim=1)
    weights = ((logits.double() - best.double().unsqueeze(1)) * inverse.double().unsqueeze(1)).exp()
    ends = weights.cumsum(dim=1) / weights.sum(dim=1, keepdim=True)
    row = torch.arange(8)
    assert (logits[row, ids] > float("-inf")).all()
    assert (ends[row, ids] >= uniforms - 1e-6).all()
    assert (ends[row, ids] - weights[row, ids] / weights.sum(dim=1) <= uniforms + 1e-6).all()


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 262_143), min_size=1, max_size=40), st.integers(1, 70), st.floats(0.5, 2))
def test_rotary_and_gathered_rows_equal_their_twins(
    dtype: torch.dtype, positions: list[int], half: int, amplitude: float
) -> None:
    assert KERNELS is not None
    at, inv_freq = torch.tensor(positions), 1.0 / 1e6 ** (torch.arange(half) / half)
    ours = torch.empty(2, len(positions), half, dtype=dtype).unbind()
    KERNELS.rotary(at, inv_freq, amplitude, ours)
    for x, twin in zip(ours, reference.rotary(at, inv_freq, amplitude, dtype), strict=True):
        # Libraries' cosines differ in the last bit of float32, which bf16 may then round the other way.
        torch.testing.assert_close(x, twin, rtol=1e-6 if dtype == torch.float32 else 2**-7, atol=1e-6)
    table, out = randn(50, half, seed=half, dtype=dtype), torch.empty(len(positions), half, dtype=dtype)
    KERNELS.gather_rows(table, at % 50, out)
    assert torch.equal(out, table[at % 50])


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_wins_the_maximum_and_masked_segments_weigh_exactly_nothing(dtype: torch.dtype) -> None:
    assert KERNELS is not None
    logits = torch.zeros(2, 40, dtype=dtype)
    logits[1, 7] = float("nan")
    assert KERNELS.row_argmax(logits)[0].isnan().tolist() == [False, True]
    masked = torch.full((1, 1100), float("-inf"), dtype=dtype)
    masked[0, 1050] = 1.0
    sums = KERNELS.segment_sums(masked, torch.ones(1), torch.ones(1), 512)
    assert sums.tolist() == [[0.0, 0.0, 1.0]]


@pytest.mark.skipif(sys.platform != "linux", reason="pages are mapped ahead on Linux only")
def test_pages_are_mapped_from_the_front_of_every_part_at_the_same_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    mapped: list[int] = []
    monkeypatch.setattr(memory, "_map_pages", mapped.extend)
    part, page = 6 << 20, 2 << 20
    pool = memory.huge_empty((4, part), torch.uint8, mapped_parts=4)
    offsets = [address - pool.data_ptr() for address in mapped]
    assert sorted(offsets) == list(range(0, 4 * part, page))
    assert [offset % part for offset in offsets] == [0] * 4 + [page] * 4 + [2 * page] * 4


@needs_kernels
def test_one_openmp_runtime_is_in_the_process() -> None:
    maps = Path("/proc/self/maps").read_text()
    runtimes = {line.split()[-1] for line in maps.splitlines() if re.search(r"lib(gomp|iomp|omp)[^/]*\.so", line)}
    assert len(runtimes) == 1, runtimes


BUILD = """
import sys
from pathlib import Path
from nanoinfer.kernels.cpu import build
build.SOURCES = Path(sys.argv[1])
print("ready", flush=True)
sys.stdin.read()
print(build.build_kernels(Path(sys.argv[2])))
"""


@needs_kernels
def test_processes_that_build_at_once_end_with_one_whole_library(tmp_path: Path) -> None:
    """Of a small source: the kernels themselves have been built for the other tests."""
    sources, cache = tmp_path / "sources", tmp_path / "cache"
    sources.mkdir()
    for name in ("one", "two"):
        (sources / f"{name}.cpp").write_text(f'#include <regex>\nextern "C" int {name}() {{ return 7; }}\n')
    command = [sys.executable, "-c", BUILD, str(sources), str(cache)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with contextlib.ExitStack() as stack:
        builders = [stack.enter_context(subprocess.Popen(command, **pipes)) for _ in range(3)]
        for builder in builders:
            assert builder.stdout.readline() == b"ready\n"
        for builder in builders:
            builder.stdin.close()
        libraries = {builder.stdout.read().decode().strip() for builder in builders}
    assert len(libraries) == 1
    library = Path(*libraries)
    assert sorted(path.name for path in cache.iterdir()) == sorted([library.name, "lock"])
    assert ctypes.CDLL(library).two() == 7


def test_another_source_is_another_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of any file that is compiled, headers included."""
    before = build._key("true")
    names = [path.name for path in build.SOURCES.iterdir() if path.suffix in (".cpp", ".h")]
    assert len(names) > 1
    keys = set()
    for name in names:
        copy = Path(shutil.copytree(build.SOURCES, tmp_path / name))
        (copy / name).write_text((copy / name).read_text() + "\n")
        monkeypatch.setattr(build, "SOURCES", copy)
        keys.add(build._key("true"))
    assert len(keys | {before}) == len(names) + 1


@pytest.fixture
def no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a compiler, and without a library built earlier."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", os.devnull)
    ops.load.cache_clear()
    yield
    ops.load.cache_clear()


@pytest.mark.parametrize("variant", list(tiny.VARIANTS))
def test_without_a_compiler_stock_torch_gives_the_same_answers_and_one_warning(
    variant: str, tmp_path: Path, no_compiler: None, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny.save(tmp_path / "model", variant)
    prompts = [[5, 6, 7], list(range(40)), [9] * 17, [1]]
    with caplog.at_level(logging.WARNING), LLM(tmp_path / "model", num_kvcache_blocks=12, kvcache_block_size=8) as llm:
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=1))
    warnings = [record.message for record in caplog.records if "compiled CPU kernels" in record.message]
    assert len(warnings) == 1 and "no C++ compiler" in warnings[0]
    reference_model = tiny.Reference(model)
    for prompt, output in zip(prompts, outputs, strict=True):
        reference_model.assert_greedy(prompt, output.token_ids, output.outputs[0].logprobs)


@needs_amx
@pytest.mark.parametrize("variant", ["tied", "untied", "bias", "odd_vocab", "one_kv_head"])
def test_a_bf16_model_on_the_kernels_stays_near_its_float32_self(variant: str, tmp_path: Path) -> None:
    """Forced tokens: the raw log-probabilities of one bf16 step, against transformers in float32."""
    model = tiny.save(tmp_path, variant)
    reference_model = tiny.Reference(model.to(torch.bfloat16).float())
    prompts = [[5, 6, 7], list(range(40)), [9, 4] * 17, [1]]
    with LLM(tmp_path, dtype="bfloat16", num_kvcache_blocks=40, kvcache_block_size=8) as llm:
        params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logprobs=20)
        outputs = llm.generate(prompts, params)
    for prompt, output in zip(prompts, outputs, strict=True):
        logits = reference_model.logits(tuple(prompt + output.token_ids))
        expected = logits[len(prompt) - 1 : -1].log_softmax(dim=-1)
        got = output.outputs[0].logprobs or []
        pairs = [(v.logprob, float(expected[i, t])) for i, entry in enumerate(got) for t, v in entry.items()]
        ours, theirs = torch.tensor(pairs).T
        assert relative_error(ours, theirs) < 5e-2


@pytest.mark.parametrize("has_compiler", [True, False])
def test_the_user_s_default_dtype_and_device_are_none_of_our_business(
    has_compiler: bool, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Scratch memory and masks of another dtype than the kernels take would be overrun."""
    if not has_compiler:
        request.getfixturevalue("no_compiler")
    model = tiny.save(tmp_path, "tied", max_position_embeddings=2048)
    prompts = [[i % 300 + 10 for i in range(1200)], [5, 6, 7]]
    torch.set_default_dtype(torch.bfloat16)
    try:
        with LLM(tmp_path, num_kvcache_blocks=80, kvcache_block_size=32) as llm:
            outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, top_p=0.9))
    finally:
        torch.set_default_dtype(torch.float32)
    reference_model = tiny.Reference(model)
    for prompt, output in zip(prompts, outputs, strict=True):
        reference_model.assert_greedy(prompt, output.token_ids)
