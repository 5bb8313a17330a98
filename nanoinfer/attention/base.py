"""What the model and an attention backend exchange: `ForwardBatch`, `KVCache` and the `AttentionBackend` interface.

The runner builds a `ForwardBatch` per step and passes it, with the `KVCache`, down to the attention layers as plain
arguments. A backend's `plan` runs once per step; all layers use its result.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from nanoinfer.config import ModelConfig
from nanoinfer.kernels import reference
from nanoinfer.kernels.reference import LayerKV

# cos and sin of the step's positions, [num_tokens, head_dim / 2] each, in the model's dtype.
Rotation = tuple[torch.Tensor, torch.Tensor]


@dataclass
class ForwardBatch:
    """One step's tokens: those of sequence i are query_start_loc[i] to query_start_loc[i + 1] - 1.

    input_ids, positions: [num_tokens], int64.
    query_start_loc: [num_seqs + 1] int32, on the CPU; seq_lens: [num_seqs] int32, on the CPU: tokens with keys and
        values when the step is done, the query tokens included.
    block_tables: [num_seqs, max_blocks] int32; entries beyond a sequence's blocks are meaningless.
    slot_mapping: [num_tokens] int64: block * block_size + offset of each token's key and value; below zero in a padding
        row of a CUDA graph, whose key and value are not stored.
    logits_indices: [num_sampled] int64: the tokens whose logits are wanted.
    plan: what the backend prepared for this step.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_tables: torch.Tensor
    slot_mapping: torch.Tensor
    logits_indices: torch.Tensor
    max_query_len: int
    max_seq_len: int
    plan: object = None

    @property
    def is_decode_only(self) -> bool:
        return self.max_query_len == 1


class KVCache:
    """The pool of keys and values of all layers of one rank.

    data: [2, num_layers, num_blocks, num_kv_heads, block_size, head_dim], in memory dense, or with the first three
    in another order; `layer(i)` gives that layer's (keys, values). What one sequence and KV head reads of
    a block is contiguous. scales: of a quantized cache, one for each token and head, float32, with the dimensions of
    data but the last.
    """

    def __init__(self, data: torch.Tensor, scales: torch.Tensor | None = None) -> None:
        self.data = data
        self.scales = scales

    @property
    def num_blocks(self) -> int:
        return self.data.shape[2]

    @property
    def block_size(self) -> int:
        return self.data.shape[4]

    def layer(self, index: int) -> LayerKV:
        data = (self.data[0, index], self.data[1, index])
        return data if self.scales is None else (*data, self.scales[0, index], self.scales[1, index])


class AttentionBackend(ABC):
    """One way to compute attention. Made once per rank; `num_heads` and `num_kv_heads` are the rank's own."""

    name: str
    default_block_size: int
    supports_cuda_graph: bool = False

    def __init__(self, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.scale = head_dim**-0.5
        # Of the keys and values, known once they are allocated.
        self.dtype: torch.dtype | None = None

    @classmethod
    @abstractmethod
    def rejects(
        cls,
        model_config: ModelConfig,
        device: str,
        dtype: torch.dtype | None = None,
        block_size: int | None = None,
    ) -> str | None:
        """Why this backend can't run the model on that kind of device, or None if it can.

        dtype, block_size: of the keys and values; None where that is not decided yet.
        """

    def bytes_per_block(self, num_layers: int, block_size: int, dtype: torch.dtype) -> int:
        """Keys and values of all layers, in bytes; int8 ones with their scales."""
        per_head = self.head_dim * dtype.itemsize + (4 if dtype == torch.int8 else 0)
        return 2 * num_layers * block_size * self.num_kv_heads * per_head

    def allocate(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: str,
        kv_dtype: torch.dtype | None = None,
    ) -> KVCache:
        """dtype: the model's; kv_dtype: what keys and values are stored in, if not that."""
        shape = (2, num_layers, num_blocks, self.num_kv_heads, block_size, self.head_dim)
        self.dtype = kv_dtype or dtype
        return KVCache(torch.empty(shape, dtype=self.dtype, device=device))

    @abstractmethod
    def plan(self, batch: ForwardBatch, block_size: int) -> object:
        """What depends on the batch but not on the layer. The runner puts it in `batch.plan`."""

    def plan_decode(self, block_tables: torch.Tensor, seq_lens: torch.Tensor, max_seq_len: int) -> object:
        """The plan of a step with one query per sequence, from what is on the device alone: a CUDA graph can hold it.

        block_tables: [n, columns]; seq_lens: [n] int32, each at most max_seq_len, 0 for padding. Only asked of backends
        with `supports_cuda_graph`.
        """
        raise NotImplementedError

    def prepare(
        self,
        qkv: torch.Tensor,
        q_norm: torch.Tensor,
        k_norm: torch.Tensor,
        eps: float,
        rotation: Rotation,
        kv: LayerKV,
        batch: ForwardBatch,
    ) -> torch.Tensor:
        """Norms and rotates queries and keys, stores keys and values, and returns the queries.

        qkv: [num_tokens, num_heads + 2 * num_kv_heads, head_dim]; q_norm, k_norm: [head_dim], the norms' weights.
        """
        q, k, v = qkv.split([self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=1)
        k = reference.apply_rotary(reference.rms_norm(k, k_norm, eps), *rotation)
        self.store(k, v, kv, batch)
        return reference.apply_rotary(reference.rms_norm(q, q_norm, eps), *rotation)

    @abstractmethod
    def store(self, k: torch.Tensor, v: torch.Tensor, kv: LayerKV, batch: ForwardBatch) -> None:
        """Writes this step's keys and values, [num_tokens, num_kv_heads, head_dim], to their slots."""

    @abstractmethod
    def attend(self, q: torch.Tensor, kv: LayerKV, batch: ForwardBatch) -> torch.Tensor:
        """Causal attention of q, [num_tokens, num_heads, head_dim], over stored keys and values; same shape back."""
