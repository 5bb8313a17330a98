"""The decoder stack that dense Qwen3 is made of: attention with per-head q and k norms, pre-norm residual blocks.

The MLP is a factory, so that another kind of feed-forward is a part and not a copy. Everything that a step needs comes
as an argument; nothing is looked up in a context.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn

from nanoinfer.attention.base import AttentionBackend, ForwardBatch, KVCache, Rotation
from nanoinfer.config import ModelConfig
from nanoinfer.distributed.group import ParallelGroups
from nanoinfer.layers.attention import Attention
from nanoinfer.layers.embedding import VocabParallelEmbedding
from nanoinfer.layers.linear import QKVParallelLinear, RowParallelLinear
from nanoinfer.layers.norm import RMSNorm
from nanoinfer.layers.rotary import RotaryEmbedding
from nanoinfer.layers.shard import ShardSpec


class DecoderMLP(nn.Module):
    """What a decoder layer expects of its feed-forward part: [T, hidden_size] to the same shape."""

    def shards(self, prefix: str) -> Iterator[ShardSpec]:
        raise NotImplementedError


class DecoderAttention(nn.Module):
    """Self-attention over the rank's own heads. One all-reduce, in o_proj."""

    def __init__(
        self, config: ModelConfig, layer_index: int, backend: AttentionBackend, groups: ParallelGroups, options: dict
    ) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size,
            config.head_dim,
            config.num_attention_heads,
            config.num_key_value_heads,
            bias=config.attention_bias,
            groups=groups,
            options=options,
        )
        self.o_proj = RowParallelLinear(
            config.num_attention_heads * config.head_dim,
            config.hidden_size,
            bias=config.attention_bias,
            groups=groups,
            options=options,
        )
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps, options)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps, options)
        self.attention = Attention(layer_index, backend)

    def forward(self, hidden: torch.Tensor, rotation: Rotation, kv_cache: KVCache, batch: ForwardBatch) -> torch.Tensor:
        qkv = self.qkv_proj(hidden).unflatten(-1, (-1, self.head_dim))
        return self.o_proj(self.attention(qkv, self.q_norm, self.k_norm, rotation, kv_cache, batch).flatten(1))

    def shards(self, prefix: str) -> Iterator[ShardSpec]:
        yield from self.qkv_proj.shards([f"{prefix}.{name}_proj" for name in "qkv"])
        yield from self.o_proj.shards(f"{prefix}.o_proj")
        yield from self.q_norm.shards(f"{prefix}.q_norm")
        yield from self.k_norm.shards(f"{prefix}.k_norm")


class DecoderLayer(nn.Module):
    def __init__(self, config: ModelConfig, attention: DecoderAttention, mlp: DecoderMLP, options: dict) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, options)
        self.self_attn = attention
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, options)
        self.mlp = mlp

    def forward(
        self,
        hidden: torch.Tensor,
        residual: torch.Tensor | None,
        rotation: Rotation,
        kv_cache: KVCache,
        batch: ForwardBatch,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(output of this layer's last branch, residual stream to add it to): the next norm does the addition."""
        if residual is None:
            hidden, residual = self.input_layernorm(hidden), hidden
        else:
            hidden, residual = self.input_layernorm.add(hidden, residual)
        hidden = self.self_attn(hidden, rotation, kv_cache, batch)
        hidden, residual = self.post_attention_layernorm.add(hidden, residual)
        return self.mlp(hidden), residual

    def shards(self, prefix: str) -> Iterator[ShardSpec]:
        yield from self.input_layernorm.shards(f"{prefix}.input_layernorm")
        yield from self.self_attn.shards(f"{prefix}.self_attn")
        yield from self.post_attention_layernorm.shards(f"{prefix}.post_attention_layernorm")
        yield from self.mlp.shards(f"{prefix}.mlp")


class Decoder(nn.Module):
    """Token ids to normed hidden states, [T, hidden_size]."""

    def __init__(
        self,
        config: ModelConfig,
        backend: AttentionBackend,
        make_mlp: Callable[[], DecoderMLP],
        groups: ParallelGroups,
        options: dict,
    ) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = VocabParallelEmbedding(
            config.vocab_size, config.hidden_size, groups=groups, options=options
        )
        self.layers = nn.ModuleList(
            DecoderLayer(config, DecoderAttention(config, index, backend, groups, options), make_mlp(), options)
            for index in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, options)
        self.rotary = RotaryEmbedding(config, options)

    def forward(self, batch: ForwardBatch, kv_cache: KVCache) -> torch.Tensor:
        return self.run_layers(self.embed_tokens(batch.input_ids), self.rotary(batch.positions), batch, kv_cache)

    def run_layers(
        self, hidden: torch.Tensor, rotation: Rotation, batch: ForwardBatch, kv_cache: KVCache
    ) -> torch.Tensor:
        """From embeddings, [T, hidden_size], which may be overwritten; of the batch, attention's part is used alone."""
        residual: torch.Tensor | None = None
        for layer in self.layers:
            hidden, residual = layer(hidden, residual, rotation, kv_cache, batch)
        assert residual is not None
        return self.norm.add(hidden, residual)[0]

    def shards(self, prefix: str) -> Iterator[ShardSpec]:
        yield from self.embed_tokens.shards(f"{prefix}.embed_tokens")
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, DecoderLayer)
            yield from layer.shards(f"{prefix}.layers.{index}")
        yield from self.norm.shards(f"{prefix}.norm")
