"""`Floor`: the least time that a step can take on a machine, from the model's shape alone."""

from __future__ import annotations

from dataclasses import dataclass

from nanoinfer.bench.machine import Machine
from nanoinfer.config import ModelConfig
from nanoinfer.step import StepStats


@dataclass(frozen=True)
class Floor:
    """The least a step can cost: its linear layers by the roofline, plus reading its KV cache. Norms are left out."""

    linear_weights: int  # all layers, without the head
    head_weights: int  # a tied table is the head; what the embedding looks up in it is negligible
    linear_bytes: int  # of those weights, with their scales
    head_bytes: int
    pair_flops: int  # per query-key pair of prefill: QK^T and PV, all layers
    kv_bytes: int  # per token of context, keys and values of all layers
    products: float = 1.0  # of weights, in units of the machine's rate: AMX multiplies twice as many int8 as bf16

    @classmethod
    def of_model(
        cls, config: ModelConfig, itemsize: int, quantization: str | None = None, kv_cache_dtype: str = "auto"
    ) -> Floor:
        """itemsize: bytes of the dtype that the model runs in, of its KV cache and of weights that aren't quantized."""
        layers, hidden, head_dim = config.num_hidden_layers, config.hidden_size, config.head_dim
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        # qkv and o projections, then gate, up and down.
        per_layer = hidden * head_dim * (2 * heads + 2 * kv_heads) + 3 * hidden * config.intermediate_size
        outputs = head_dim * (heads + 2 * kv_heads) + hidden + 2 * config.intermediate_size + hidden
        head = config.vocab_size * hidden
        # An int8 key or value has one float32 scale.
        kv_head_bytes = head_dim + 4 if kv_cache_dtype == "int8" else head_dim * itemsize
        # int8 has one float32 scale per output.
        per_weight, per_output = (1, 4) if quantization == "int8" else (itemsize, 0)
        return cls(
            linear_weights=layers * per_layer,
            head_weights=head,
            linear_bytes=layers * (per_weight * per_layer + per_output * outputs),
            head_bytes=per_weight * head + per_output * config.vocab_size,
            pair_flops=4 * layers * heads * head_dim,
            kv_bytes=2 * layers * kv_heads * kv_head_bytes,
            products=2.0 if quantization == "int8" else 1.0,
        )

    def flops(self, step: StepStats) -> int:
        """Of the products and of prefill's attention. Decode's attention hides in reading the KV cache."""
        tokens = step.num_prefill_tokens + step.num_decode_tokens
        products = 2 * (self.linear_weights * tokens + self.head_weights * step.num_sampled)
        return int(products / self.products) + self.pair_flops * step.num_attention_pairs

    def seconds(self, step: StepStats, machine: Machine) -> float:
        """Products and weight reads can overlap; the KV cache is read on top."""
        # A step in which no row samples (a part of a long prompt) does not touch the head.
        weight_bytes = self.linear_bytes + (self.head_bytes if step.num_sampled else 0)
        read_rate, gemm_rate = machine.read_gb_s * 1e9, machine.gemm_tflop_s * 1e12
        return (
            max(self.flops(step) / gemm_rate, weight_bytes / read_rate)
            + self.kv_bytes * step.num_context_tokens / read_rate
        )
