"""The attention layer proper: stores the step's keys and values in its layer of the KV cache, then attends."""

from __future__ import annotations

import torch

from nanoinfer.attention.base import AttentionBackend, ForwardBatch, KVCache


class Attention:
    """q: [T, num_heads, head_dim]; k, v: [T, num_kv_heads, head_dim]; of the rank's own heads. Returns q's shape."""

    def __init__(self, layer_index: int, backend: AttentionBackend) -> None:
        self.layer_index = layer_index
        self.backend = backend

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv_cache: KVCache, batch: ForwardBatch
    ) -> torch.Tensor:
        kv = kv_cache.layer(self.layer_index)
        self.backend.store(k, v, kv, batch)
        return self.backend.attend(q, kv, batch)
