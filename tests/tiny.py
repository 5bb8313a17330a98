"""Tiny random Qwen3 checkpoints, and transformers as the reference that the engine must equal."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

# Two logits closer than this are a tie: either token is right.
TIE = 1e-4

BASE: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,  # 4 x 32 is not the hidden size
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": None,
}

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}

VARIANTS: dict[str, dict[str, Any]] = {
    "tied": {},
    "untied": {"tie_word_embeddings": False},
    "bias": {"attention_bias": True},
    "odd_vocab": {"vocab_size": 323},
    "one_kv_head": {"num_key_value_heads": 1},
    "mha": {"num_key_value_heads": 4},
    "yarn": {"rope_parameters": YARN},
}


def build(variant: str = "tied", seed: int = 0, **overrides: Any) -> Qwen3ForCausalLM:
    """A float32 model with weights wide enough that its next token is rarely a close call."""
    config = Qwen3Config(**{**BASE, **VARIANTS[variant], **overrides})
    generator = torch.Generator().manual_seed(seed)
    model = Qwen3ForCausalLM(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.copy_(1 + 0.2 * torch.randn(parameter.shape, generator=generator))
            elif "embed_tokens" in name or "lm_head" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
            else:
                parameter.copy_(0.25 * torch.randn(parameter.shape, generator=generator))
    return model


def save(directory: Path, variant: str = "tied", seed: int = 0, **overrides: Any) -> Qwen3ForCausalLM:
    model = build(variant, seed, **overrides)
    model.save_pretrained(directory)
    return model


class Reference:
    """What transformers computes, one sequence at a time."""

    def __init__(self, model: Qwen3ForCausalLM) -> None:
        self.model = model
        self.logits = lru_cache(maxsize=4096)(self._logits)

    @torch.no_grad()
    def _logits(self, token_ids: tuple[int, ...]) -> torch.Tensor:
        """[len(token_ids), vocab_size] float32."""
        return self.model(torch.tensor([token_ids])).logits[0].float()

    def assert_greedy(self, prompt: list[int], output: list[int], logprobs: Any = None) -> None:
        """`output` is what greedy decoding gives: each token is the best (or tied) after all before it."""
        assert output, "nothing was generated"
        logits = self.logits(tuple(prompt + output))[len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(output).unsqueeze(1)).squeeze(1)
        behind = logits.max(dim=-1).values - chosen
        assert behind.max() < TIE, f"token {int(behind.argmax())} of the output is not the best: {behind.tolist()}"
        if logprobs is not None:
            expected = logits.log_softmax(dim=-1)
            for i, entry in enumerate(logprobs):
                for token_id, value in entry.items():
                    assert abs(value.logprob - expected[i, token_id].item()) < 1e-4
