"""The checkpoint in the package: through the engine as through transformers, and right on what it was made for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, Qwen3ForCausalLM

from nanoinfer import LLM, SamplingParams
from nanoinfer.demo import demo_model_path
from nanoinfer.demo.questions import held_out_set

GREEDY = SamplingParams(temperature=0, max_tokens=160)
POOL: dict[str, Any] = {"cpu_kvcache_gib": 0.25}  # mapping the usual 4 GiB takes seconds
EXAMPLE_PROMPTS = ["introduce yourself", "list all prime numbers within 100"]


def ask(llm: LLM, prompts: list[str], **options: bool) -> list:
    return llm.chat([[{"role": "user", "content": prompt}] for prompt in prompts], GREEDY, use_tqdm=False, **options)


@pytest.mark.parametrize("enable_thinking", [None, False])
def test_float32_greedy_ids_are_those_of_transformers(enable_thinking: bool | None) -> None:
    tokenizer = AutoTokenizer.from_pretrained(demo_model_path())
    model = Qwen3ForCausalLM.from_pretrained(demo_model_path(), dtype=torch.float32).eval()
    eos_ids = model.generation_config.eos_token_id
    assert isinstance(eos_ids, list) and eos_ids
    questions = [question for family in held_out_set(2).values() for question in family]
    prompts = EXAMPLE_PROMPTS + [question.prompt for question in questions]
    options = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
    with LLM(demo_model_path(), dtype="float32", **POOL) as llm:
        outputs = ask(llm, prompts, **options)
    for prompt, output in zip(prompts, outputs, strict=True):
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True, **options
        )
        prompt_ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert output.prompt_token_ids == prompt_ids
        with torch.no_grad():
            logits = model(torch.tensor([prompt_ids + output.token_ids])).logits[0, len(prompt_ids) - 1 : -1]
        # Each token is the best after those before it, and only the end ends it: so transformers decodes the same.
        assert output.token_ids == logits.argmax(dim=-1).tolist(), prompt
        ends = [i for i, token_id in enumerate(output.token_ids) if token_id in eos_ids]
        assert ends == [len(output.token_ids) - 1] or (not ends and len(output.token_ids) == GREEDY.max_tokens), prompt


def test_both_prompts_of_the_example_are_answered_right() -> None:
    with LLM(demo_model_path(), **POOL) as llm:
        for enable_thinking in (None, False):
            options = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
            introduction, primes = ask(llm, EXAMPLE_PROMPTS, **options)
            assert "nanoinfer" in introduction.text and introduction.outputs[0].finish_reason == "stop"
            found = [int(word) for word in primes.text.split(":")[-1].replace(".", "").split(",")]
            assert found == [n for n in range(2, 101) if all(n % d for d in range(2, n))]


def test_the_checkpoint_is_small_and_whole() -> None:
    files = {path.name: path.stat().st_size for path in Path(demo_model_path()).iterdir() if path.suffix != ".py"}
    assert sum(files.values()) <= 8e6
    config = json.loads((demo_model_path() / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"] and config["torch_dtype"] == "bfloat16"
