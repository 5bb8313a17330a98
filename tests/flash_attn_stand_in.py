"""Stands for the package flash_attn (2.7): refuses what its documentation and checks refuse, computes by the twin.

From flash_attn/flash_attn_interface.py's docstrings and the checks of csrc/flash_attn/flash_api.cpp (mha_varlen_fwd,
mha_fwd_kvcache), for the arguments that paged keys and values need.
"""

from __future__ import annotations

import torch

from nanoinfer.kernels import reference

calls: list[str] = []


def _check_cache(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block_table: torch.Tensor, batch: int) -> None:
    assert q.dtype in (torch.float16, torch.bfloat16), "FlashAttention only support fp16 and bf16 data type"
    assert k.dtype == q.dtype and v.dtype == q.dtype, "query and key must have the same dtype"
    assert q.device == k.device == v.device == block_table.device
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1, "Input tensor must have contiguous last dimension"
    assert k.dim() == 4 and k.shape == v.shape, "(num_blocks, page_block_size, num_heads_k, head_size)"
    assert k.shape[1] % 256 == 0, "Paged KV cache block size must be divisible by 256"
    head_size = q.shape[-1]
    assert head_size <= 256 and head_size % 8 == 0 and k.shape[3] == head_size
    assert q.shape[-2] % k.shape[2] == 0, "Number of heads in key/value must divide number of heads in query"
    assert block_table.dtype == torch.int32 and block_table.stride(-1) == 1
    assert block_table.dim() == 2 and block_table.shape[0] == batch


def _as_ours(cache: torch.Tensor) -> torch.Tensor:
    """To [blocks, num_kv_heads, block_size, head_dim]."""
    return cache.transpose(1, 2)


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    block_table: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal means aligned to the bottom right: the last query sees the last key."""
    calls.append("flash_attn_varlen_func")
    assert block_table is not None and q.dim() == 3
    batch = len(cu_seqlens_q) - 1
    _check_cache(q, k, v, block_table, batch)
    for starts in (cu_seqlens_q, cu_seqlens_k):
        assert starts.dtype == torch.int32 and starts.is_contiguous() and starts.shape == (batch + 1,)
    query_lens, seq_lens = cu_seqlens_q.diff(), cu_seqlens_k.diff()
    assert int(cu_seqlens_q[-1]) == len(q) and int(cu_seqlens_q[0]) == int(cu_seqlens_k[0]) == 0
    assert type(max_seqlen_q) is int and type(max_seqlen_k) is int
    assert int(query_lens.max()) <= max_seqlen_q and int(seq_lens.max()) <= max_seqlen_k
    assert max_seqlen_k <= block_table.shape[1] * k.shape[1]
    assert causal and dropout_p == 0.0
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    return reference.paged_attention(q, _as_ours(k), _as_ours(v), block_table, cu_seqlens_q, seq_lens, scale)


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    cache_seqlens: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> torch.Tensor:
    """q: (batch, seqlen_q, num_heads, head_size)."""
    calls.append("flash_attn_with_kvcache")
    assert k is None and v is None and q.dim() == 4 and q.shape[1] == 1
    assert block_table is not None and cache_seqlens is not None and causal
    _check_cache(q, k_cache, v_cache, block_table, q.shape[0])
    assert cache_seqlens.dtype == torch.int32 and cache_seqlens.shape == (q.shape[0],)
    assert cache_seqlens.is_contiguous()
    out = torch.zeros_like(q[:, 0])
    live = cache_seqlens > 0
    if bool(live.any()):
        scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
        starts = torch.arange(int(live.sum()) + 1)
        out[live] = reference.paged_attention(
            q[live, 0], _as_ours(k_cache), _as_ours(v_cache), block_table[live], starts, cache_seqlens[live], scale
        )
    return out.unsqueeze(1)
