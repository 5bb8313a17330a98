"""The workloads, and the model whose shape is used when none is named."""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nanoinfer.config import EngineConfig
from nanoinfer.llm import LLM

QWEN3_0_6B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "torch_dtype": "bfloat16", "attention_bias": False,
    "attention_dropout": 0.0, "hidden_act": "silu", "hidden_size": 1024, "intermediate_size": 3072, "head_dim": 128,
    "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-06, "rope_theta": 1000000, "rope_scaling": None, "use_sliding_window": False, "use_cache": True,
    "tie_word_embeddings": True, "vocab_size": 151936, "bos_token_id": 151643, "eos_token_id": 151645,
}  # fmt: skip
MAX_TOKEN_ID = 10000
# The model of an `EngineConfig` that stands for random weights of that shape.
SHAPE_ONLY = "Qwen3-0.6B, shape only"


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


@contextmanager
def open_llm(config: EngineConfig, **options: Any) -> Iterator[LLM]:
    """An engine under `config`, with `options` in place of some of it; without a model there, QWEN3_0_6B's shape."""
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "config.json").write_text(json.dumps(QWEN3_0_6B))
        settings = asdict(config) | options
        with LLM(**settings | {"model": settings["model"] if settings["model"] != SHAPE_ONLY else directory}) as llm:
            yield llm
