"""The tiled CPU kernels (AMX; bf16 or int8 caches): decode attention and the store, against the plain twins."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_cpu_kernels import KERNELS, needs_amx, randn, relative_error, side_by_side, written_caches

from nanoinfer.kernels import reference

pytestmark = needs_amx


@st.composite
def tiled(draw: st.DrawFn, kv_dtype: torch.dtype) -> dict[str, int | list[int]]:
    int8 = kv_dtype == torch.int8
    return {
        "seq_lens": draw(st.lists(st.integers(1, 300), min_size=1, max_size=6)),
        "block_size": draw(st.sampled_from([32, 64, 96])),
        "num_kv_heads": draw(st.integers(1, 3)),
        "group": draw(st.sampled_from([1, 2, 3, 5, 8] if int8 else [1, 2, 3, 8, 16])),
        "head_dim": draw(st.sampled_from([64, 128, 256] if int8 else [32, 64, 96, 128, 256])),
        "splits": draw(st.integers(1, 5)),
        "seed": draw(st.integers(0, 1000)),
    }


def tiled_caches(plain: torch.Tensor, kv_dtype: torch.dtype) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """(what is stored as float32 in plain order, the tiled caches that hold it). plain: [2, blocks, ...] bf16."""
    if kv_dtype == torch.bfloat16:
        return plain, side_by_side(reference.tile_keys(plain[0]), reference.tile_values(plain[1]))
    q, scales = reference.quantize_kv(plain)
    stored = q.float() * scales.unsqueeze(-1)
    # Unwritten slots: any bytes, and scales that would poison everything.
    unwritten = plain.isnan().any(-1)
    q[unwritten] = 77
    scales = scales.masked_fill(unwritten, float("nan"))
    kv = side_by_side(reference.tile_keys(q[0]), reference.tile_values(q[1]))
    return stored, (*kv, *side_by_side(*scales))


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.int8], ids=str)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_tiled_decode_is_the_oracle_and_reads_no_unwritten_slot(kv_dtype: torch.dtype, data: st.DataObject) -> None:
    assert KERNELS is not None
    case = data.draw(tiled(kv_dtype))
    caches, tables = written_caches(case, torch.bfloat16)
    stored, kv = tiled_caches(caches, kv_dtype)
    assert KERNELS.can_tile(kv_dtype, case["group"], case["head_dim"], case["block_size"])
    seq_lens, dim = case["seq_lens"], case["head_dim"]
    rows = torch.arange(len(seq_lens)) * 2 + 1
    q = randn(2 * len(seq_lens), case["num_kv_heads"] * case["group"], dim, seed=case["seed"] + 1, dtype=torch.bfloat16)
    out = torch.full_like(q, 7.0)
    lens = torch.tensor(seq_lens, dtype=torch.int32)
    KERNELS.tiled_decode(q, out, kv, tables, lens, rows, dim**-0.5, case["splits"])
    loc = torch.arange(len(seq_lens) + 1)
    expected = reference.paged_attention(q[rows].float(), *stored.float(), tables, loc, lens, dim**-0.5)
    # Only the output's own rounding is left for int8: queries and weights keep 16 bits.
    assert relative_error(out[rows], expected) < (2.5e-3 if kv_dtype == torch.int8 else 5e-3)
    assert (out[rows - 1] == 7.0).all()


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.int8], ids=str)
def test_nan_in_a_written_slot_reaches_the_output(kv_dtype: torch.dtype) -> None:
    assert KERNELS is not None
    case = {"seq_lens": [70], "block_size": 32, "num_kv_heads": 1, "group": 2, "head_dim": 64, "splits": 1, "seed": 0}
    caches, tables = written_caches(case, torch.bfloat16)
    _, kv = tiled_caches(caches, kv_dtype)
    q = randn(1, 2, 64, seed=1, dtype=torch.bfloat16)
    out, lens, rows = torch.empty_like(q), torch.tensor([70], dtype=torch.int32), torch.tensor([0])
    KERNELS.tiled_decode(q, out, kv, tables, lens, rows, 0.125, 1)
    assert out.isfinite().all()
    poisoned = kv[0] if kv_dtype == torch.bfloat16 else kv[2]
    poisoned[tables[0, 1]] = float("nan")
    KERNELS.tiled_decode(q, out, kv, tables, lens, rows, 0.125, 1)
    assert out.isnan().all()


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize(
    ("tokens", "heads", "kv_heads", "dim"),
    # So many tokens that stores go around the caches, too.
    [(11, 4, 2, 64), (11, 3, 1, 256), (11, 16, 8, 128), (301, 16, 8, 128), (701, 3, 1, 256)],
)
def test_the_tiled_store_is_its_twins_and_writes_nothing_else(
    kv_dtype: torch.dtype, tokens: int, heads: int, kv_heads: int, dim: int
) -> None:
    assert KERNELS is not None
    block_size, num_blocks = 32, 7 + tokens // 16
    qkv = randn(tokens, heads + 2 * kv_heads, dim, seed=0, dtype=torch.bfloat16)
    qkv[3, heads + kv_heads :] = 0  # a value of zeros
    q_weight, k_weight = (randn(dim, seed=s, dtype=torch.bfloat16) for s in (1, 2))
    angles = torch.rand(tokens, dim // 2) * 6
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
    # Scattered tokens, and runs of a prompt's.
    runs = torch.arange(num_blocks * block_size).split([1, 1, 2, 3, 5, 7, 13] * num_blocks)
    slots = torch.cat([runs[i] for i in torch.randperm(len(runs)).tolist()])[:tokens]
    shape = (2, num_blocks, kv_heads, block_size)
    data = torch.full((*shape, dim), 5, dtype=kv_dtype)
    scales = torch.full(shape, 5.0)
    kv = (*data, *scales) if kv_dtype == torch.int8 else (*data,)
    q = KERNELS.norm_rotate_store(qkv, q_weight, k_weight, 1e-6, cos, sin, kv, slots, tiled=True)
    expected_q, k, v = qkv.split([heads, kv_heads, kv_heads], dim=1)
    expected_q = reference.apply_rotary(reference.rms_norm(expected_q, q_weight, 1e-6), cos, sin)
    assert relative_error(q, expected_q) < 1e-2
    k = reference.apply_rotary(reference.rms_norm(k, k_weight, 1e-6), cos, sin)
    twins = torch.full((*shape, dim), 5, dtype=kv_dtype), torch.full(shape, 5.0)
    for i, (x, store) in enumerate(((k, reference.store_tiled_keys), (v, reference.store_tiled_values))):
        if kv_dtype == torch.int8:
            x, x_scales = reference.quantize_kv(x)
            reference.store_kv(twins[1][i], x_scales, slots)
        store(twins[0][i], x, slots)
    # Values are copied, or quantized (where a tie may go either way); keys differ by the rounding of norm and rotation.
    assert ((data[1].float() - twins[0][1].float()).abs() <= (1 if kv_dtype == torch.int8 else 0)).all()
    torch.testing.assert_close(scales[1], twins[1][1])
    untouched = twins[0] == 5
    assert (data[0][untouched[0]] == 5).float().mean() > 0.99
    assert relative_error(data[0].float(), twins[0][0].float()) < 1e-2
    assert relative_error(scales[0], twins[1][0]) < 1e-2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8], ids=str)
def test_storing_token_by_token_gives_the_tiled_order(dtype: torch.dtype) -> None:
    x = torch.randint(-100, 100, (3, 2, 64, 128), generator=torch.Generator().manual_seed(0)).to(dtype)
    slots = torch.randperm(3 * 64)
    tokens = x.transpose(1, 2).flatten(0, 1)[slots]
    for store, tile in (
        (reference.store_tiled_keys, reference.tile_keys),
        (reference.store_tiled_values, reference.tile_values),
    ):
        cache = torch.zeros_like(x)
        store(cache, tokens, slots)
        assert torch.equal(cache, tile(x))
