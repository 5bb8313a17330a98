"""Dense Qwen3 (Qwen3 Technical Report, 2025): the decoder, its SwiGLU MLP and the head, tied or not."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from nanoinfer.attention.base import AttentionBackend, ForwardBatch, KVCache
from nanoinfer.config import ModelConfig
from nanoinfer.distributed.group import ParallelGroups
from nanoinfer.layers.embedding import ParallelLMHead
from nanoinfer.layers.linear import MergedColumnParallelLinear, ParallelLinear, RowParallelLinear
from nanoinfer.layers.shard import ShardSpec
from nanoinfer.models.decoder import Decoder, DecoderMLP


class Qwen3MLP(DecoderMLP):
    """down(silu(gate(x)) * up(x)). One all-reduce, in down_proj."""

    def __init__(self, config: ModelConfig, groups: ParallelGroups, options: dict) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_up_proj = MergedColumnParallelLinear(
            hidden, [inner, inner], gated=True, groups=groups, options=options
        )
        self.down_proj = RowParallelLinear(inner, hidden, groups=groups, options=options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.gate_up_proj(x))

    def shards(self, prefix: str) -> Iterator[ShardSpec]:
        yield from self.gate_up_proj.shards([f"{prefix}.gate_proj", f"{prefix}.up_proj"])
        yield from self.down_proj.shards(f"{prefix}.down_proj")


class Qwen3ForCausalLM(nn.Module):
    """`forward` gives hidden states; `compute_logits` is a separate call on the positions that are wanted."""

    def __init__(
        self, config: ModelConfig, backend: AttentionBackend, groups: ParallelGroups, dtype: torch.dtype, device: str
    ) -> None:
        super().__init__()
        options = {"dtype": dtype, "device": device}
        self.config = config
        self.model = Decoder(config, backend, lambda: Qwen3MLP(config, groups, options), groups, options)
        # A tied head has no table of its own; the meta device keeps it from being allocated and thrown away.
        head_options = {**options, "device": "meta"} if config.tie_word_embeddings else options
        self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size, groups=groups, options=head_options)
        if config.tie_word_embeddings:
            self.lm_head.tie_weights(self.model.embed_tokens)

    def forward(self, batch: ForwardBatch, kv_cache: KVCache) -> torch.Tensor:
        """Hidden states of all tokens of the step, [num_tokens, hidden_size]; writes their keys and values."""
        return self.model(batch, kv_cache)

    def compute_logits(self, hidden: torch.Tensor, indices: torch.Tensor | None) -> torch.Tensor:
        """This rank's logits of the tokens at `indices` (None: of all), [len(indices), lm_head.num_rows]; padding is
        -inf."""
        # Indices rise: as many as there are tokens are all of them.
        return self.lm_head(hidden if indices is None or len(indices) == len(hidden) else hidden[indices])

    def shards(self) -> Iterator[ShardSpec]:
        """Every tensor of the checkpoint that must be there, and where this rank's part of it goes."""
        yield from self.model.shards("model")
        if not self.config.tie_word_embeddings:
            yield from self.lm_head.shards("lm_head")

    def pack(self, quantization: str | None = None) -> None:
        """Once, when the weights are loaded: lets each linear layer and the head rearrange or quantize its own."""
        for module in self.modules():
            if isinstance(module, (ParallelLinear, ParallelLMHead)):
                module.pack(quantization)
