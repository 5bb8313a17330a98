"""quantization="int8" end to end, against transformers with every linear layer and the head fake-quantized alike:
weights per output, activations per token, by arithmetic that is spelled out here.
"""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from torch import nn
from transformers import Qwen3ForCausalLM

from nanoinfer import LLM, SamplingParams
from nanoinfer.attention.select import select_backend
from nanoinfer.config import EngineConfig, ModelConfig
from nanoinfer.distributed.group import ParallelGroups
from nanoinfer.kernels.cpu import ops
from nanoinfer.layers import linear
from nanoinfer.models import loader, qwen3
from nanoinfer.outputs import RequestOutput
from nanoinfer.worker import model_runner

KERNELS = ops.load()
needs_amx_int8 = pytest.mark.skipif(KERNELS is None or not KERNELS.has_amx_int8, reason="there is no AMX_INT8 here")
OPTIONS: dict[str, Any] = {"num_kvcache_blocks": 64, "kvcache_block_size": 8, "max_num_batched_tokens": 48, "seed": 0}
PROMPTS = [[5, 6, 7], list(range(60)), [9, 4] * 17, [1]]


def fake_quantized(x: torch.Tensor) -> torch.Tensor:
    """What a row is after int8: a multiple of its largest magnitude / 127."""
    largest = x.abs().amax(dim=-1, keepdim=True)
    inverse = torch.full_like(largest, 127) / largest  # as a factor, since it decides ties, which bf16 weights have
    return torch.where(largest > 0, (x * inverse).round() * (largest / 127), 0.0)


class FakeInt8Linear(nn.Module):
    """A linear layer whose factors are fake-quantized; in `parts` slices of the inputs, as so many ranks do."""

    def __init__(self, linear: nn.Linear, parts: int) -> None:
        super().__init__()
        self.weights = [fake_quantized(part) for part in linear.weight.detach().chunk(parts, dim=1)]
        self.bias = linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inputs = x.chunk(len(self.weights), dim=-1)
        y = sum(fake_quantized(part) @ weight.T for part, weight in zip(inputs, self.weights, strict=True))
        return y if self.bias is None else y + self.bias


def quantized_reference(model: Qwen3ForCausalLM, ranks: int = 1) -> tiny.Reference:
    model = copy.deepcopy(model)
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear):
            row_parallel = name.endswith(("o_proj", "down_proj"))
            parent, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(parent), attribute, FakeInt8Linear(module, ranks if row_parallel else 1))
    return tiny.Reference(model)


def generate(directory: Path, **options: Any) -> list[RequestOutput]:
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=20)
    with LLM(directory, quantization="int8", **OPTIONS, **options) as llm:
        return llm.generate(PROMPTS, params, use_tqdm=False)


def logprob_error(reference: tiny.Reference, outputs: list[RequestOutput]) -> float:
    """Norm-wise, of all log-probabilities that came with the outputs, whose tokens are forced on the reference."""
    ours, theirs = [], []
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        expected = reference.logits(tuple(prompt + output.token_ids))[len(prompt) - 1 : -1].log_softmax(dim=-1)
        for i, entry in enumerate(output.outputs[0].logprobs or []):
            ours += [value.logprob for value in entry.values()]
            theirs += [float(expected[i, token_id]) for token_id in entry]
    assert len(ours) >= 20 * 12 * len(PROMPTS)
    return float((torch.tensor(ours) - torch.tensor(theirs)).norm() / torch.tensor(theirs).norm())


def assert_is_quantized(reference: tiny.Reference, outputs: list[RequestOutput], *others: tiny.Reference) -> None:
    """The reference's greedy tokens and log-probabilities, and far from the others'.

    One float32 that is rounded otherwise can put one activation on the next step of 127, hence the wide limits.
    """
    error = logprob_error(reference, outputs)
    assert error < 1e-2
    assert all(logprob_error(other, outputs) > max(2e-2, 3 * error) for other in others)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        logits = reference.logits(tuple(prompt + output.token_ids))[len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(output.token_ids).unsqueeze(1)).squeeze(1)
        assert (logits.max(dim=-1).values - chosen).max() < 1e-2 * logits.std()


def warnings_of_quantization(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if "quantization" in record.message]


@pytest.mark.parametrize("variant", ["tied", "untied", "bias", "odd_vocab"])
def test_in_float32_it_is_transformers_with_quantized_factors_and_one_warning_says_that_it_is_slow(
    variant: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny.save(tmp_path, variant)
    with caplog.at_level(logging.WARNING):
        outputs = generate(tmp_path, dtype="float32")
    assert_is_quantized(quantized_reference(model), outputs, tiny.Reference(model))
    assert len(warnings_of_quantization(caplog)) == 1 and "stock torch" in warnings_of_quantization(caplog)[0]


@pytest.mark.parametrize("variant", ["untied", "bias"])
def test_two_ranks_quantize_their_own_slices(variant: str, tmp_path: Path) -> None:
    model = tiny.save(tmp_path, variant)
    outputs = generate(tmp_path, dtype="float32", tensor_parallel_size=2)
    assert_is_quantized(quantized_reference(model, 2), outputs, quantized_reference(model, 1), tiny.Reference(model))


def test_a_bf16_checkpoint_in_float32_is_quantized_from_its_bf16_weights(tmp_path: Path) -> None:
    model = tiny.build("untied")
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    copy.deepcopy(model).to(torch.bfloat16).save_pretrained(tmp_path)
    outputs = generate(tmp_path, dtype="float32")
    assert_is_quantized(quantized_reference(model), outputs, tiny.Reference(model))


@needs_amx_int8
@pytest.mark.parametrize("variant", ["tied", "untied", "bias", "odd_vocab"])
def test_in_bf16_the_kernel_answers_as_its_twin_does(
    variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny.save(tmp_path, variant)
    with caplog.at_level(logging.WARNING):
        outputs = generate(tmp_path, dtype="bfloat16")
    assert not warnings_of_quantization(caplog), "the kernel was not chosen"
    monkeypatch.setattr(linear, "int8_kernels", lambda dtype, device: None)
    ours, twins = [], []
    for output, other in zip(outputs, generate(tmp_path, dtype="bfloat16"), strict=True):
        pairs = list(zip(output.token_ids, other.token_ids, strict=True))
        # Up to the first difference, whose distributions still have the same past.
        same = next((i + 1 for i, (token, twin) in enumerate(pairs) if token != twin), len(pairs))
        for mine, theirs in zip(
            (output.outputs[0].logprobs or [])[:same], other.outputs[0].logprobs or [], strict=False
        ):
            common = mine.keys() & theirs.keys()
            ours += [mine[token_id].logprob for token_id in common]
            twins += [theirs[token_id].logprob for token_id in common]
    assert len(ours) > 20 * len(PROMPTS)
    assert (torch.tensor(ours) - torch.tensor(twins)).norm() < 1e-2 * torch.tensor(twins).norm()
    # Against float32, bfloat16's own rounding is what is seen: as far off as without quantization.
    assert logprob_error(quantized_reference(model), outputs) < 1e-1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_dropped_when_they_are_quantized_but_for_a_tied_table(dtype: torch.dtype, tmp_path: Path) -> None:
    tiny.save(tmp_path, "tied")
    config = ModelConfig.from_directory(tmp_path)
    backend = select_backend(config, "cpu")(config.num_attention_heads, config.num_key_value_heads, config.head_dim)
    with torch.inference_mode():
        model = qwen3.Qwen3ForCausalLM(config, backend, ParallelGroups.single(), dtype, "cpu")
        loader.load_weights(model, loader.open_checkpoint(tmp_path))
        model.pack("int8")
    left = {name for name, parameter in model.named_parameters() if parameter.dim() == 2}
    assert left == {"model.embed_tokens.weight"} and model.model.embed_tokens.weight.dtype == dtype
    fast = KERNELS is not None and KERNELS.has_amx_int8 and dtype == torch.bfloat16
    expected = linear.PackedInt8LinearMethod if fast else linear.Int8LinearMethod
    methods = [module.method for module in model.modules() if hasattr(module, "method")]
    assert len(methods) == 4 * config.num_hidden_layers + 1 and {type(method) for method in methods} == {expected}


@pytest.mark.parametrize("ranks", [1, 2])
def test_dummy_weights_are_quantized_too(ranks: int, tmp_path: Path) -> None:
    tiny.save(tmp_path, "tied")
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=1)
    answers = []
    for quantization in (None, "int8"):
        with LLM(
            tmp_path, load_format="dummy", dtype="bfloat16", quantization=quantization, tensor_parallel_size=ranks,
            **OPTIONS,
        ) as llm:  # fmt: skip
            answers.append(llm.generate([[5, 6, 7]], params, use_tqdm=False)[0])
    plain, quantized = (next(iter((answer.outputs[0].logprobs or [])[0].values())).logprob for answer in answers)
    assert plain == pytest.approx(quantized, rel=5e-2) and plain != quantized


def test_on_a_gpu_it_is_refused_before_anything_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.save(tmp_path)
    monkeypatch.setattr(model_runner, "resolve_device", lambda requested, model_config: "cuda")
    with pytest.raises(ValueError, match=r"'int8'.*CPU only for now.*'cuda'"):
        LLM(tmp_path, quantization="int8", **OPTIONS)


def test_another_format_is_refused_with_what_is_allowed() -> None:
    with pytest.raises(ValueError, match="'fp8'; allowed are None and 'int8'"):
        EngineConfig("m", quantization="fp8")
