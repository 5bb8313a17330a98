"""Measures how many held-out questions the demo model answers exactly right, per family.

Called by hand: `python -m nanoinfer.demo.evaluate [--per-family 100] [--transformers] [--open]`. In: the
demo checkpoint (or `--model FOLDER`) and generated held-out questions. Out: a table on standard output. Runs through
nanoinfer's engine; with `--transformers`, through Hugging Face's reference implementation instead.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

from nanoinfer.demo import demo_model_path
from nanoinfer.demo.questions import FIXED_PROMPTS, Question, fixed_questions, held_out_set

MAX_TOKENS = 160
THINK = "<think>\n\n</think>\n\n"

# Answers a list of prompts, in order.
Answer = Callable[[list[str]], list[str]]


def engine_answers(model: Path, think: bool, temperature: float, quantization: str | None) -> Answer:
    """Answer through nanoinfer's own engine."""
    from nanoinfer import LLM, SamplingParams

    llm = LLM(str(model), quantization=quantization)
    params = SamplingParams(temperature=temperature, max_tokens=MAX_TOKENS)

    def answer(prompts: list[str]) -> list[str]:
        messages = [[{"role": "user", "content": prompt}] for prompt in prompts]
        return [output.text for output in llm.chat(messages, params, enable_thinking=think)]

    return answer


def transformers_answers(model: Path, think: bool, temperature: float, dtype: str, batch: int = 64) -> Answer:
    """Answer through transformers, in batches of prompts of similar length, padded on the left."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
    network = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()
    sampling = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}

    def answer(prompts: list[str]) -> list[str]:
        answers = [""] * len(prompts)
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        for start in range(0, len(order), batch):
            part = order[start : start + batch]
            chats = [[{"role": "user", "content": prompts[i]}] for i in part]
            texts = tokenizer.apply_chat_template(
                chats, add_generation_prompt=True, enable_thinking=think, tokenize=False
            )
            inputs = tokenizer(texts, return_tensors="pt", padding=True)
            with torch.no_grad():
                output = network.generate(**inputs, max_new_tokens=MAX_TOKENS, **sampling)
            new = output[:, inputs["input_ids"].shape[1] :]
            for i, text in zip(part, tokenizer.batch_decode(new, skip_special_tokens=True), strict=True):
                answers[i] = text
        return answers

    return answer


def is_right(question: Question, text: str) -> bool:
    """Exact match, once an empty think block and surrounding blanks are gone."""
    return text.removeprefix(THINK).strip() == question.answer


def report(questions: dict[str, list[Question]], answer: Answer, show: int) -> float:
    """Print the table, with up to `show` wrong answers a family; return the mean of the families' accuracies."""
    everything = [question for family in questions.values() for question in family]
    started = time.monotonic()
    texts = answer([question.prompt for question in everything])
    seconds = time.monotonic() - started
    given = dict(zip((q.prompt for q in everything), texts, strict=True))
    shares, right_in_all = [], 0
    for family, members in questions.items():
        wrong = [q for q in members if not is_right(q, given[q.prompt])]
        right = len(members) - len(wrong)
        right_in_all += right
        shares.append(right / len(members))
        print(f"{family:16}{right:5} of {len(members):4}{100 * right / len(members):8.1f} %")
        for question in wrong[:show]:
            print(f"    {question.prompt!r}: {given[question.prompt]!r}, right: {question.answer!r}")
    mean = sum(shares) / len(shares)
    total = len(everything)
    print(f"{'total':16}{right_in_all:5} of {total:4}{100 * right_in_all / total:8.1f} %  ({seconds:.0f} s)")
    print(f"mean of the families {100 * mean:.1f} %")
    return mean


def main() -> None:
    """Read the command line, answer the project's two fixed prompts, then the held-out questions."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=demo_model_path())
    parser.add_argument("--per-family", type=int, default=100)
    parser.add_argument("--families", nargs="*", help="only these families")
    parser.add_argument("--transformers", action="store_true", help="use transformers instead of nanoinfer's engine")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="for --transformers")
    parser.add_argument("--quantization", choices=("int8",), help="for nanoinfer's engine")
    parser.add_argument("--open", action="store_true", help="prompts without a think block; the model writes it")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--show", type=int, default=0, help="wrong answers to print per family")
    args = parser.parse_args()
    if args.transformers:
        answer = transformers_answers(args.model, args.open, args.temperature, args.dtype)
    else:
        answer = engine_answers(args.model, args.open, args.temperature, args.quantization)
    for question, text in zip(fixed_questions(), answer(list(FIXED_PROMPTS)), strict=True):
        print(f"{'right' if is_right(question, text) else 'WRONG'}: {question.prompt!r} -> {text!r}")
    questions = held_out_set(args.per_family)
    if args.families:
        questions = {family: questions[family] for family in args.families}
    report(questions, answer, args.show)


if __name__ == "__main__":
    main()
