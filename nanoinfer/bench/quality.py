"""What number formats do to the model's outputs: `python bench.py --quality`.

Reference is the engine in float32. For each other setting the same tokens are forced, one decode step after the other,
and the logits of every position are compared; so each position sees keys and values that its own setting stored, and no
run wanders off. Two models: the demo checkpoint on held-out questions with their right answers, where in addition the
answers that the setting itself gives are counted; and Qwen3-0.6B's shape with random weights and tokens. The latter's
distributions are nearly flat, so there the logits' error says more than the agreement on the best token.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch

from nanoinfer.bench.workload import MAX_TOKEN_ID, SHAPE_ONLY, open_llm
from nanoinfer.config import EngineConfig
from nanoinfer.demo import demo_model_path
from nanoinfer.demo.evaluate import MAX_TOKENS, is_right
from nanoinfer.demo.questions import Question, held_out_set
from nanoinfer.executor.uniproc import UniprocExecutor
from nanoinfer.layers.sampler import SamplingBatch
from nanoinfer.llm import LLM
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.step import TokenLogprobs

REFERENCE = {"dtype": "float32"}
_BF16 = {"dtype": "bfloat16"}
SETTINGS: dict[str, dict[str, str]] = {
    "bf16": _BF16,
    "int8 weights": _BF16 | {"quantization": "int8"},
    "int8 KV": _BF16 | {"kv_cache_dtype": "int8"},
    "int8 weights and KV": _BF16 | {"quantization": "int8", "kv_cache_dtype": "int8"},
}
_FORCED_PER_FAMILY, _ASKED_PER_FAMILY = 8, 100
_SHAPE_PROMPTS, _SHAPE_INPUT, _SHAPE_OUTPUT = 8, 256, 32


@dataclass(frozen=True)
class ForcedText:
    """Prompts, and for each what follows it, whatever the model would have said."""

    prompts: list[list[int]]
    continuations: list[list[int]]


@dataclass(frozen=True)
class Distance:
    """How far a setting's next-token distributions are from the reference's, over all forced positions.

    kl: of the reference's distribution relative to the setting's, in nats. top1_agreement: share of positions with the
    same best token. logit_error: |logits - reference| / |reference|, both norms over the vocabulary.
    """

    positions: int
    mean_kl: float
    max_kl: float
    top1_agreement: float
    mean_logit_error: float
    max_logit_error: float

    @classmethod
    def between(cls, reference: list[torch.Tensor], tested: list[torch.Tensor]) -> Distance:
        """Lists of logits, [positions, vocab_size] each, of the same shapes."""
        compared = [_compare(*pair) for pair in zip(reference, tested, strict=True)]
        kl, agrees, error = (torch.cat(parts) for parts in zip(*compared, strict=True))
        figures = (kl.mean(), kl.max(), agrees.double().mean(), error.mean(), error.max())
        return cls(len(kl), *(float(figure) for figure in figures))


def _compare(reference: torch.Tensor, tested: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Per position: KL divergence, whether the best tokens agree, relative error."""
    reference, tested = reference.double(), tested.double()
    p, q = reference.log_softmax(dim=-1), tested.log_softmax(dim=-1)
    kl = (p.exp() * (p - q)).sum(dim=-1)
    return kl, p.argmax(dim=-1) == q.argmax(dim=-1), (tested - reference).norm(dim=-1) / reference.norm(dim=-1)


def measure_quality() -> dict[str, Any]:
    """Distance per setting and model, and the demo's accuracy per setting."""
    report: dict[str, Any] = {"benchmark": "quality", "reference": REFERENCE, "demo": {}, "shape": {}, "accuracy": {}}
    for model, text_of in {"demo": demo_text, "shape": lambda llm: shape_text()}.items():
        reference: list[torch.Tensor] = []
        for name, options in {"float32": REFERENCE, **SETTINGS}.items():
            with _open(model, options) as llm:
                logits = forced_logits(llm, text_of(llm))
                if model == "demo":
                    report["accuracy"][name] = demo_accuracy(llm, _ASKED_PER_FAMILY)
            if name == "float32":
                reference = logits
            else:
                report[model][name] = asdict(Distance.between(reference, logits))
    return report


@contextmanager
def _open(model: str, options: dict[str, str]) -> Iterator[LLM]:
    name, load_format = (str(demo_model_path()), "auto") if model == "demo" else (SHAPE_ONLY, "dummy")
    # All prompts fit into one step, which is what `forced_logits` needs.
    config = EngineConfig(name, load_format=load_format, seed=0, max_num_batched_tokens=16384, device="cpu")
    with open_llm(config, max_model_len=512, **options) as llm:
        yield llm


def demo_text(llm: LLM) -> ForcedText:
    """Held-out questions as a chat would ask them, and their right answers, end of turn included."""
    tokenizer = llm.get_tokenizer()
    assert tokenizer is not None
    text = ForcedText([], [])
    for question in _questions(_FORCED_PER_FAMILY):
        chat = llm.engine.input_processor.render_chat(_chat(question.prompt), "question", enable_thinking=False)
        text.prompts.append(chat["prompt_token_ids"])
        answer = tokenizer(question.answer, add_special_tokens=False)["input_ids"]
        text.continuations.append([*answer, tokenizer.eos_token_id])
    return text


def shape_text() -> ForcedText:
    rng = random.Random(0)

    def draw(num_tokens: int) -> list[list[int]]:
        return [[rng.randint(0, MAX_TOKEN_ID) for _ in range(num_tokens)] for _ in range(_SHAPE_PROMPTS)]

    return ForcedText(draw(_SHAPE_INPUT), draw(_SHAPE_OUTPUT))


def forced_logits(llm: LLM, text: ForcedText) -> list[torch.Tensor]:
    """Logits of each step, [sequences not at their end, vocab_size] float32, in the prompts' order.

    The sampler is replaced by a stand-in that gives the continuations' tokens. RuntimeError if they do not come back.
    """
    executor = llm.engine.executor
    assert isinstance(executor, UniprocExecutor)
    seen: list[torch.Tensor] = []

    def sample(logits: torch.Tensor, sampling: SamplingBatch) -> tuple[list[int], dict[int, TokenLogprobs]]:
        forced = [tokens[len(seen)] for tokens in text.continuations if len(tokens) > len(seen)]
        if len(forced) != len(logits):
            raise RuntimeError(f"{len(logits)} sequences sample where {len(forced)} should: they are not in step")
        seen.append(logits.float().clone())
        return forced, {}

    # With a filter, since rows without one are sampled by the kernel that a whole step is made of.
    params = [SamplingParams(ignore_eos=True, top_k=1000, max_tokens=len(tokens)) for tokens in text.continuations]
    executor.runner.sample = sample  # type: ignore[method-assign]
    try:
        outputs = llm.generate(text.prompts, params, use_tqdm=False)
    finally:
        del executor.runner.sample
    if [list(output.outputs[0].token_ids) for output in outputs] != text.continuations:
        raise RuntimeError("other tokens came back than were forced")
    return seen


def demo_accuracy(llm: LLM, per_family: int) -> float:
    """Share of held-out questions that are answered exactly right, greedily."""
    questions = _questions(per_family)
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
    outputs = llm.chat([_chat(question.prompt) for question in questions], params, False, enable_thinking=False)
    right = [is_right(question, output.text) for question, output in zip(questions, outputs, strict=True)]
    return sum(right) / len(right)


def _questions(per_family: int) -> list[Question]:
    return [question for family in held_out_set(per_family).values() for question in family]


def _chat(prompt: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}]


def quality_markdown(report: dict[str, Any]) -> str:
    lines = ["| model | setting | mean KL | max KL | same best token | logit error, mean | max | right answers |"]
    lines.append("|---|---|--:|--:|--:|--:|--:|--:|")
    lines.append(f"| demo | float32 | – | – | – | – | – | {report['accuracy']['float32']:.1%} |")
    for model in ("demo", "shape"):
        for name, values in report[model].items():
            found = Distance(**values)
            right = f"{report['accuracy'][name]:.1%}" if model == "demo" else "–"
            lines.append(
                f"| {model} | {name} | {found.mean_kl:.2g} | {found.max_kl:.2g} | {found.top1_agreement:.1%} "
                f"| {found.mean_logit_error:.2%} | {found.max_logit_error:.2%} | {right} |"
            )
    return "\n".join(lines)
