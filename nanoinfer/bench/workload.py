"""The workloads, and the model whose shape is used when none is named."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

QWEN3_0_6B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "torch_dtype": "bfloat16", "attention_bias": False,
    "attention_dropout": 0.0, "hidden_act": "silu", "hidden_size": 1024, "intermediate_size": 3072, "head_dim": 128,
    "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-06, "rope_theta": 1000000, "rope_scaling": None, "use_sliding_window": False, "use_cache": True,
    "tie_word_embeddings": True, "vocab_size": 151936, "bos_token_id": 151643, "eos_token_id": 151645,
}  # fmt: skip
MAX_TOKEN_ID = 10000


@dataclass(frozen=True)
class Preset:
    """Ranges are inclusive, in tokens."""

    num_seqs: int
    input_range: tuple[int, int]
    output_range: tuple[int, int]
    max_model_len: int


PRESETS = {
    "w1": Preset(32, (100, 512), (64, 256), 2048),
    "nano-vllm": Preset(256, (100, 1024), (100, 1024), 4096),
}


@dataclass(frozen=True)
class Workload:
    name: str
    prompts: list[list[int]]
    output_lens: list[int]

    @classmethod
    def draw(cls, name: str, num_seqs: int, seed: int) -> Workload:
        """All prompts first, then all output lengths: the order in which nano-vllm's script draws them."""
        preset, rng = PRESETS[name], random.Random(seed)
        prompts = [
            [rng.randint(0, MAX_TOKEN_ID) for _ in range(rng.randint(*preset.input_range))] for _ in range(num_seqs)
        ]
        return cls(name, prompts, [rng.randint(*preset.output_range) for _ in prompts])
