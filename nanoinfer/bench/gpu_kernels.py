"""Every Triton kernel against its twin, on a real GPU: bf16, Qwen3-0.6B's shapes. See gpu_parts.py.

Each of GROUPS yields (name, error): the relative error of what was computed, or the share of entries that differ.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from nanoinfer.kernels import reference

VOCAB_SIZE = 151936
_BLOCK = 32


def _relative_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    return float((out.double() - expected.double()).norm() / expected.double().norm())


def _randn(*size: int) -> torch.Tensor:
    return torch.randn(size, device="cuda").bfloat16()


def _unwritten(like: torch.Tensor) -> torch.Tensor:
    """For results: what a kernel leaves out is not a number, and not the result of the one before."""
    return torch.full_like(like, float("nan"))


def _layer_errors() -> Iterator[tuple[str, float]]:
    from nanoinfer.kernels.triton import activation, kv_store, norm, rotary

    x, residual, weight = _randn(300, 1024), _randn(300, 1024), _randn(1024)
    expected, total = reference.add_rms_norm(x, residual, weight, 1e-6)
    yield "add_rms_norm", _relative_error(norm.add_rms_norm(x, residual, weight, 1e-6), expected)
    yield "its residual", _relative_error(residual, total)
    yield "rms_norm", _relative_error(norm.rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6))
    gate_up = _randn(300, 6144)
    yield "silu_and_mul", _relative_error(activation.silu_and_mul(gate_up), reference.silu_and_mul(gate_up))
    angles = (torch.randint(0, 40960, (300,), device="cuda"), 1e6 ** -(torch.arange(64, device="cuda") / 64), 1.0)
    cos, sin = rotary.rotary(*angles, torch.bfloat16)
    yield "rotary", _relative_error(torch.cat((cos, sin)), torch.cat(reference.rotary(*angles, torch.bfloat16)))

    qkv, q_weight, k_weight = _randn(300, 32, 128), _randn(128), _randn(128)
    caches = [torch.zeros(20, 8, _BLOCK, 128, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    slots = torch.randperm(20 * _BLOCK, device="cuda")[:300]
    q = kv_store.norm_rotate_store(qkv, q_weight, k_weight, cos, sin, caches[0], caches[1], slots, 1e-6)
    first, k, v = qkv.split([16, 8, 8], dim=1)
    reference.store_kv(caches[2], reference.apply_rotary(reference.rms_norm(k, k_weight, 1e-6), cos, sin), slots)
    reference.store_kv(caches[3], v, slots)
    rotated = reference.apply_rotary(reference.rms_norm(first, q_weight, 1e-6), cos, sin)
    yield "norm_rotate_store: q", _relative_error(q, rotated)
    yield "norm_rotate_store: k", _relative_error(caches[0], caches[2])
    yield "norm_rotate_store: v", _relative_error(caches[1], caches[3])


def _attention_errors() -> Iterator[tuple[str, float]]:
    """Decode, split and not, and prefill with a cached prefix; against the twin."""
    from nanoinfer.kernels.triton import decode, prefill

    seq_lens = torch.tensor([2049, 700, 31, 1], dtype=torch.int32, device="cuda")
    tables = torch.randperm(4 * 70, device="cuda").int().view(4, 70)
    k, v = (_randn(280, 8, _BLOCK, 128) for _ in range(2))
    q, scale = _randn(4, 16, 128), 128**-0.5
    rows = torch.arange(4, dtype=torch.int32, device="cuda")
    expected = reference.paged_attention(q, k, v, tables, torch.arange(5), seq_lens, scale)
    for splits in (1, 8):
        out = _unwritten(q)
        decode.paged_decode(q, k, v, tables, seq_lens, rows, out, scale, splits, decode.MIN_TILES)
        yield f"paged_decode, {splits} split(s)", _relative_error(out, expected)
    starts = torch.tensor([0, 580, 880, 899, 900], dtype=torch.int32)
    q = _randn(900, 16, 128)
    num_queries = prefill.queries_per_tile(q.dtype, 128, 2)
    work = prefill.work_items(starts.numpy(), seq_lens.cpu().numpy(), torch.arange(4).numpy(), num_queries)
    items = torch.from_numpy(work).cuda()
    out = _unwritten(q)
    prefill.paged_prefill(q, k, v, tables, seq_lens, starts.cuda(), items, out, scale)
    yield "paged_prefill", _relative_error(out, reference.paged_attention(q, k, v, tables, starts, seq_lens, scale))


def _far_block_errors() -> Iterator[tuple[str, float]]:
    """Blocks beyond 2^31 elements of a cache, as a large pool has them: stored to, and read."""
    from nanoinfer.kernels.triton import decode, kv_store

    num_blocks = 2**31 // (8 * _BLOCK * 128) + 4
    caches = [torch.empty(num_blocks, 8, _BLOCK, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    k, v, q = _randn(64, 8, 128), _randn(64, 8, 128), _randn(1, 16, 128)
    tables = torch.tensor([[num_blocks - 1, num_blocks - 3]], dtype=torch.int32, device="cuda")
    positions = torch.arange(64, device="cuda")
    slots = tables[0][positions // _BLOCK].long() * _BLOCK + positions % _BLOCK
    kv_store.store_kv(k, v, *caches, slots)
    out, rows = _unwritten(q), torch.zeros(1, dtype=torch.int32, device="cuda")
    decode.paged_decode(q, *caches, tables, rows + 64, rows, out, 128**-0.5, 1, decode.MIN_TILES)
    near_k, near_v = (x.view(2, _BLOCK, 8, 128).transpose(1, 2).contiguous() for x in (k, v))
    in_order = torch.arange(2, device="cuda").int().unsqueeze(0)
    expected = reference.paged_attention(q, near_k, near_v, in_order, torch.arange(2), rows + 64, 128**-0.5)
    yield "store_kv and paged_decode, far blocks", _relative_error(out, expected)


def _sampler_errors() -> Iterator[tuple[str, float]]:
    from nanoinfer.kernels.triton import sampler, threshold

    logits = _randn(64, VOCAB_SIZE) * 4
    best, winners = sampler.row_argmax(logits)
    inverse, numbers = torch.full((64,), 1.5, device="cuda"), torch.rand(64, device="cuda", dtype=torch.float64)
    yield "row_argmax", float((winners != reference.row_argmax(logits)[1]).double().mean())
    filters = (torch.full((64,), 0.001, device="cuda"), torch.full((64,), 50, device="cuda").int(), numbers.float())
    least = threshold.sampling_threshold(logits, best, inverse, *filters)
    expected = reference.sampling_threshold(logits, best, inverse, *filters)
    yield "sampling_threshold", float((least != expected).double().mean())
    wide = logits.float() + torch.rand_like(logits, dtype=torch.float32)
    arguments = (wide, wide.amax(dim=1), inverse, *filters)
    wrong = threshold.sampling_threshold(*arguments) != reference.sampling_threshold(*arguments)
    yield "sampling_threshold, float32", float(wrong.double().mean())
    inverse[::4] = 0.0
    for name, bound in (("choose", torch.full_like(best, float("-inf"))), ("choose, filtered", least)):
        sums = sampler.segment_sums(logits, best, inverse, bound)
        tokens = sampler.choose(logits, best, winners, inverse, bound, sums, numbers)
        right = reference.choose(logits, best, winners, inverse, bound, numbers)
        yield name, float((tokens != right).double().mean())
    targets = numbers * sums.sum(dim=1)
    tokens = sampler.draw(logits, best, inverse, least, sums, targets)
    yield "draw", float((tokens != reference.draw(logits, best, inverse, least, targets)).double().mean())
    wide, seen = logits.float(), torch.rand(64, VOCAB_SIZE, device="cuda") < 0.1
    counts = torch.randint(0, 3, wide.shape, device="cuda").int()
    factors = [torch.full((64,), value, device="cuda") for value in (1.3, 0.5, 0.2)]
    right = reference.penalize(wide, seen, counts, *factors)
    rows = torch.arange(64, device="cuda").int()
    sampler.penalize(wide, rows, counts + seen.int() * sampler.IN_PROMPT, *factors)
    yield "penalize", _relative_error(wide, right)


def _input_errors() -> Iterator[tuple[str, float]]:
    """Exact: the largest share of entries that differ."""
    from nanoinfer.kernels.triton import inputs

    def integers(high: int, *size: int) -> torch.Tensor:
        return torch.randint(0, high, size, device="cuda")

    rows = torch.randperm(256, device="cuda").int()
    rows[::7] = -1
    lengths, tables = (integers(4096, 256).int(), integers(20, 256).int()), integers(10**6, 256, 128).int()
    shares = [torch.rand(256, device="cuda") for _ in range(3)]
    settings = (shares[0], shares[1], integers(50, 256).int(), shares[2])
    step = (rows, lengths[0], integers(150000, 256), lengths[1], integers(2**62, 256) * 3, *settings, tables, _BLOCK)
    pairs = zip(inputs.prepare_decode(*step), reference.prepare_decode(*step), strict=True)
    yield "prepare_decode", max(float((ours != right).double().mean()) for ours, right in pairs)
    last_token, tokens = integers(150000, 256), integers(150000, 256)
    right = last_token.index_copy(0, rows[rows >= 0].long(), tokens[rows >= 0])
    inputs.store_tokens(last_token, rows, tokens)
    yield "store_tokens", float((last_token != right).double().mean())


GROUPS = (_layer_errors, _attention_errors, _far_block_errors, _sampler_errors, _input_errors)
