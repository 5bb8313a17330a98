"""Tests of the demo model's question generators and of its tokenizer.

Run by pytest; needs no model weights. Answers are recomputed here in other ways than the generators compute them.
"""

from __future__ import annotations

import itertools
import json
import random
import re

import pytest
from tokenizers import Tokenizer

from nanoinfer.demo import demo_model_path
from nanoinfer.demo.questions import (
    FAMILIES,
    FIXED_PROMPTS,
    Question,
    draw,
    fixed_questions,
    generate,
    held_out_set,
    is_held_out,
    normalised,
)
from nanoinfer.demo.tables import CAPITALS, DAYS, ITEMS, MONTHS, WORDS

SOME = 1500
PRIMES = [n for n in range(2, 101) if not any(n % d == 0 for d in range(2, n))]


def sample(family: str, count: int = SOME, seed: int = 3) -> list[Question]:
    return list(itertools.islice(generate(seed, "train", {family: 1.0}), count))


def integers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(demo_model_path() / "tokenizer.json"))


def test_same_seed_gives_the_same_questions() -> None:
    first = list(itertools.islice(generate(7, "train"), 500))
    assert first == list(itertools.islice(generate(7, "train"), 500))
    assert first != list(itertools.islice(generate(8, "train"), 500))
    assert held_out_set(5) == held_out_set(5)


def test_the_split_is_the_same_on_every_machine() -> None:
    # Recorded once: a change here would mix questions that the shipped weights have seen with held-out ones.
    keys = [f"add:{n}:500" for n in range(500)]
    assert [n for n, key in enumerate(keys) if is_held_out(key)][:8] == [5, 13, 20, 29, 32, 47, 59, 60]


def test_training_never_sees_a_held_out_question() -> None:
    train = list(itertools.islice(generate(1, "train"), 30_000))
    held_out = list(itertools.chain.from_iterable(held_out_set(200).values()))
    assert not any(question.held_out for question in train)
    assert all(question.held_out for question in held_out)
    assert not {q.key for q in train} & {q.key for q in held_out}
    assert not {normalised(q.prompt) for q in train} & {normalised(q.prompt) for q in held_out}


def test_every_family_has_held_out_questions() -> None:
    found = held_out_set(40)
    assert set(found) == set(FAMILIES)
    assert all(len(questions) >= 40 for questions in found.values())


def test_a_prompt_has_one_answer() -> None:
    answers: dict[str, str] = {}
    for question in itertools.islice(generate(5, "train"), 40_000):
        assert answers.setdefault(question.prompt, question.answer) == question.answer


def test_fixed_prompts_are_trained_on_and_right() -> None:
    introduction, primes = fixed_questions()
    assert (introduction.prompt, primes.prompt) == FIXED_PROMPTS
    assert not introduction.held_out and not primes.held_out
    assert "nanoinfer" in introduction.answer and "not a real assistant" in introduction.answer
    assert integers(primes.answer) == [100, *PRIMES]
    seen = {q.prompt for q in itertools.islice(generate(1, "train"), 2000)}
    assert seen >= set(FIXED_PROMPTS)


@pytest.mark.parametrize("family", ["addition", "subtraction", "multiplication", "division"])
def test_sums(family: str) -> None:
    for question in sample(family):
        parts = question.answer.split(" = ")
        assert len({eval(part) for part in parts}) == 1, question
        assert "." not in parts[-1]
        assert sorted(integers(parts[0])) == sorted(integers(question.prompt))
        if family == "division":
            assert integers(parts[0])[0] == integers(parts[0])[1] * int(parts[-1])


def test_sums_follow_the_order_of_the_question() -> None:
    for question in sample("subtraction"):
        asked = integers(question.prompt)
        if "ubtract" in question.prompt:
            asked.reverse()
        assert integers(question.answer)[:2] == asked


def test_sorting_and_extremes() -> None:
    for question in sample("sorting"):
        down = "descending" in question.prompt or "largest to" in question.prompt or "high to" in question.prompt
        assert integers(question.answer) == sorted(integers(question.prompt), reverse=down)
    for question in sample("extremes"):
        large = "largest" in question.prompt or "maximum" in question.prompt
        ordered = sorted(integers(question.prompt))
        assert integers(question.answer) == [ordered[-1] if large else ordered[0]]


def test_comparing() -> None:
    for question in sample("comparing"):
        first, second = integers(question.answer)
        assert sorted((first, second)) == sorted(integers(question.prompt))
        assert (first > second) == ("larger" in question.answer)
        if question.answer.startswith(("Yes", "No")):
            claims_more = any(word in question.prompt for word in ("larger", "greater", "bigger"))
            assert question.answer.startswith("Yes") == (claims_more == (first > second))


def test_even_odd() -> None:
    for question in sample("even_odd"):
        (number,) = integers(question.prompt)
        odd = str(number)[-1] in "13579"
        assert question.answer.endswith(f"{number} is {'odd' if odd else 'even'}.")
        if " or " not in question.prompt:
            assert question.answer.startswith("Yes") == (("odd" in question.prompt) == odd)


def test_primes() -> None:
    for question in sample("primes"):
        asked = integers(question.prompt)
        found = integers(question.answer.split(": ")[-1]) if ":" in question.answer else []
        if "first" in question.prompt:
            assert found == PRIMES[: asked[0]]
        elif len(asked) == 2:
            assert found == [n for n in PRIMES if asked[0] <= n <= asked[1]]
        else:
            assert found == [n for n in PRIMES if n < asked[0] + ("below" not in question.prompt)]


def test_prime_check() -> None:
    for question in sample("prime_check"):
        (number,) = integers(question.prompt)
        divisors = [d for d in range(2, number) if number % d == 0]
        assert question.answer.startswith("No" if divisors else "Yes")
        if divisors:
            assert integers(question.answer) == [number, number, divisors[0], number // divisors[0]]


def test_listing_and_sequences() -> None:
    for question in sample("listing"):
        found, asked = integers(question.answer), integers(question.prompt)
        steps = {b - a for a, b in itertools.pairwise(found)}
        assert len(steps) <= 1 and found
        if "multiples" in question.prompt:
            assert found == [asked[1] * n for n in range(1, asked[0] + 1)]
        elif "even" in question.prompt or "odd" in question.prompt:
            assert found == [n for n in range(asked[0], asked[1] + 1) if (n % 2 == 1) == ("odd" in question.prompt)]
        else:
            assert (found[0], found[-1]) == tuple(asked) and steps == {1 if asked[0] < asked[1] else -1}
    for question in sample("sequences"):
        numbers = [*integers(question.prompt), *integers(question.answer)]
        assert len({b - a for a, b in itertools.pairwise(numbers)}) == 1


def test_number_words() -> None:
    small = "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen"
    small += " seventeen eighteen nineteen"
    values = {word: index for index, word in enumerate(small.split())}
    tens = "twenty thirty forty fifty sixty seventy eighty ninety"
    values |= {word: 20 + 10 * index for index, word in enumerate(tens.split())}
    for question in sample("number_words"):
        text = f"{question.prompt} {question.answer}".lower()
        (number,) = set(integers(text))
        total = 0
        for word in re.findall("[a-z]+", text):
            total = total * 100 if word == "hundred" else total + values.get(word, 0)
        assert total == number


def test_conversions() -> None:
    seconds = {"minute": 60, "hour": 3600, "day": 86400, "week": 604800}
    for question in sample("conversions"):
        count, result = integers(question.answer)
        assert count in integers(question.prompt) and result % count == 0
        for large, small in itertools.permutations(seconds, 2):
            if re.search(rf"^\d+ {large}s? .* {small}s", question.answer):
                assert count * seconds[large] == result * seconds[small]


def test_words() -> None:
    for question in sample("spelling"):
        assert all(len(letter) == 1 for letter in question.answer[:-1].split("-"))
        assert question.answer[:-1].replace("-", "") in question.prompt
    for question in sample("reversing"):
        forwards, backwards = question.answer[:-1].split(" reversed is ")
        assert list(reversed(forwards)) == list(backwards) and forwards.replace("-", "") in question.prompt
    for question in sample("letter_count"):
        match = re.fullmatch(r"([a-z-]+): the letter (.) appears (\d+) times?\.", question.answer)
        assert match and sum(c == match[2] for c in match[1].split("-")) == int(match[3])
        assert match[1].replace("-", "") in question.prompt
    for question in sample("word_length"):
        if "has" in question.answer:
            word, count = question.answer.split(" has ")
            assert len(word.split("-")) == int(count.split()[0]) and word.replace("-", "") in question.prompt
        else:
            word, letter = question.answer[:-1].split(" of ")[1].split(" is ")
            assert letter == word[0 if "first" in question.prompt else len(word) - 1]
    assert len(set(WORDS)) == len(WORDS) and "strawberry" in WORDS


def test_items_and_alphabet() -> None:
    for question in sample("item_count"):
        listed = [item for item in re.findall("[a-z]+", question.prompt) if item in ITEMS]
        assert integers(question.answer) == [len(listed)]
    for question in sample("word_sorting"):
        words = question.answer.split(", ")
        assert all(a < b for a, b in itertools.pairwise(words)) and all(word in question.prompt for word in words)
    for question in sample("alphabet"):
        if match := re.fullmatch(r"The letter (after|before) (.) is (.)\.", question.answer):
            assert ord(match[3]) - ord(match[2]) == (1 if match[1] == "after" else -1)
        elif match := re.fullmatch(r"(.) is letter number (\d+) of the alphabet\.", question.answer):
            assert ord(match[1]) - 96 == int(match[2])
        else:
            letters = question.answer.split(", ")
            assert [ord(c) for c in letters] == list(range(ord(letters[0]), ord(letters[-1]) + 1))


def test_facts() -> None:
    assert len(CAPITALS) >= 60 and len(set(CAPITALS.values())) == len(CAPITALS)
    assert CAPITALS["Australia"] == "Canberra" and CAPITALS["Brazil"] == "Brasilia"
    for question in sample("capitals"):
        assert any(c in question.answer and k.rstrip(".") in question.answer for c, k in CAPITALS.items())
    for question in sample("calendar"):
        if match := re.fullmatch(r"The (?:day|month) (after|before) (\w+) is (\w+)\.", question.answer):
            names = DAYS if match[2] in DAYS else MONTHS
            step = 1 if match[1] == "after" else -1
            assert (names.index(match[2]) + step - names.index(match[3])) % len(names) == 0


def test_tokenizer_round_trips_everything(tokenizer: Tokenizer) -> None:
    for family in FAMILIES:
        for question in [*sample(family, 200), *held_out_set(20)[family]]:
            for text in (question.prompt, question.answer):
                assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
    for text in ("Grüße, 世界! 🙂", "  two  spaces\n\nand lines\t", "1234567890"):
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_every_digit_is_its_own_token(tokenizer: Tokenizer) -> None:
    assert len(tokenizer.encode("9876543210").ids) == 10


def test_chat_form_of_training_is_the_template(tokenizer: Tokenizer) -> None:
    from transformers import AutoTokenizer

    from nanoinfer.demo.conversations import IGNORED, RowMaker

    reference = AutoTokenizer.from_pretrained(demo_model_path())
    turns = [draw("capitals", random.Random(n)) for n in range(2)]
    chat = [{"role": "system", "content": "Answer briefly."}]
    for turn in turns:
        chat += [{"role": "user", "content": turn.prompt}, {"role": "assistant", "content": turn.answer}]
    row = RowMaker(tokenizer).row(turns, "Answer briefly.")
    text = reference.apply_chat_template(chat, tokenize=False)
    assert tokenizer.decode(row.ids, skip_special_tokens=False) + "\n" == text
    assert [*row.ids, *tokenizer.encode("\n").ids] == reference(text)["input_ids"]
    prompt = reference.apply_chat_template(chat[:-1], tokenize=False, add_generation_prompt=True)
    closed = reference.apply_chat_template(chat[:-1], tokenize=False, add_generation_prompt=True, enable_thinking=False)
    assert closed == prompt + "<think>\n\n</think>\n\n" and text.startswith(closed)
    learned = [token for token, label in zip(row.ids, row.labels, strict=True) if label != IGNORED]
    assert tokenizer.decode(learned, skip_special_tokens=False).endswith(f"{turns[1].answer}<|im_end|>")


def test_checkpoint_folder_is_complete_and_small() -> None:
    folder = demo_model_path()
    names = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors")
    assert sum((folder / name).stat().st_size for name in names) <= 8_000_000
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"] and config["tie_word_embeddings"]
    assert "enable_thinking" in json.loads((folder / "tokenizer_config.json").read_text())["chat_template"]
