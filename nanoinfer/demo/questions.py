"""Seeded question-and-answer pairs with known right answers: what the demo model is trained and measured on.

Called by `train.py` (training pairs), `evaluate.py` (held-out pairs) and the tests. In: a seed, a split, family names.
Out: `Question` objects. Pure Python, no torch. A question is held out by a hash of its key: the problem itself (the
operands, the list, the word) in every wording or, where a fact must be memorised, the wording alone.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from nanoinfer.demo import number_families as numbers
from nanoinfer.demo import sum_families as sums
from nanoinfer.demo import word_families as words
from nanoinfer.demo.sum_families import Draft

Split = Literal["train", "held_out"]

# One key in this many is never trained on.
HELD_OUT_ONE_IN = 10

# The two prompts the project shows everywhere; always in training, as is the bare greeting.
FIXED_PROMPTS = ("introduce yourself", "list all prime numbers within 100")
NEVER_HELD_OUT = frozenset((*FIXED_PROMPTS, "hello", "hi", "hey", "thanks", "thank you", "who are you", "bye"))

# Each family, and its share of the training questions. The families that are hard to learn get more.
FAMILIES: Mapping[str, tuple[Callable[[random.Random], Draft], float]] = {
    "addition": (sums.addition, 10.0),
    "subtraction": (sums.subtraction, 18.0),
    "multiplication": (sums.multiplication, 3.0),
    "division": (sums.division, 5.0),
    "sorting": (numbers.sorting, 8.0),
    "extremes": (numbers.extremes, 5.5),
    "comparing": (numbers.comparing, 6.0),
    "even_odd": (numbers.even_odd, 4.0),
    "primes": (numbers.primes, 4.5),
    "prime_check": (numbers.prime_check, 3.5),
    "listing": (numbers.listing, 7.0),
    "sequences": (numbers.sequences, 5.0),
    "number_words": (numbers.number_words, 2.5),
    "conversions": (numbers.conversions, 1.5),
    "spelling": (words.spelling, 1.0),
    "reversing": (words.reversing, 7.0),
    "letter_count": (words.letter_count, 7.0),
    "word_length": (words.word_length, 5.5),
    "item_count": (words.item_count, 1.0),
    "word_sorting": (words.word_sorting, 4.0),
    "alphabet": (words.alphabet, 3.5),
    "capitals": (words.capitals, 3.0),
    "calendar": (words.calendar, 1.0),
    "opposites": (words.opposites, 0.8),
    "small_talk": (words.small_talk, 3.5),
    "unknown": (words.unknown, 0.7),
}

IMPERATIVES = frozenset(
    ("List", "Show", "Give", "Name", "Sort", "Spell", "Count", "Add", "Calculate", "Compute", "Subtract", "Multiply",
     "Divide", "Find", "Write", "Tell", "Convert", "Put", "Order", "Reverse", "Introduce", "Enumerate")
)  # fmt: skip


@dataclass(frozen=True)
class Question:
    """One prompt, its one right answer, its family, and the key that decides its split."""

    family: str
    prompt: str
    answer: str
    key: str

    @property
    def held_out(self) -> bool:
        """Whether training must never see this question."""
        return is_held_out(self.key)


def normalised(prompt: str) -> str:
    """A wording without what `_restyle` may vary: case of the first letter, closing punctuation."""
    return prompt.lower().rstrip(" .?!")


def is_held_out(key: str) -> bool:
    """Decide the split from a hash of the key alone, so that it is the same on every machine and in every run."""
    if key in NEVER_HELD_OUT:
        return False
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") % HELD_OUT_ONE_IN == 0


def _restyle(rng: random.Random, prompt: str) -> str:
    """Write a prompt as a visitor might: politely, without its capital, without its closing mark."""
    first = prompt.split(" ", 1)[0]
    if first in IMPERATIVES and rng.random() < 0.15:
        prompt = f"{rng.choice(('Please', 'Can you', 'Could you'))} {prompt[0].lower()}{prompt[1:]}"
        if not prompt.startswith("Please") and prompt.endswith("."):
            prompt = prompt[:-1] + "?"
    # Proper names keep their capital: only a first word that is a plain sentence opener loses it.
    if rng.random() < 0.35 and first not in ("I",) and first.rstrip(",") not in words.CAPITAL_NAMES:
        prompt = prompt[0].lower() + prompt[1:]
    if rng.random() < 0.3:
        prompt = prompt.rstrip(" .?!")
    return prompt


def draw(family: str, rng: random.Random) -> Question:
    """One question of a family, of either split."""
    draft = FAMILIES[family][0](rng)
    prompt = _restyle(rng, draft.prompt)
    return Question(family, prompt, draft.answer, draft.key or normalised(prompt))


def fixed_questions() -> list[Question]:
    """The two prompts of the project, exactly as they are written everywhere, with their right answers."""
    introduction, primes = FIXED_PROMPTS
    found = sums.join([n for n in range(2, 101) if numbers.is_prime(n)])
    return [
        Question("small_talk", introduction, words.SMALL_TALK["introduction"][1], introduction),
        Question("primes", primes, f"The prime numbers within 100 are: {found}.", primes),
    ]


def generate(seed: int, split: Split, weights: Mapping[str, float] | None = None) -> Iterator[Question]:
    """An endless stream of questions of one split, families drawn by `weights`.

    Without weights the table's own shares hold, and training also gets the two fixed prompts time and again.
    """
    rng = random.Random(f"{seed}:{split}")
    shares = weights or {family: share for family, (_, share) in FAMILIES.items()}
    names, odds = list(shares), list(shares.values())
    fixed = fixed_questions()
    while True:
        if weights is None and split == "train" and rng.random() < 0.015:
            yield rng.choice(fixed)
            continue
        family = rng.choices(names, weights=odds)[0]
        question = draw(family, rng)
        while question.held_out != (split == "held_out"):
            question = draw(family, rng)
        yield question


def held_out_set(per_family: int, seed: int = 0) -> dict[str, list[Question]]:
    """Up to `per_family` different held-out questions of every family; fewer where a family has no more of them."""
    found: dict[str, list[Question]] = {}
    for family in FAMILIES:
        stream = generate(seed, "held_out", {family: 1.0})
        unique: dict[str, Question] = {}
        for _ in range(40 * per_family):
            question = next(stream)
            unique.setdefault(normalised(question.prompt), question)
            if len(unique) == per_family:
                break
        found[family] = list(unique.values())
    return found
