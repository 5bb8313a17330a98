"""The attention layer proper: norms and rotates q and k, stores k and v in its layer of the KV cache, then attends."""

from __future__ import annotations

import torch

from nanoinfer.attention.base import AttentionBackend, ForwardBatch, KVCache, Rotation
from nanoinfer.layers.norm import RMSNorm


class Attention:
    """qkv: [T, num_heads + 2 * num_kv_heads, head_dim], the rank's own heads. Returns [T, num_heads, head_dim]."""

    def __init__(self, layer_index: int, backend: AttentionBackend) -> None:
        self.layer_index = layer_index
        self.backend = backend

    def __call__(
        self,
        qkv: torch.Tensor,
        q_norm: RMSNorm,
        k_norm: RMSNorm,
        rotation: Rotation,
        kv_cache: KVCache,
        batch: ForwardBatch,
    ) -> torch.Tensor:
        kv = kv_cache.layer(self.layer_index)
        q = self.backend.prepare(qkv, q_norm.weight, k_norm.weight, q_norm.eps, rotation, kv, batch)
        return self.backend.attend(q, kv, batch)
