"""Question generators about sums: addition, subtraction, multiplication, division; and what all generators share.

Called by `questions.py`, which holds the registry. Each generator takes a seeded `random.Random` and returns a
`Draft`: the prompt, the one right answer, and the key that decides whether the question is held out. A key of None
means "decide by the wording": used where the fact itself must be memorised, so that only wordings can be held out.
"""

from __future__ import annotations

import random
from typing import NamedTuple


class Draft(NamedTuple):
    """One generated question before `questions.py` gives it its family name and its final wording."""

    prompt: str
    answer: str
    key: str | None


def join(numbers: list[int]) -> str:
    """Write a list the way every question and answer here writes it."""
    return ", ".join(map(str, numbers))


def operand(rng: random.Random) -> int:
    """One to three digits, longer ones more often, since they are the harder ones."""
    low, high = rng.choices(((0, 9), (10, 99), (100, 999)), weights=(1, 3, 4))[0]
    return rng.randint(low, high)


def _operand_key(name: str, first: int, second: int) -> str | None:
    """Hold out a pair of operands in both orders; one-digit facts are memorised, so those go by wording."""
    if max(first, second) < 10:
        return None
    return f"{name}:{min(first, second)}:{max(first, second)}"


def addition(rng: random.Random) -> Draft:
    """Sums of two numbers of up to three digits."""
    a, b = operand(rng), operand(rng)
    wording = rng.choice(
        (
            "What is {a} + {b}?",
            "{a} + {b}",
            "{a} + {b} = ?",
            "{a}+{b}",
            "Calculate {a} + {b}.",
            "Add {a} and {b}.",
            "What is {a} plus {b}?",
            "What is the sum of {a} and {b}?",
            "How much is {a} + {b}?",
            "Compute {a} + {b}.",
            "{a} + {b} =",
        )
    )
    return Draft(wording.format(a=a, b=b), f"{a} + {b} = {a + b}", _operand_key("add", a, b))


def subtraction(rng: random.Random) -> Draft:
    """Differences of two numbers of up to three digits; a few small ones below zero."""
    a, b = operand(rng), operand(rng)
    if a < b and (max(a, b) > 99 or rng.random() < 0.6):
        a, b = b, a
    wordings = [
        "What is {a} - {b}?",
        "{a} - {b}",
        "{a} - {b} = ?",
        "{a}-{b}",
        "Calculate {a} - {b}.",
        "Compute {a} - {b}.",
        "What is {a} minus {b}?",
        "Subtract {b} from {a}.",
        "How much is {a} - {b}?",
        "{a} - {b} =",
    ]
    if a >= b:
        wordings.append("What is the difference between {a} and {b}?")
    return Draft(rng.choice(wordings).format(a=a, b=b), f"{a} - {b} = {a - b}", _operand_key("sub", a, b))


def multiplication(rng: random.Random) -> Draft:
    """Products of one digit and up to two digits; the answer shows the two partial products when there are two."""
    big, small = (rng.randint(10, 99) if rng.random() < 0.75 else rng.randint(0, 9)), rng.randint(0, 9)
    if big > 9:
        small = rng.randint(2, 9)
    a, b = (big, small) if rng.random() < 0.6 else (small, big)
    tens, ones = big // 10 * 10, big % 10
    steps = f"{tens * small} + {ones * small} = " if tens and ones else ""
    wording = rng.choice(
        (
            "What is {a} * {b}?",
            "{a} * {b}",
            "{a} * {b} = ?",
            "{a}*{b}",
            "What is {a} x {b}?",
            "{a} x {b}",
            "What is {a} times {b}?",
            "Multiply {a} by {b}.",
            "What is the product of {a} and {b}?",
            "How much is {a} * {b}?",
            "Calculate {a} * {b}.",
            "Compute {a} * {b}.",
            "{a} * {b} =",
        )
    )
    return Draft(wording.format(a=a, b=b), f"{a} * {b} = {steps}{a * b}", _operand_key("mul", a, b))


def division(rng: random.Random) -> Draft:
    """Divisions that come out even."""
    b, quotient = rng.randint(1, 9), rng.randint(1, 20)
    a = b * quotient
    wording = rng.choice(
        (
            "What is {a} / {b}?",
            "{a} / {b}",
            "{a} / {b} = ?",
            "Divide {a} by {b}.",
            "What is {a} divided by {b}?",
            "Calculate {a} / {b}.",
            "How much is {a} / {b}?",
            "How often does {b} go into {a}?",
        )
    )
    key = None if quotient < 10 else f"div:{a}:{b}"
    return Draft(wording.format(a=a, b=b), f"{a} / {b} = {quotient}", key)
