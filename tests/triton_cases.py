"""The Triton kernels in Triton's interpreter, on CPU tensors, against their twins.

Run by test_triton.py in a process of its own: TRITON_INTERPRET is read when triton is imported. Not collected by name.
"""

# ruff: noqa: I001

from __future__ import annotations

import triton_interpreter  # noqa: F401  (first: it sets the switch)

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
import triton.language as tl
from triton.runtime import interpreter

from nanoinfer.kernels import reference
from nanoinfer.kernels.triton import activation, decode, inputs, kv_store, norm, prefill, rotary, sampler, threshold
from nanoinfer.layers.sampler import uniforms as numpy_uniforms

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# The interpreter is slow: shrinking would take minutes.
few = settings(
    max_examples=10, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, phases=[Phase.generate]
)
seeds = st.integers(0, 2**31)


@pytest.fixture(autouse=True)
def memory_without_zeros() -> Iterator[None]:
    """What a kernel leaves unwritten, or reads before anyone has written it, is NaN (an integer: the largest)."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def randn(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_near(out: torch.Tensor, expected: torch.Tensor) -> None:
    limit = 1e-5 if expected.dtype in (torch.float32, torch.float64) else 1e-2
    assert out.dtype == expected.dtype and out.shape == expected.shape
    assert bool(out.isfinite().all())
    error = (out.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-9)
    assert error < limit, f"relative error {error}"


@few
@given(st.sampled_from(DTYPES), st.integers(1, 5), st.integers(1, 300), st.booleans(), seeds)
def test_rms_norm(dtype: torch.dtype, rows: int, size: int, has_residual: bool, seed: int) -> None:
    x, residual, weight = (randn(n, size, seed=seed + i, dtype=dtype) for i, n in enumerate((rows, rows, 1)))
    if has_residual:
        expected, total = reference.add_rms_norm(x, residual, weight[0], 1e-6)
        out = norm.add_rms_norm(x, residual, weight[0], 1e-6)
        assert torch.equal(residual, total)
    else:
        out, expected = norm.rms_norm(x, weight[0], 1e-6), reference.rms_norm(x, weight[0], 1e-6)
    assert_near(out, expected)


@few
@given(st.sampled_from(DTYPES), st.integers(1, 5), st.integers(1, 1500), seeds)
def test_silu_and_mul(dtype: torch.dtype, rows: int, size: int, seed: int) -> None:
    x = randn(rows, 2 * size, seed=seed, dtype=dtype) * 30
    assert_near(activation.silu_and_mul(x), reference.silu_and_mul(x))


def random_slots(rng: np.random.Generator, count: int, num_slots: int) -> torch.Tensor:
    """Distinct ones; about one in four is -1."""
    slots = torch.from_numpy(rng.permutation(num_slots)[:count])
    return slots.where(torch.from_numpy(rng.random(count) > 0.25), -1)


@few
@given(
    st.sampled_from(DTYPES), st.integers(1, 7), st.integers(1, 3), st.sampled_from([1, 2, 3, 5]),
    st.sampled_from([2, 6, 16, 64, 80]), st.sampled_from([1, 5, 16]), seeds,
)  # fmt: skip
def test_norm_rotate_store_and_store_kv(
    dtype: torch.dtype, tokens: int, kv_heads: int, group: int, head_dim: int, block_size: int, seed: int
) -> None:
    heads = kv_heads * group
    qkv = randn(tokens, heads + 2 * kv_heads, head_dim, seed=seed, dtype=dtype)
    q_weight, k_weight = (randn(head_dim, seed=seed + i, dtype=dtype) for i in (1, 2))
    cos, sin = (randn(tokens, head_dim // 2, seed=seed + i, dtype=dtype) for i in (3, 4))
    blocks = -(-tokens // block_size) + 1
    slots = random_slots(np.random.default_rng(seed), tokens, blocks * block_size)
    caches = [torch.full((blocks, kv_heads, block_size, head_dim), 7.0, dtype=dtype) for _ in range(4)]
    q = kv_store.norm_rotate_store(qkv, q_weight, k_weight, cos, sin, caches[0], caches[1], slots, 1e-6)

    split = qkv.split([heads, kv_heads, kv_heads], dim=1)
    k = reference.apply_rotary(reference.rms_norm(split[1], k_weight, 1e-6), cos, sin)
    live = slots >= 0
    for cache, values in ((caches[2], k), (caches[3], split[2])):
        reference.store_kv(cache, values[live], slots[live])
    assert_near(q, reference.apply_rotary(reference.rms_norm(split[0], q_weight, 1e-6), cos, sin))
    assert_near(caches[0], caches[2])
    assert torch.equal(caches[1], caches[3])
    # Slots of nobody are as they were: padding wrote nowhere.
    for cache in caches[:2]:
        flat = cache.transpose(1, 2).flatten(0, 1)
        untouched = torch.ones(len(flat), dtype=torch.bool)
        untouched[slots[live]] = False
        assert bool((flat[untouched] == 7).all())

    again = [torch.full_like(caches[0], 7.0) for _ in range(2)]
    kv_store.store_kv(k, split[2], *again, slots)
    assert torch.equal(again[0], caches[2]) and torch.equal(again[1], caches[3])


class Paged:
    """Contexts in shuffled blocks; all that belongs to nobody is NaN."""

    def __init__(
        self, dtype: torch.dtype, seq_lens: list[int], kv_heads: int, head_dim: int, block_size: int, seed: int
    ) -> None:
        rng = np.random.default_rng(seed)
        columns = [-(-length // block_size) for length in seq_lens]
        order = rng.permutation(sum(columns) + 2)
        shape = (len(order), kv_heads, block_size, head_dim)
        self.k, self.v = torch.full(shape, math.nan, dtype=dtype), torch.full(shape, math.nan, dtype=dtype)
        self.tables = torch.full((len(seq_lens), max(columns) + 1), 10**6, dtype=torch.int32)
        start = 0
        for i, (length, count) in enumerate(zip(seq_lens, columns, strict=True)):
            blocks = torch.from_numpy(order[start : start + count].astype(np.int32))
            self.tables[i, :count] = blocks
            position = torch.arange(length)
            slots = blocks.long()[position // block_size] * block_size + position % block_size
            for j, cache in enumerate((self.k, self.v)):
                reference.store_kv(cache, randn(length, kv_heads, head_dim, seed=seed + 2 * i + j, dtype=dtype), slots)
            start += count
        self.seq_lens = torch.tensor(seq_lens, dtype=torch.int32)


shapes = st.tuples(
    st.sampled_from(DTYPES), st.integers(1, 2), st.sampled_from([1, 2, 3, 5, 17]), st.sampled_from([8, 24, 64, 136]),
    st.sampled_from([1, 4, 5, 16, 100]),
)  # fmt: skip


@few
@given(
    shapes, st.lists(st.integers(0, 500), min_size=1, max_size=3), st.sampled_from([1, 2, 8]),
    st.sampled_from([1, 2, 3]), seeds,
)  # fmt: skip
def test_paged_decode(
    shape: tuple[torch.dtype, int, int, int, int], seq_lens: list[int], num_splits: int, min_tiles: int, seed: int
) -> None:
    dtype, kv_heads, group, head_dim, block_size = shape
    paged = Paged(dtype, seq_lens, kv_heads, head_dim, block_size, seed)
    # The queries lie among others, in another order.
    rows = torch.from_numpy(np.random.default_rng(seed).permutation(len(seq_lens) + 2)[: len(seq_lens)]).int()
    q = randn(len(seq_lens) + 2, kv_heads * group, head_dim, seed=seed, dtype=dtype)
    out = torch.full_like(q, 7.0)
    scale = head_dim**-0.5
    decode.paged_decode(q, paged.k, paged.v, paged.tables, paged.seq_lens, rows, out, scale, num_splits, min_tiles)
    for i, length in enumerate(seq_lens):
        if length == 0:
            assert bool((out[rows[i]] == 0).all()), "a padding row"
            continue
        expected = reference.paged_attention(
            q[rows[i]].unsqueeze(0), paged.k, paged.v, paged.tables[i : i + 1], torch.tensor([0, 1]),
            paged.seq_lens[i : i + 1], scale,
        )  # fmt: skip
        assert_near(out[rows[i]].unsqueeze(0), expected)
    others = torch.ones(len(q), dtype=torch.bool)
    others[rows.long()] = False
    assert bool((out[others] == 7).all())


@pytest.mark.parametrize(("num_splits", "min_tiles"), [(1, 1), (2, 1), (4, 2), (8, 1)])
def test_decode_where_tiles_and_splits_end(num_splits: int, min_tiles: int) -> None:
    """Contexts of a tile (32 keys of float32), of whole splits, and one more and less; none, and one."""
    whole = [32, 64, 96, 128, 256]
    seq_lens = [0, 1, *(length + more for length in whole for more in (-1, 0, 1))]
    paged, q = Paged(torch.float32, seq_lens, 1, 8, 16, seed=1), randn(len(seq_lens), 2, 8, seed=0)
    rows, out = torch.arange(len(q), dtype=torch.int32), torch.empty_like(q)
    decode.paged_decode(q, paged.k, paged.v, paged.tables, paged.seq_lens, rows, out, 0.3, num_splits, min_tiles)
    starts = torch.arange(len(q))
    live = reference.paged_attention(q[1:], paged.k, paged.v, paged.tables[1:], starts, paged.seq_lens[1:], 0.3)
    assert bool((out[0] == 0).all())
    for row, expected in zip(out[1:], live, strict=True):
        assert_near(row, expected)


@few
@given(
    shapes,
    st.lists(st.tuples(st.integers(1, 150), st.integers(0, 150)), min_size=1, max_size=3),
    seeds,
)
def test_paged_prefill(
    shape: tuple[torch.dtype, int, int, int, int], lengths: list[tuple[int, int]], seed: int
) -> None:
    """lengths: of the queries, and of the prefix that is cached."""
    dtype, kv_heads, group, head_dim, block_size = shape
    paged = Paged(dtype, [sum(pair) for pair in lengths], kv_heads, head_dim, block_size, seed)
    starts = np.concatenate(([0], np.cumsum([count for count, _ in lengths]))).astype(np.int32)
    q = randn(int(starts[-1]), kv_heads * group, head_dim, seed=seed, dtype=dtype)
    out = torch.full_like(q, 7.0)
    chosen = np.arange(len(lengths))[:: 2 if seed % 2 else 1]
    items = prefill.work_items(starts, paged.seq_lens.numpy(), chosen, prefill.queries_per_tile(dtype, head_dim, group))
    prefill.paged_prefill(
        q, paged.k, paged.v, paged.tables, paged.seq_lens, torch.from_numpy(starts), torch.from_numpy(items), out,
        head_dim**-0.5,
    )  # fmt: skip
    expected = reference.paged_attention(
        q, paged.k, paged.v, paged.tables, torch.from_numpy(starts), paged.seq_lens, head_dim**-0.5
    )
    for i in range(len(lengths)):
        rows = slice(starts[i], starts[i + 1])
        if i in chosen:
            assert_near(out[rows], expected[rows])
        else:
            assert bool((out[rows] == 7).all()), "another sequence's rows were written"


def test_prefill_where_tiles_end() -> None:
    """First and last queries on either side of where tiles of keys (32) and of queries (8) end."""
    lengths = [(count, cached) for count in (1, 2, 8, 9, 17) for cached in (0, 1, 22, 23, 29, 30, 31, 32, 33)]
    paged = Paged(torch.float32, [sum(pair) for pair in lengths], 1, 8, 16, seed=2)
    starts = np.concatenate(([0], np.cumsum([count for count, _ in lengths]))).astype(np.int32)
    assert prefill.queries_per_tile(torch.float32, 8, 2) == 8 and prefill.config_for(torch.float32, 8).keys == 32
    items = torch.from_numpy(prefill.work_items(starts, paged.seq_lens.numpy(), np.arange(len(lengths)), 8))
    q, where = randn(int(starts[-1]), 2, 8, seed=0), torch.from_numpy(starts)
    out = torch.empty_like(q)
    prefill.paged_prefill(q, paged.k, paged.v, paged.tables, paged.seq_lens, where, items, out, 0.3)
    expected = reference.paged_attention(q, paged.k, paged.v, paged.tables, where, paged.seq_lens, 0.3)
    for row, right in zip(out, expected, strict=True):
        assert_near(row, right)


def test_a_tile_reads_no_key_after_its_last_query() -> None:
    paged, q = Paged(torch.float32, [45], 1, 8, 16, seed=3), randn(40, 2, 8, seed=0)
    starts = torch.tensor([0, 40], dtype=torch.int32)
    expected = reference.paged_attention(q, paged.k, paged.v, paged.tables, starts, paged.seq_lens, 0.3)
    for position in range(5 + 8, 45):
        block = paged.tables[0, position // 16]
        paged.k[block, :, position % 16] = paged.v[block, :, position % 16] = math.nan
    out, first = torch.empty_like(q), torch.tensor([[0, 0]], dtype=torch.int32)
    prefill.paged_prefill(q, paged.k, paged.v, paged.tables, paged.seq_lens, starts, first, out, 0.3)
    assert_near(out[:8], expected[:8])
    assert bool(out[8:].isnan().all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_beyond_two_to_the_31_elements(dtype: torch.dtype) -> None:
    """Of a pool that large only what is touched is in memory. Every kernel that writes to one or reads it."""
    torch.use_deterministic_algorithms(False)  # nobody fills the pool
    kv_heads, block_size, head_dim, length = 2, 16, 64, 40
    num_blocks = 2**31 // (kv_heads * block_size * head_dim) + 4
    k_cache, v_cache = (torch.empty(num_blocks, kv_heads, block_size, head_dim, dtype=dtype) for _ in range(2))
    tables = torch.tensor([[num_blocks - 1, num_blocks - 4, num_blocks - 2]], dtype=torch.int32)
    position = torch.arange(length)
    slots = tables[0].long()[position // block_size] * block_size + position % block_size
    qkv = randn(length, 2 + 2 * kv_heads, head_dim, seed=0, dtype=dtype)
    one, cos, sin = torch.ones(head_dim, dtype=dtype), *(torch.ones(length, head_dim // 2, dtype=dtype),) * 2
    kv_store.norm_rotate_store(qkv, one, one, cos, sin, k_cache, v_cache, slots, 1e-6)
    k = reference.apply_rotary(reference.rms_norm(qkv[:, 2:4], one, 1e-6), cos, sin)
    assert_near(k_cache[tables[0, 1].item(), :, 3], k[block_size + 3])
    assert torch.equal(v_cache[tables[0, 2].item(), :, 7], qkv[2 * block_size + 7, 4:])
    kv_store.store_kv(k, qkv[:, 4:], k_cache, v_cache, slots)
    near = [cache[tables[0].long()] for cache in (k_cache, v_cache)]
    lens, in_order = torch.tensor([length], dtype=torch.int32), torch.arange(3, dtype=torch.int32).unsqueeze(0)
    q = randn(5, 2, head_dim, seed=1, dtype=dtype)
    expected = reference.paged_attention(q, *near, in_order, torch.tensor([0, 5]), lens, 0.125)
    out = torch.empty_like(q)
    items = torch.tensor([[0, 0]], dtype=torch.int32)
    prefill.paged_prefill(
        q, k_cache, v_cache, tables, lens, torch.tensor([0, 5], dtype=torch.int32), items, out, 0.125
    )  # fmt: skip
    assert_near(out, expected)
    last = torch.tensor([4], dtype=torch.int32)
    decode.paged_decode(q, k_cache, v_cache, tables, lens, last, out.zero_(), 0.125, 1, 2)
    assert_near(out[4:], expected[4:])


def test_an_empty_batch_is_no_work() -> None:
    """Not even a grid of no programs, which CUDA refuses, where a kernel has one program or more to a row."""
    x, cache = torch.empty(0, 8), torch.full((2, 1, 16, 8), 7.0)
    one, i64, i32, f64 = torch.ones(8), *(torch.empty(0, dtype=d) for d in (torch.int64, torch.int32, torch.float64))
    row, tables = torch.empty(0), torch.empty(0, 4, dtype=torch.int32)
    assert norm.rms_norm(x, one, 1e-6).shape == norm.add_rms_norm(x, x.clone(), one, 1e-6).shape == (0, 8)
    assert activation.silu_and_mul(x).shape == (0, 4)
    q = kv_store.norm_rotate_store(x.view(0, 4, 8), one, one, x[:, :4], x[:, :4], cache, cache, i64, 1e-6)
    assert q.shape == (0, 2, 8)
    kv_store.store_kv(x.view(0, 1, 8), x.view(0, 1, 8), cache, cache, i64)
    decode.paged_decode(x.view(0, 1, 8), cache, cache, tables, i32, i32, x.view(0, 1, 8), 1.0, 4, 1)
    starts, items = torch.zeros(1, dtype=torch.int32), torch.empty(0, 2, dtype=torch.int32)
    prefill.paged_prefill(x.view(0, 1, 8), cache, cache, tables, i32, starts, items, x.view(0, 1, 8), 1.0)
    best, winners = sampler.row_argmax(x)
    least = threshold.sampling_threshold(x, best, row, row, i32, row)
    sums = sampler.segment_sums(x, best, row, least)
    assert sampler.choose(x, best, winners, row, least, sums, f64).shape == winners.shape == (0,)
    sampler.penalize(x, i32, torch.empty(0, 8, dtype=torch.int32), row, row, row)
    assert bool((cache == 7).all())


def test_each_query_has_exactly_one_work_item() -> None:
    starts = np.array([0, 3, 3 + 64, 3 + 64 + 65, 3 + 64 + 65 + 1])
    items = prefill.work_items(starts, np.array([3, 64, 65, 501]), np.array([0, 2, 3]), 64)
    assert sorted(map(tuple, items.tolist())) == [(0, 0), (2, 0), (2, 64), (3, 0)]
    assert items[:2].tolist() == [[3, 0], [2, 64]], "the tile with the longest context comes first, cached or not"


@few
@given(st.integers(1, 300), st.sampled_from([1, 5, 16]), seeds)
def test_prepare_decode_and_store_tokens(count: int, block_size: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    table_rows, columns = count + 3, 9
    rows = torch.from_numpy(rng.permutation(table_rows)[:count].astype(np.int32))
    rows[torch.from_numpy(rng.random(count) < 0.3)] = -1
    num_computed = torch.from_numpy(rng.integers(0, columns * block_size, count).astype(np.int32))
    last_token = torch.from_numpy(rng.integers(0, 1000, table_rows))
    num_prompt = torch.from_numpy(rng.integers(1, 20, table_rows).astype(np.int32))
    row_seeds = rng.integers(0, 2**64, table_rows, np.uint64)
    tables = torch.from_numpy(rng.integers(0, 10**6, (table_rows, columns)).astype(np.int32))
    kept = (rng.random(table_rows), rng.random(table_rows), rng.integers(0, 99, table_rows), rng.random(table_rows))
    settings = [torch.from_numpy(x.astype(np.int32 if x.dtype == np.int64 else np.float32)) for x in kept]
    row_bits = torch.from_numpy(row_seeds.view(np.int64))
    arguments = (rows, num_computed, last_token, num_prompt, row_bits, *settings, tables)
    outputs = inputs.prepare_decode(*arguments, block_size)
    for out, expected in zip(outputs, reference.prepare_decode(*arguments, block_size), strict=True):
        assert out.dtype == expected.dtype and torch.equal(out, expected)
    live = (rows >= 0).numpy()
    index = (num_computed + 1 - num_prompt[rows.long()]).numpy()[live].astype(np.int64).view(np.uint64)
    assert np.array_equal(outputs[4].numpy()[live], numpy_uniforms(row_seeds[rows.numpy()[live]], index))
    for out, of_rows in zip(outputs[6:], settings, strict=True):
        assert torch.equal(out[live], of_rows[rows[live].long()]) and not out[~live].any()

    tokens = torch.from_numpy(rng.integers(0, 1000, count)).where(torch.from_numpy(rng.random(count) < 0.7), -1)
    before = last_token.clone()
    inputs.store_tokens(last_token, rows, tokens)
    before[rows[live].long()] = tokens[live].clamp(min=0)
    assert torch.equal(last_token, before)


def sampling_case(dtype: torch.dtype, rows: int, columns: int, seed: int) -> tuple[torch.Tensor, ...]:
    """(logits, best, inverse temperature, uniforms); the logits lie in a wider matrix."""
    logits = (randn(rows, columns + 3, seed=seed) * 4).to(dtype)[:, :columns]
    generator = torch.Generator().manual_seed(seed)
    inverse = 1 / (torch.rand(rows, generator=generator) * 2 + 0.1)
    return logits, logits.float().amax(dim=1), inverse, torch.rand(rows, generator=generator, dtype=torch.float64)


@few
@given(st.sampled_from(DTYPES), st.integers(1, 3), st.sampled_from([1, 5, 511, 513, 4097, 9000]), seeds)
def test_row_argmax(dtype: torch.dtype, rows: int, columns: int, seed: int) -> None:
    logits, *_ = sampling_case(dtype, rows, columns, seed)
    logits[0, columns // 2 :] = logits[0].max()  # a tie
    best, winners = sampler.row_argmax(logits)
    expected, expected_winners = reference.row_argmax(logits)
    assert torch.equal(best, expected) and torch.equal(winners, expected_winners)
    for bad in (math.nan, math.inf, -math.inf):
        broken = logits.clone()
        broken[0, 0 if math.isfinite(bad) or bad != -math.inf else slice(None)] = bad
        best = sampler.row_argmax(broken)[0]
        # Not NaN, which a GPU's maximum leaves out where the interpreter's does not.
        assert best[0] == (-math.inf if bad == -math.inf else math.inf)
        assert not bool(best[0].isfinite()) and bool(best[1:].isfinite().all())


@few
@given(st.sampled_from(DTYPES), st.integers(1, 3), st.sampled_from([1, 511, 513, 5000]), seeds)
def test_draw(dtype: torch.dtype, rows: int, columns: int, seed: int) -> None:
    logits, best, inverse, numbers = sampling_case(dtype, rows, columns, seed)
    least = best - 6.0 if seed % 2 else torch.full_like(best, -math.inf)
    sums = sampler.segment_sums(logits, best, inverse, least)
    kept = logits.float().masked_fill(logits.float() < least.unsqueeze(1), -math.inf)
    assert_near(sums, reference.segment_sums(kept, best, inverse, sampler.SEGMENT))
    targets = numbers * sums.sum(dim=-1)
    tokens = sampler.draw(logits, best, inverse, least, sums, targets)
    assert torch.equal(tokens, reference.draw(logits, best, inverse, least, targets))
    # Beyond the end (sums that were rounded up): the last token that has a weight.
    tokens = sampler.draw(logits, best, inverse, least, sums, sums.sum(dim=-1) * 1.001)
    assert torch.equal(tokens, reference.draw(logits, best, inverse, least, sums.sum(dim=-1) * 1.001))


def test_draw_on_the_edges_of_tokens_and_segments() -> None:
    """Of 1200 equal tokens, each weighs 1: a target is the column, up to where the next begins; greedy rows aside."""
    targets = torch.tensor([0.0, 0.5, 1.0, 511.0, 511.5, 512.0, 513.0, 1023.0, 1024.0, 1199.0], dtype=torch.float64)
    n = len(targets)
    logits, best, ones, least = torch.zeros(n, 1200), torch.zeros(n), torch.ones(n), torch.full((n,), -math.inf)
    sums = sampler.segment_sums(logits, best, ones, least)
    assert sums.tolist() == [[512.0, 512.0, 176.0]] * n
    columns = targets.long()
    assert torch.equal(sampler.draw(logits, best, ones, least, sums, targets), columns)
    assert torch.equal(reference.draw(logits, best, ones, least, targets), columns)
    # As shares: in 1024 columns these are exact.
    shares, logits = torch.arange(n, dtype=torch.float64) / 16, logits[:, :1024]
    sums = sampler.segment_sums(logits, best, ones, least)
    tokens = sampler.choose(logits, best, torch.full((n,), 5), ones, least, sums, shares)
    assert tokens.tolist() == [64 * i for i in range(n)]


def parallel_sums(x: np.ndarray) -> np.ndarray:
    """Cumulative ones along the last dimension, added as a GPU does (Hillis and Steele, 1986)."""
    sums = x.copy()
    for distance in (1 << i for i in range((x.shape[-1] - 1).bit_length())):
        sums[..., distance:] = sums[..., distance:] + sums[..., :-distance]
    return sums


@pytest.mark.parametrize("within_a_segment", [False, True])
def test_what_weighs_nothing_is_not_drawn(monkeypatch: pytest.MonkeyPatch, within_a_segment: bool) -> None:
    """Sums that are made in parallel are added in another order at each place: they may rise where nothing is added."""

    def scan(self: interpreter.ScanOps, source: tl.tensor) -> list[tl.tensor]:
        return [self.to_tensor(parallel_sums(source.handle.data), dtype=source.dtype)]

    monkeypatch.setattr(interpreter.ScanOps, "cumsum", scan)
    rng = np.random.default_rng(0)
    rows, parts = 100, sampler.SEGMENT if within_a_segment else 64
    logits = rng.uniform(-80, 0, (rows, parts)).astype(np.float32)
    logits[rng.random((rows, parts)) < 0.5] = -math.inf
    logits[:, 0] = 0.0
    ends = parallel_sums(np.exp(logits).astype(np.float64))
    rises = np.isinf(logits[:, 1:]) & (ends[:, 1:] > ends[:, :-1])
    chosen = rises.any(axis=1)
    assert chosen.sum() > 5, "the case in question"
    where = rises[chosen].argmax(axis=1)
    targets, columns = torch.from_numpy(ends[chosen, where]), torch.from_numpy(logits[chosen])
    if not within_a_segment:
        spread = torch.full((*columns.shape, sampler.SEGMENT), -math.inf)
        spread[:, :, 7] = columns
        columns = spread.flatten(1)
    flat = torch.zeros(len(columns))
    sums = sampler.segment_sums(columns, flat, flat + 1, flat - math.inf)
    tokens = sampler.draw(columns, flat, flat + 1, flat - math.inf, sums, targets)
    assert bool(columns.gather(1, tokens.unsqueeze(1)).isfinite().all())


@few
@given(st.sampled_from(DTYPES), st.integers(1, 4), st.sampled_from([1, 513, 5000]), seeds)
def test_choose(dtype: torch.dtype, rows: int, columns: int, seed: int) -> None:
    """Random rows, greedy ones, and such as are not finite."""
    logits, _, inverse, numbers = sampling_case(dtype, rows, columns, seed)
    rng = np.random.default_rng(seed)
    inverse[torch.from_numpy(rng.random(rows) < 0.4)] = 0.0
    bad = torch.from_numpy(rng.random(rows) < 0.2)
    logits[bad, columns // 2] = math.nan if seed % 2 else math.inf
    best, winners = sampler.row_argmax(logits)
    top_p, none = torch.full_like(inverse, 0.8), torch.zeros(rows)
    least = threshold.sampling_threshold(logits, best, inverse, none, none.int(), top_p)
    assert bool((least[inverse == 0] == -math.inf).all()), "a greedy row has no filter"
    sums = sampler.segment_sums(logits, best, inverse, least)
    tokens = sampler.choose(logits, best, winners, inverse, least, sums, numbers)
    assert torch.equal(tokens, reference.choose(logits, best, winners, inverse, least, numbers))
    assert bool((tokens[bad] == -1).all()) and bool((tokens[~bad] >= 0).all())


@few
@given(
    st.sampled_from(DTYPES), st.integers(0, 20), st.sampled_from([1, 8, 40, 64]), st.sampled_from([1.0, 1.37]), seeds
)
def test_rotary(dtype: torch.dtype, tokens: int, half: int, amplitude: float, seed: int) -> None:
    positions = torch.randint(0, 40960, (tokens,), generator=torch.Generator().manual_seed(seed))
    inv_freq = 1.0 / 1e6 ** (torch.arange(half) / half)
    for out, expected in zip(
        rotary.rotary(positions, inv_freq, amplitude, dtype),
        reference.rotary(positions, inv_freq, amplitude, dtype),
        strict=True,
    ):
        assert out.dtype == dtype
        torch.testing.assert_close(out, expected, atol=1e-6 if dtype == torch.float32 else 1e-2, rtol=0)


filters = st.tuples(
    st.sampled_from([0.0, 0.05, 1.0]),
    st.sampled_from([0, 1, 3, 50, 10**6]),
    st.sampled_from([1.0, 0.99999, 0.9, 0.3, 1e-6]),
)


@few
@given(st.sampled_from(DTYPES), st.lists(filters, min_size=1, max_size=4), st.sampled_from([1, 700, 5000]), seeds)
def test_sampling_threshold(
    dtype: torch.dtype, chosen: list[tuple[float, int, float]], columns: int, seed: int
) -> None:
    logits, best, inverse, _ = sampling_case(dtype, len(chosen), columns, seed)
    min_p, top_k, top_p = (torch.tensor(values) for values in zip(*chosen, strict=True))
    arguments = (logits, best, inverse, min_p, top_k.int(), top_p)
    least, expected = threshold.sampling_threshold(*arguments), reference.sampling_threshold(*arguments)
    kept, kept_expected = logits.float() >= least[:, None], logits.float() >= expected[:, None]
    # Sums in another order may put a token that is right on the edge of top_p on either side.
    assert int((kept != kept_expected).sum(dim=1).max()) <= (1 if bool((top_p < 1).any()) else 0)
    assert bool(kept.any(dim=1).all())


@pytest.mark.parametrize("dtype", DTYPES)
def test_top_k_keeps_ties_and_top_p_the_least_set(dtype: torch.dtype) -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, -2.0, 2.0, -5.0]], dtype=dtype)
    best, one = torch.tensor([3.0]), torch.tensor([1.0])

    def kept(min_p: float = 0.0, top_k: int = 0, top_p: float = 1.0) -> list[int]:
        least = threshold.sampling_threshold(
            logits, best, one, torch.tensor([min_p]), torch.tensor([top_k], dtype=torch.int32), torch.tensor([top_p])
        )
        return torch.nonzero(logits[0].float() >= least)[:, 0].tolist()

    assert kept() == [0, 1, 2, 3, 4, 5]
    assert kept(top_k=1) == [1, 2] and kept(top_k=3) == [1, 2, 4] and kept(top_k=5) == [0, 1, 2, 3, 4]
    # Weights 1, 1, 0.368, 0.135, 0.0067, 0.0003: together 2.51.
    assert kept(top_p=0.5) == [1, 2] and kept(top_p=0.85) == [1, 2, 4] and kept(top_p=0.95) == [0, 1, 2, 4]
    assert kept(min_p=0.3) == [1, 2, 4] and kept(min_p=1.0) == [1, 2]
    assert kept(top_k=3, top_p=0.9) == [1, 2, 4], "top_p is of what top_k leaves"
    logits = torch.tensor([[-1.0, -0.0, 0.0, -math.inf, -3.0, -math.inf]], dtype=dtype)
    best = torch.tensor([0.0])
    assert kept(top_k=1) == kept(top_p=0.3) == kept(min_p=1.0) == [1, 2], "zeros of either sign are ties"
    assert kept(top_k=4) == [0, 1, 2, 4] and kept(top_k=5) == [0, 1, 2, 3, 4, 5]
    # Weights 1, 6.1e-6 and 8.3e-7: of the sum, 1 - 7e-6 and 1 - 8.3e-7.
    logits = torch.tensor([[-12.0, -14.0, 0.0]], dtype=dtype)
    assert kept(top_p=0.99999) == [2] and kept(top_p=0.999998) == [0, 2] and kept(top_p=1 - 2**-22) == [0, 1, 2]


@few
@given(st.integers(1, 4), st.sampled_from([1, 700, 1025]), seeds)
def test_penalize(rows: int, columns: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = randn(rows + 1, columns, seed=seed)
    in_prompt = torch.rand(rows, columns + 2, generator=generator) < 0.3
    output = torch.randint(0, 3, (rows, columns + 2), generator=generator, dtype=torch.int32)
    repetition, presence, frequency = torch.rand(3, rows, generator=generator) + 0.5
    expected = logits.clone()
    chosen = torch.arange(1, rows + 1)
    expected[chosen] = reference.penalize(
        logits[chosen], in_prompt[:, :columns], output[:, :columns], repetition, presence, frequency
    )
    counts = output + in_prompt.int() * sampler.IN_PROMPT
    sampler.penalize(logits, chosen.int(), counts, repetition, presence, frequency)
    torch.testing.assert_close(logits, expected)
