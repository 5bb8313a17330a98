"""Writing keys and values to their slots: alone, and in one pass with the norms and the rotation of q and k.

A slot below zero belongs to a padding row and is skipped: such rows cannot write anywhere.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from nanoinfer.kernels.triton.operator import operator

# Heads of one token that a program works on.
HEADS = 4


@triton.jit
def _slot_rows(slot: tl.tensor, heads: tl.tensor, num_kv_heads: tl.tensor, block_size: tl.tensor) -> tl.tensor:
    """Rows of a cache seen as [blocks * num_kv_heads * block_size, head_dim], int64."""
    return ((slot // block_size) * num_kv_heads + heads) * block_size + slot % block_size


@triton.jit
def store_kv_kernel(
    k: tl.tensor,
    v: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    slots: tl.tensor,
    k_stride: tl.tensor,
    v_stride: tl.tensor,
    num_kv_heads: tl.tensor,
    block_size: tl.tensor,
    head_dim: tl.tensor,
    BLOCK_DIM: tl.constexpr,
) -> None:
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + token)
    dims = tl.arange(0, BLOCK_DIM)
    inside = (dims < head_dim) & (slot >= 0)
    row = _slot_rows(slot, head, num_kv_heads, block_size) * head_dim
    key = tl.load(k + token * k_stride + head * head_dim + dims, mask=inside, other=0.0)
    value = tl.load(v + token * v_stride + head * head_dim + dims, mask=inside, other=0.0)
    tl.store(k_cache + row + dims, key, mask=inside)
    tl.store(v_cache + row + dims, value, mask=inside)


@triton.jit
def norm_rotate_store_kernel(
    qkv: tl.tensor,
    q_weight: tl.tensor,
    k_weight: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    slots: tl.tensor,
    q: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    num_heads: tl.tensor,
    num_kv_heads: tl.tensor,
    block_size: tl.tensor,
    head_dim: tl.tensor,
    eps: tl.tensor,
    HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
) -> None:
    """Each program: some heads of one token, as two halves of head_dim; heads are queries, then keys, then values."""
    dtype = q.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    half = head_dim // 2
    dim = tl.arange(0, BLOCK_HALF)[None, :]
    in_half = dim < half
    is_q, is_v = head < num_heads, head >= num_heads + num_kv_heads
    inside = in_half & (head < num_heads + 2 * num_kv_heads)
    source = qkv + (token * (num_heads + 2 * num_kv_heads) + head) * head_dim + dim
    raw_first = tl.load(source, mask=inside, other=0.0)
    raw_second = tl.load(source + half, mask=inside, other=0.0)

    first, second = raw_first.to(tl.float32), raw_second.to(tl.float32)
    scale = tl.rsqrt(tl.sum(first * first + second * second, axis=1) / head_dim + eps)[:, None]
    norm_first = tl.where(
        is_q, tl.load(q_weight + dim, mask=in_half, other=0.0), tl.load(k_weight + dim, mask=in_half, other=0.0)
    )
    norm_second = tl.where(
        is_q,
        tl.load(q_weight + half + dim, mask=in_half, other=0.0),
        tl.load(k_weight + half + dim, mask=in_half, other=0.0),
    )
    first = norm_first.to(tl.float32) * (first * scale).to(dtype).to(tl.float32)
    second = norm_second.to(tl.float32) * (second * scale).to(dtype).to(tl.float32)
    c = tl.load(cos + token * half + dim, mask=in_half, other=0.0).to(tl.float32)
    s = tl.load(sin + token * half + dim, mask=in_half, other=0.0).to(tl.float32)
    rotated_first, rotated_second = (first * c - second * s).to(dtype), (second * c + first * s).to(dtype)

    q_row = q + (token * num_heads + head) * head_dim + dim
    tl.store(q_row, rotated_first, mask=inside & is_q)
    tl.store(q_row + half, rotated_second, mask=inside & is_q)
    slot = tl.load(slots + token)
    kv_head = head - num_heads - tl.where(is_v, num_kv_heads, 0)
    row = _slot_rows(slot, kv_head, num_kv_heads, block_size) * head_dim + dim
    is_key, is_value = inside & ~is_q & ~is_v & (slot >= 0), inside & is_v & (slot >= 0)
    tl.store(k_cache + row, rotated_first, mask=is_key)
    tl.store(k_cache + row + half, rotated_second, mask=is_key)
    tl.store(v_cache + row, raw_first, mask=is_value)
    tl.store(v_cache + row + half, raw_second, mask=is_value)


def _fake_store_kv(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor
) -> None:
    return None


@operator("store_kv(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slots) -> ()", _fake_store_kv)
def store_kv(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor
) -> None:
    """k, v: [T, num_kv_heads, head_dim], each token contiguous; caches: [blocks, num_kv_heads, block_size, head_dim],
    contiguous; slots: [T] int64. Twin: reference.store_kv for each."""
    num_kv_heads, block_size, head_dim = k_cache.shape[1:]
    if len(k):
        store_kv_kernel[(len(k), num_kv_heads)](
            k, v, k_cache, v_cache, slots, k.stride(0), v.stride(0), num_kv_heads, block_size, head_dim,
            BLOCK_DIM=triton.next_power_of_2(head_dim), num_warps=1,
        )  # fmt: skip


def _fake_norm_rotate_store(
    qkv: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    return qkv.new_empty(qkv.shape[0], qkv.shape[1] - 2 * k_cache.shape[1], qkv.shape[2])


@operator(
    "norm_rotate_store(Tensor qkv, Tensor q_weight, Tensor k_weight, Tensor cos, Tensor sin, Tensor(a!) k_cache, "
    "Tensor(b!) v_cache, Tensor slots, float eps) -> Tensor",
    _fake_norm_rotate_store,
)
def norm_rotate_store(
    qkv: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """q and k norm, rotary, and the store of k and v to their slots, in one pass. Returns q, [T, num_heads, head_dim].

    qkv: [T, num_heads + 2 * num_kv_heads, head_dim], contiguous; cos, sin: [T, head_dim / 2]; slots: [T] int64.
    Twin: AttentionBackend.prepare.
    """
    num_kv_heads, block_size, head_dim = k_cache.shape[1:]
    tokens, num_heads = qkv.shape[0], qkv.shape[1] - 2 * num_kv_heads
    q = qkv.new_empty(tokens, num_heads, head_dim)
    if tokens:
        norm_rotate_store_kernel[(tokens, triton.cdiv(qkv.shape[1], HEADS))](
            qkv, q_weight, k_weight, cos, sin, slots, q, k_cache, v_cache, num_heads, num_kv_heads, block_size,
            head_dim, eps, HEADS=HEADS, BLOCK_HALF=triton.next_power_of_2(head_dim // 2), num_warps=2,
        )  # fmt: skip
    return q
