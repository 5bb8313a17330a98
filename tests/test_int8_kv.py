"""kv_cache_dtype="int8" end to end, against transformers whose attention reads fake-quantized keys and values."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from test_int8 import PROMPTS, fake_quantized, logprob_error
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from nanoinfer import LLM, SamplingParams
from nanoinfer.config import EngineConfig
from nanoinfer.kernels.cpu.ops import CPUKernels, load
from nanoinfer.outputs import RequestOutput

KERNELS = load()
OPTIONS: dict[str, Any] = {"num_kvcache_blocks": 16, "kvcache_block_size": 32, "max_num_batched_tokens": 48, "seed": 0}


def generate(model: Path, **options: Any) -> list[RequestOutput]:
    with LLM(model, **OPTIONS | options) as llm:
        return llm.generate(
            PROMPTS, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=20), use_tqdm=False
        )


def attention_over_int8(
    module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args: Any, **kwargs: Any
) -> Any:
    """k (rotated) and v: [batch, num_kv_heads, tokens, head_dim]; a scale per token and head."""
    return sdpa_attention_forward(module, q, fake_quantized(k), fake_quantized(v), *args, **kwargs)


@pytest.fixture
def quantized_reference(tmp_path: Path, request: pytest.FixtureRequest) -> tuple[Path, tiny.Reference, tiny.Reference]:
    """(checkpoint, transformers over int8 keys and values, transformers as it is)."""
    model = tiny.save(tmp_path, getattr(request, "param", "tied"))
    other = copy.deepcopy(model)
    ALL_ATTENTION_FUNCTIONS.register("over_int8", attention_over_int8)
    other.config._attn_implementation = "over_int8"
    return tmp_path, tiny.Reference(other), tiny.Reference(model)


Models = tuple[Path, tiny.Reference, tiny.Reference]


@pytest.mark.parametrize("quantized_reference", ["tied", "untied", "bias", "one_kv_head"], indirect=True)
@pytest.mark.parametrize(
    "options", [{}, {"tensor_parallel_size": 1, "kvcache_block_size": 8, "num_kvcache_blocks": 64}]
)
def test_in_float32_it_is_transformers_over_quantized_keys_and_values(
    quantized_reference: Models, options: dict
) -> None:
    path, quantized, plain = quantized_reference
    outputs = generate(path, dtype="float32", kv_cache_dtype="int8", **options)
    error = logprob_error(quantized, outputs)
    # One float32 that is rounded otherwise can put one value on the next step of 127.
    assert error < 2e-3 and logprob_error(plain, outputs) > 3 * error


def test_two_ranks_store_int8_too(quantized_reference: Models) -> None:
    path, quantized, plain = quantized_reference
    outputs = generate(path, dtype="float32", kv_cache_dtype="int8", tensor_parallel_size=2)
    error = logprob_error(quantized, outputs)
    assert error < 2e-3 and logprob_error(plain, outputs) > 3 * error


@pytest.mark.parametrize("quantized_reference", ["tied", "untied", "bias", "one_kv_head"], indirect=True)
def test_in_bf16_it_is_as_near_as_bf16_gets(quantized_reference: Models) -> None:
    """The kernels' path where head_dim allows it (tiny's is below a tile: see test_tiled_kernels for the kernels)."""
    path, quantized, _ = quantized_reference
    assert logprob_error(quantized, generate(path, dtype="bfloat16", kv_cache_dtype="int8")) < 5e-2


def test_a_model_with_whole_tiles_runs_on_the_int8_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.build("tied", head_dim=64)
    model.save_pretrained(tmp_path)
    calls = []
    for name in ("tiled_decode", "paged_prefill"):
        method = getattr(CPUKernels, name)
        monkeypatch.setattr(
            CPUKernels, name, lambda *args, name=name, method=method: calls.append(name) or method(*args)
        )
    outputs = generate(tmp_path, dtype="bfloat16", kv_cache_dtype="int8")
    if KERNELS is not None and KERNELS.has_amx:
        assert set(calls) == {"tiled_decode", "paged_prefill"}
    assert logprob_error(tiny.Reference(model), outputs) < 5e-2


def test_blocks_take_about_half_the_memory(tmp_path: Path) -> None:
    tiny.save(tmp_path, "tied")
    sizes = []
    for kv_cache_dtype in ("auto", "int8"):
        with LLM(tmp_path, dtype="bfloat16", kv_cache_dtype=kv_cache_dtype, **OPTIONS) as llm:
            sizes.append(llm.capacity.bytes_per_block)
            head_dim = llm.model_config.head_dim
    assert sizes[1] / sizes[0] == (head_dim + 4) / (2 * head_dim)


def test_a_wrong_name_lists_what_is_allowed() -> None:
    with pytest.raises(ValueError, match=r"kv_cache_dtype is 'fp8'; allowed are 'auto', 'int8'"):
        EngineConfig("model", kv_cache_dtype="fp8")


def test_a_gpu_is_told_that_it_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    from nanoinfer.worker import model_runner

    config = EngineConfig("model", kv_cache_dtype="int8")
    with pytest.raises(ValueError, match="kv_cache_dtype is 'int8', which runs on a CPU only"):
        model_runner.check_int8(config, torch.bfloat16, "cuda", is_first_rank=True)
