"""The plain torch form of every kernel: what the layers run where no faster one exists, and the oracle in tests.

Shapes in comments; T is the number of tokens in the batch. Half-precision inputs are computed in the same places in
float32 as transformers does, so that both round alike.
"""

from __future__ import annotations

import functools
import math

import torch
import torch.nn.functional as F


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
