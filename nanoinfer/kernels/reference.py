"""The plain torch form of every kernel: what the layers run where no faster one exists, and the oracle in tests.

Shapes in comments; T is the number of tokens in the batch. Half-precision inputs are computed in the same places in
float32 as transformers does, so that both round alike.
"""

from __future__ import annotations

import functools
import math

import torch
import torch.nn.functional as F

# One layer's keys and values, [blocks, num_kv_heads, block_size, head_dim] each, in the order that their backend keeps
# them in; for int8, also the scales of both, [blocks, num_kv_heads, block_size] float32.
LayerKV = tuple[torch.Tensor, ...]


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm (Zhang and Sennrich, 2019) over the last dimension. x: [..., size], weight: [size]."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rms_norm(x + residual), x + residual): the end of one residual branch and the start of the next."""
    residual = x + residual
    return rms_norm(residual, weight, eps), residual


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """SwiGLU's gate. x: [..., 2 * size] with the gate's half first; returns [..., size]."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Symmetric int8 per row: x is about q * scale. x: [rows, size]; returns q, int8, and scale, [rows, 1] float32.

    scale is the row's largest magnitude / 127. A row of zeros gives zeros, and one with a NaN the scale NaN.
    """
    wide = x.float()
    largest = wide.abs().amax(dim=-1, keepdim=True).clamp(min=1e-30)
    # Not `127.0 / largest`, which torch computes as a reciprocal times 127: rounded twice.
    inverse = torch.full_like(largest, 127.0) / largest
    return (wide * inverse).round().to(torch.int8), largest / 127.0


def linear_int8(
    x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None = None, gated: bool = False
) -> torch.Tensor:
    """x W^T + b with rows of x and of W in int8 (`quantize_rows`), products in int32, the rest in float32.

    x: [T, in_features], quantized here. weight: [out_features, in_features] int8, scales: [out_features] float32.
    gated: SiLU-and-mul of that, before it is rounded to x's type.
    """
    q, x_scales = quantize_rows(x)
    y = _int_product(q, weight) * x_scales * scales
    y = y if bias is None else y + bias.float()
    return (silu_and_mul(y) if gated else y).to(x.dtype)


def _int_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x W^T of int8 matrices, as float32."""
    # torch gets a single column wrong (2.13).
    if x.shape[1] > 1 and _int_mm_is_exact():
        return torch._int_mm(x, weight.t()).float()
    return F.linear(x.float(), weight.float())


@functools.cache
def _int_mm_is_exact() -> bool:
    """Without VNNI instructions, int8 products may be summed in saturating int16."""
    extreme = torch.full((16, 64), 127, dtype=torch.int8)
    return bool((torch._int_mm(extreme, -extreme.t()) == -64 * 127 * 127).all())


def rotary(
    positions: torch.Tensor, inv_freq: torch.Tensor, amplitude: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of positions [T] times inv_freq [half] float32, times amplitude: [T, half] each, in `dtype`."""
    angles = positions.float().unsqueeze(-1) * inv_freq
    return (angles.cos() * amplitude).to(dtype), (angles.sin() * amplitude).to(dtype)


def apply_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding (Su et al., 2021), half-split. x: [T, num_heads, head_dim], cos and sin: [T, head_dim / 2]."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def store_kv(cache: torch.Tensor, values: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Writes values [T, num_kv_heads, head_dim] to slots [T] of cache [blocks, num_kv_heads, block_size, head_dim]."""
    block_size = cache.shape[2]
    cache[slot_mapping // block_size, :, slot_mapping % block_size] = values


def quantize_kv(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Symmetric int8 with a scale per token and head: x = q * scale. x: [..., head_dim]; scales [...] float32."""
    largest = x.float().abs().amax(dim=-1)
    inverse = torch.where(largest > 1e-30, 127 / largest, 0)
    return (x.float() * inverse.unsqueeze(-1)).round().to(torch.int8), torch.where(largest > 1e-30, largest / 127, 0)


def tile_keys(k: torch.Tensor) -> torch.Tensor:
    """Plain keys [blocks, num_kv_heads, block_size, head_dim] in the order of decode_tiled.cpp; same shape back."""
    dims = 64 // k.dtype.itemsize
    return k.unflatten(3, (-1, dims)).unflatten(2, (-1, 16)).transpose(3, 4).reshape(k.shape)


def tile_values(v: torch.Tensor) -> torch.Tensor:
    """Plain values [blocks, num_kv_heads, block_size, head_dim] in the order of decode_tiled.cpp; same shape back."""
    ways = 4 // v.dtype.itemsize
    tiles = v.unflatten(3, (-1, 16)).unflatten(2, (-1, 32 // ways, ways))  # [.., 32 tokens, group, way, 16 dims, dim]
    return tiles.permute(0, 1, 2, 5, 3, 6, 4).reshape(v.shape)


def store_tiled_keys(cache: torch.Tensor, keys: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """`store_kv` for a cache in the order of `tile_keys`."""
    block_size, dims = cache.shape[2], 64 // cache.dtype.itemsize
    tiles = cache.view(*cache.shape[:2], -1, cache.shape[3] // dims, 16, dims)
    block, offset = slot_mapping // block_size, slot_mapping % block_size
    tiles[block, :, offset // 16, :, offset % 16] = keys.unflatten(2, (-1, dims))


def store_tiled_values(cache: torch.Tensor, values: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """`store_kv` for a cache in the order of `tile_values`."""
    block_size, ways = cache.shape[2], 4 // cache.dtype.itemsize
    tiles = cache.view(*cache.shape[:2], -1, cache.shape[3] // 16, 32 // ways, 16, ways)
    block, offset = slot_mapping // block_size, slot_mapping % block_size
    tiles[block, :, offset // 32, :, offset % 32 // ways, :, offset % ways] = values.unflatten(2, (-1, 16))


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Causal attention over paged keys and values, sequence by sequence, in float32. The oracle for every backend.

    q: [T, num_heads, head_dim], the queries of sequence i at query_start_loc[i]:query_start_loc[i + 1], being the last
    ones of its seq_lens[i] tokens. k_cache, v_cache: [blocks, num_kv_heads, block_size, head_dim]. block_tables:
    [num_seqs, columns]; columns beyond a sequence's length are not looked at. Returns [T, num_heads, head_dim].
    """
    out = torch.empty_like(q)
    num_kv_heads, block_size = k_cache.shape[1], k_cache.shape[2]
    group = q.shape[1] // num_kv_heads
    for i, seq_len in enumerate(seq_lens.tolist()):
        start, stop = int(query_start_loc[i]), int(query_start_loc[i + 1])
        blocks = block_tables[i, : math.ceil(seq_len / block_size)].long()
        k = k_cache[blocks].transpose(1, 2).flatten(0, 1)[:seq_len].float().repeat_interleave(group, dim=1)
        v = v_cache[blocks].transpose(1, 2).flatten(0, 1)[:seq_len].float().repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q[start:stop].float(), k) * scale
        query_positions = torch.arange(seq_len - (stop - start), seq_len, device=q.device)
        visible = torch.arange(seq_len, device=q.device) <= query_positions.unsqueeze(1)
        probs = scores.masked_fill(~visible, -math.inf).softmax(dim=-1)
        out[start:stop] = torch.einsum("hqk,khd->qhd", probs, v).to(q.dtype)
    return out


def row_argmax(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Largest value, float32, and first column that has it, per row of [rows, columns]; NaN beats all."""
    winners = logits.argmax(dim=-1)
    return logits.gather(1, winners.unsqueeze(1)).squeeze(1).float(), winners


def segment_sums(
    logits: torch.Tensor, best: torch.Tensor, inverse_temperature: torch.Tensor, segment: int
) -> torch.Tensor:
    """[rows, segments] float64: sums of exp((logit - best) / temperature) over segments of so many columns.

    best, inverse_temperature: [rows] float32. The last segment may be shorter.
    """
    weights = sampling_weights(logits, best, inverse_temperature)
    columns = logits.shape[1]
    padded = F.pad(weights, (0, -columns % segment))
    return padded.unflatten(1, (-1, segment)).sum(dim=-1, dtype=torch.float64)


def sampling_weights(logits: torch.Tensor, best: torch.Tensor, inverse_temperature: torch.Tensor) -> torch.Tensor:
    """exp((logit - best) / temperature), [rows, columns] float32; zero where that is below float32's normal numbers."""
    scaled = (logits.float() - best.unsqueeze(1)) * inverse_temperature.unsqueeze(1)
    return scaled.exp().masked_fill_(scaled < -87.0, 0.0)


def prepare_decode(
    rows: torch.Tensor,
    num_computed: torch.Tensor,
    last_token: torch.Tensor,
    num_prompt: torch.Tensor,
    seeds: torch.Tensor,
    inverse: torch.Tensor,
    min_p: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    block_tables: torch.Tensor,
    block_size: int,
) -> tuple[torch.Tensor, ...]:
    """(input_ids, positions, slots: int64; seq_lens: int32; uniforms: float64; table_rows: int32; inverse, min_p,
    top_k, top_p as they are kept), [n] each, for one query per row.

    rows, num_computed: [n]; row -1 is padding, with length 0, slot -1, row 0 of the tables and settings of zero. The
    others are kept per row: last_token, num_prompt, seeds [R] (int64 with the bits of uint64), settings of the sampler
    [R], block_tables [R, columns].
    """
    is_live = rows >= 0
    row = rows.where(is_live, 0).long()
    position = num_computed.where(is_live, 0).long()
    block = block_tables[row, position // block_size].long()
    slots = (block * block_size + position % block_size).where(is_live, -1)
    output_indices = position + 1 - num_prompt[row].where(is_live, 0)
    uniforms = uniform_numbers(seeds[row].where(is_live, 0), output_indices)
    seq_lens = (position + 1).where(is_live, 0).int()
    settings = (kept[row].where(is_live, 0) for kept in (inverse, min_p, top_k, top_p))
    return last_token[row].where(is_live, 0), position, slots, seq_lens, uniforms, row.int(), *settings


def uniform_numbers(seeds: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """In [0, 1), float64: two rounds of SplitMix64 (Steele et al., 2014) over int64 with the bits of uint64."""

    def signed(value: int) -> int:
        return value - 2**64 if value >= 2**63 else value

    def shifted(z: torch.Tensor, bits: int) -> torch.Tensor:
        return (z >> bits) & ((1 << (64 - bits)) - 1)

    def mix(z: torch.Tensor) -> torch.Tensor:
        z = (z ^ shifted(z, 30)) * signed(0xBF58476D1CE4E5B9)
        z = (z ^ shifted(z, 27)) * signed(0x94D049BB133111EB)
        return z ^ shifted(z, 31)

    golden = signed(0x9E3779B97F4A7C15)
    return shifted(mix(mix(seeds + golden) + indices * golden + golden), 32).double() * 2.0**-32


def sampling_threshold(
    logits: torch.Tensor,
    best: torch.Tensor,
    inverse_temperature: torch.Tensor,
    min_p: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
) -> torch.Tensor:
    """[rows] float32: the least logit that min_p, then top_k, then top_p leave in, by sorting; -inf where all are off.

    best, inverse_temperature, min_p (0 is off), top_p (1 is off): [rows] float32; top_k: [rows] (0 is off). Tokens tied
    with the last one that is kept are kept.
    """
    descending = logits.float().sort(dim=-1, descending=True).values
    weights = sampling_weights(descending, best, inverse_temperature).double()
    rank = torch.arange(logits.shape[1], device=logits.device)
    least = torch.where(min_p > 0, best + min_p.log() / inverse_temperature, -math.inf)
    kth = descending.gather(1, (top_k.long() - 1).clamp(0, logits.shape[1] - 1).unsqueeze(1)).squeeze(1)
    least = torch.where((top_k > 0) & (top_k < logits.shape[1]), torch.maximum(least, kth), least)
    weights = weights.where(descending >= least.unsqueeze(1), 0.0)
    goal = weights.sum(dim=-1, keepdim=True) * top_p.double().unsqueeze(1)
    last_kept = rank.where(weights.cumsum(dim=-1) >= goal, logits.shape[1] - 1).amin(dim=-1, keepdim=True)
    return torch.where(top_p < 1, torch.maximum(least, descending.gather(1, last_kept).squeeze(1)), least)


def draw(
    logits: torch.Tensor,
    best: torch.Tensor,
    inverse_temperature: torch.Tensor,
    least: torch.Tensor,
    targets: torch.Tensor,
) -> torch.Tensor:
    """[rows] int64: the first column at which the cumulative weight of logits from `least` on exceeds `targets` [rows].

    The last column with a weight where the target is not exceeded.
    """
    weights = sampling_weights(logits, best, inverse_temperature).where(logits.float() >= least.unsqueeze(1), 0.0)
    column = torch.arange(logits.shape[1], device=logits.device)
    passed = torch.searchsorted(weights.double().cumsum(dim=-1), targets.unsqueeze(1), right=True).squeeze(1)
    return torch.minimum(passed, column.where(weights > 0, 0).amax(dim=-1))


def choose(
    logits: torch.Tensor,
    best: torch.Tensor,
    winners: torch.Tensor,
    inverse_temperature: torch.Tensor,
    least: torch.Tensor,
    uniforms: torch.Tensor,
) -> torch.Tensor:
    """[rows] int64: `draw` at `uniforms` [rows] of all weights; winners where the inverse is 0, -1 where best is not
    finite."""
    weights = sampling_weights(logits, best, inverse_temperature).where(logits.float() >= least.unsqueeze(1), 0.0)
    targets = uniforms * weights.sum(dim=-1, dtype=torch.float64)
    drawn = draw(logits, best, inverse_temperature, least, targets)
    return drawn.where(inverse_temperature > 0, winners).where(best.isfinite(), -1)


def penalize(
    logits: torch.Tensor,
    in_prompt: torch.Tensor,
    output_counts: torch.Tensor,
    repetition: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
) -> torch.Tensor:
    """The logits with vLLM's penalties. The first three: [rows, columns], logits float32; the others: [rows]."""
    seen = in_prompt | (output_counts > 0)
    repetition, presence, frequency = (x.unsqueeze(1) for x in (repetition, presence, frequency))
    scaled = torch.where(logits > 0, logits / repetition, logits * repetition)
    return torch.where(seen, scaled, logits) - frequency * output_counts - presence * (output_counts > 0)
