"""The CPU prefill kernel against its twin: lengths, prefixes, groups, shapes, int8, and what unwritten slots hold."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoinfer.kernels import reference
from nanoinfer.kernels.cpu import ops

KERNELS = ops.load()
needs_amx = pytest.mark.skipif(KERNELS is None or not KERNELS.has_amx, reason="this processor has no AMX")
NUM_KV_HEADS = 2
Lengths = list[tuple[int, int]]  # (tokens before the first query, queries) of each sequence


def relative_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    return float((out.double() - expected.double()).norm() / expected.double().norm())


class Case:
    """Sequences over shuffled blocks, and their attention by the twin in float32."""

    def __init__(self, lengths: Lengths, group: int, head_dim: int, block_size: int, seed: int = 0) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.query_lens = torch.tensor([queries for _, queries in lengths])
        self.seq_lens = torch.tensor([sum(pair) for pair in lengths])
        self.scale = head_dim**-0.5
        used = (self.seq_lens + block_size - 1) // block_size
        shuffled = torch.randperm(int(used.sum()) + 2, generator=self.generator).int()
        self.tables = torch.full((len(lengths), int(used.max()) + 1), 1 << 30, dtype=torch.int32)
        self.written = torch.zeros(len(shuffled), block_size, dtype=torch.bool)
        for i, blocks in enumerate(shuffled[: int(used.sum())].split(used.tolist())):
            self.tables[i, : len(blocks)] = blocks
            self.written[blocks] = (torch.arange(len(blocks) * block_size) < self.seq_lens[i]).view(-1, block_size)
        self.q = self.randn(int(self.query_lens.sum()), NUM_KV_HEADS * group, head_dim)
        self.k, self.v = (self.randn(len(shuffled), NUM_KV_HEADS, block_size, head_dim) for _ in range(2))

    def randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator).bfloat16()

    def expected(self, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        start_loc = torch.nn.functional.pad(self.query_lens.cumsum(0), (1, 0))
        tables = self.tables.where(self.tables < len(k), 0)
        return reference.paged_attention(
            self.q.float(), k.float(), v.float(), tables, start_loc, self.seq_lens, self.scale
        )

    def run(self, k: torch.Tensor, v: torch.Tensor, scales: tuple | None = None, parts: int = 1) -> torch.Tensor:
        """k, v in the plain order."""
        assert KERNELS is not None
        out = torch.full_like(self.q, math.nan)
        starts = self.query_lens.cumsum(0) - self.query_lens
        kv = (reference.tile_keys(k), reference.tile_values(v), *(scales or ()))
        KERNELS.paged_prefill(self.q, out, kv, self.tables, starts, self.query_lens, self.seq_lens, self.scale, parts)
        return out

    def poisoned(self, cache: torch.Tensor) -> torch.Tensor:
        """NaN where no token was written. cache: [blocks, num_kv_heads, block_size, ...]."""
        written = self.written.unsqueeze(1).expand(cache.shape[:3])
        return cache.masked_fill(~written.reshape(*written.shape, *[1] * (cache.dim() - 3)), math.nan)


def cases(head_dims: list[int]) -> st.SearchStrategy[Case]:
    lengths = st.lists(st.tuples(st.integers(0, 300) | st.just(0), st.integers(1, 200)), min_size=1, max_size=4)
    return st.builds(
        Case, lengths, st.sampled_from([1, 2, 3, 4, 8]), st.sampled_from(head_dims), st.sampled_from([32, 64]),
        st.integers(0, 1000),
    )  # fmt: skip


@needs_amx
@settings(max_examples=100, deadline=None)
@given(cases([32, 64, 96, 128, 256]), st.integers(1, 5))
def test_it_is_the_twin_and_unwritten_slots_do_not_matter(case: Case, parts: int) -> None:
    out = case.run(case.poisoned(case.k), case.poisoned(case.v), parts=parts)
    assert relative_error(out, case.expected(case.k, case.v)) < 5e-3


@needs_amx
@settings(max_examples=60, deadline=None)
@given(cases([64, 128, 256]), st.integers(1, 5))
def test_int8_is_the_twin_on_dequantized_keys_and_values(case: Case, parts: int) -> None:
    (k, k_scales), (v, v_scales) = reference.quantize_kv(case.k), reference.quantize_kv(case.v)
    poisoned = (case.poisoned(k_scales), case.poisoned(v_scales))
    expected = case.expected(k * k_scales.unsqueeze(-1), v * v_scales.unsqueeze(-1))
    assert relative_error(case.run(k, v, poisoned, parts), expected) < 6e-3


@needs_amx
@pytest.mark.parametrize("growth", [1.0, 30.0, 1000.0])
def test_scores_may_grow_or_shrink_without_bound_along_a_sequence(growth: float) -> None:
    """Scores are positions times a slope: every chunk has a new maximum, or none but the first has one."""
    case = Case([(0, 400), (100, 300)], 2, 64, 32)
    case.q = torch.ones_like(case.q)
    for slope in (growth, -growth):
        for i, blocks in enumerate(case.tables):
            positions = torch.arange(int(case.seq_lens[i]) + 32)
            for block, part in zip(blocks.tolist(), positions.split(32), strict=False):
                if block < len(case.k):
                    case.k[block] = (slope * part / 64).view(1, -1, 1).bfloat16()
        assert relative_error(case.run(case.k, case.v), case.expected(case.k, case.v)) < 5e-3


@needs_amx
def test_a_value_beyond_the_query_has_no_weight_at_all() -> None:
    """Huge values of later tokens do not reach earlier queries, not even rounded."""
    case = Case([(0, 100)], 1, 64, 32)
    before = case.run(case.k, case.v)
    case.v[case.tables[0, 2].item()] = 3e38
    out = case.run(case.k, case.v)
    assert torch.equal(out[:64], before[:64])
    assert not torch.equal(out[64:], before[64:])


@needs_amx
def test_a_nan_in_a_query_stays_in_its_row() -> None:
    case = Case([(10, 50)], 2, 64, 32)
    expected = case.run(case.k, case.v)
    case.q[7, 1, 3] = math.nan
    out = case.run(case.k, case.v)
    assert out[7, 1].isnan().all()
    out[7, 1] = expected[7, 1]
    assert torch.equal(out, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8], ids=str)
def test_tiled_keys_and_values_lie_where_the_kernels_look(dtype: torch.dtype) -> None:
    """The orders that decode_tiled.cpp describes, index by index."""
    dims, ways, size, dim = 64 // dtype.itemsize, 4 // dtype.itemsize, 64, 128
    x = torch.randint(-100, 100, (2, 3, size, dim), generator=torch.Generator().manual_seed(0)).to(dtype)
    keys, values = reference.tile_keys(x).flatten(2), reference.tile_values(x).flatten(2)
    for t in range(size):
        for d in range(dim):
            key = t // 16 * 16 * dim + d // dims * 16 * dims + t % 16 * dims + d % dims
            value = t // 32 * 32 * dim + d // 16 * 512 + t % 32 // ways * 16 * ways + d % 16 * ways + t % ways
            assert torch.equal(keys[:, :, key], x[:, :, t, d]) and torch.equal(values[:, :, value], x[:, :, t, d])


@settings(deadline=None)
@given(st.integers(0, 1000))
def test_quantized_kv_is_within_half_a_step_and_keeps_zero_rows(seed: int) -> None:
    x = torch.randn(3, 2, 4, 32, generator=torch.Generator().manual_seed(seed))
    x[1, 1, 2] = 0
    q, scales = reference.quantize_kv(x)
    assert (q.dtype, q.shape, scales.dtype, scales.shape) == (torch.int8, x.shape, torch.float32, x.shape[:-1])
    assert torch.equal(q[1, 1, 2], torch.zeros(32, dtype=torch.int8))
    torch.testing.assert_close(scales[0], x[0].abs().amax(-1) / 127)
    assert ((q * scales.unsqueeze(-1) - x).abs() <= 0.501 * scales.unsqueeze(-1)).all()
