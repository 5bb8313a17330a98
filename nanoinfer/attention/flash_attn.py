"""Attention on a GPU by the flash-attn package (Dao, 2023): used where the user asks for it and it is installed.

Its paged functions want keys and values as [blocks, block_size, num_kv_heads, head_dim] with head_dim contiguous, which
a transposed view of our layout is, and blocks of a multiple of 256 tokens. Norms, rotation and the store are Triton's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nanoinfer.attention.base import ForwardBatch, LayerKV
from nanoinfer.attention.triton import TritonAttention
from nanoinfer.attention.upload import upload
from nanoinfer.config import ModelConfig

_BLOCK_MULTIPLE = 256
_MAX_HEAD_DIM = 256


@dataclass(frozen=True)
class _FlashPlan:
    """On the device. query_start_loc: [num_seqs + 1], key_start_loc: the same for keys; None where all decode."""

    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor | None
    key_start_loc: torch.Tensor | None
    max_query_len: int
    max_seq_len: int


class FlashAttention(TritonAttention):
    name = "flash_attn"
    default_block_size = _BLOCK_MULTIPLE
    supports_cuda_graph = True

    @classmethod
    def rejects(
        cls,
        model_config: ModelConfig,
        device: str,
        dtype: torch.dtype | None = None,
        block_size: int | None = None,
    ) -> str | None:
        if (reason := super().rejects(model_config, device, dtype, block_size)) is not None:
            return reason
        try:
            import flash_attn  # noqa: F401
        except ImportError as error:
            return f"the package flash_attn cannot be imported ({error})"
        if dtype is not None and dtype not in (torch.float16, torch.bfloat16):
            return f"dtype is {str(dtype).removeprefix('torch.')}, and it computes in float16 and bfloat16 only"
        if model_config.head_dim > _MAX_HEAD_DIM or model_config.head_dim % 8:
            return f"head_dim is {model_config.head_dim}; it takes multiples of 8 up to {_MAX_HEAD_DIM}"
        if block_size is not None and block_size % _BLOCK_MULTIPLE:
            return f"kvcache_block_size is {block_size}, and it takes multiples of {_BLOCK_MULTIPLE} only"
        return None

    def plan(self, batch: ForwardBatch, block_size: int) -> object:
        seq_lens, starts = batch.seq_lens, batch.query_start_loc
        key_starts = torch.nn.functional.pad(seq_lens.cumsum(0, dtype=torch.int32), (1, 0))
        arrays = [seq_lens.numpy(), starts.numpy(), key_starts.numpy()]
        # max_seq_len is a bound of all steps, and the tables have columns for this one's longest sequence.
        max_seq_len = min(batch.max_seq_len, batch.block_tables.shape[1] * block_size)
        lens, query_start_loc, key_start_loc = upload(arrays, batch.block_tables.device)
        if batch.is_decode_only:
            return self.plan_decode(batch.block_tables, lens, max_seq_len)
        return _FlashPlan(batch.block_tables, lens, query_start_loc, key_start_loc, batch.max_query_len, max_seq_len)

    def plan_decode(self, block_tables: torch.Tensor, seq_lens: torch.Tensor, max_seq_len: int) -> object:
        return _FlashPlan(block_tables, seq_lens, None, None, 1, max_seq_len)

    def attend(self, q: torch.Tensor, kv: LayerKV, batch: ForwardBatch) -> torch.Tensor:
        import flash_attn

        plan = batch.plan
        assert isinstance(plan, _FlashPlan)
        k_cache, v_cache = (cache.transpose(1, 2) for cache in kv)
        out: torch.Tensor
        if plan.query_start_loc is None:
            out = flash_attn.flash_attn_with_kvcache(
                q.unsqueeze(1), k_cache, v_cache, cache_seqlens=plan.seq_lens, block_table=plan.block_tables,
                softmax_scale=self.scale, causal=True,
            )  # fmt: skip
            return out.squeeze(1)
        out = flash_attn.flash_attn_varlen_func(
            q, k_cache, v_cache, cu_seqlens_q=plan.query_start_loc, cu_seqlens_k=plan.key_start_loc,
            max_seqlen_q=plan.max_query_len, max_seqlen_k=plan.max_seq_len, softmax_scale=self.scale, causal=True,
            block_table=plan.block_tables,
        )  # fmt: skip
        return out
