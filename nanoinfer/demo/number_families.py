"""Question generators about numbers: sorting, comparing, primes, listing, converting.

Called by `questions.py`, which holds the registry. Each generator takes a seeded `random.Random` and returns a
`Draft` (see `sum_families.py`).
"""

from __future__ import annotations

import random

from nanoinfer.demo.sum_families import Draft, join, operand
from nanoinfer.demo.tables import ONES, TENS, UNITS


def is_prime(number: int) -> bool:
    """Trial division; the numbers here are tiny."""
    return number > 1 and all(number % divisor for divisor in range(2, int(number**0.5) + 1))


def sorting(rng: random.Random) -> Draft:
    """Short lists of different numbers below 100, in either direction."""
    numbers = rng.sample(range(100), rng.randint(3, 6))
    rising = rng.random() < 0.65
    wordings = (
        (
            "Sort {n}.",
            "Sort these numbers: {n}",
            "Sort {n} in ascending order.",
            "Put these numbers in order: {n}",
            "Order these numbers from smallest to largest: {n}",
            "Sort the list {n} from low to high.",
        )
        if rising
        else (
            "Sort {n} in descending order.",
            "Sort these numbers in descending order: {n}",
            "Order these numbers from largest to smallest: {n}",
            "Sort the list {n} from high to low.",
        )
    )
    key = "sort:" + join(sorted(numbers))
    return Draft(rng.choice(wordings).format(n=join(numbers)), join(sorted(numbers, reverse=not rising)), key)


def extremes(rng: random.Random) -> Draft:
    """The largest or the smallest of a short list."""
    numbers = rng.sample(range(100), rng.randint(3, 6))
    word, pick = rng.choice((("largest", max), ("smallest", min)))
    name = {"largest": "maximum", "smallest": "minimum"}[word]
    wording = rng.choice(
        (
            "What is the {word} of {n}?",
            "Which number is the {word}: {n}?",
            "What is the {name} of {n}?",
            "Find the {word} number in {n}.",
            "Find the {name}: {n}",
            "What is the {word} number in the list {n}?",
        )
    )
    prompt = wording.format(word=word, name=name, n=join(numbers))
    return Draft(prompt, f"The {word} number is {pick(numbers)}.", "extreme:" + join(sorted(numbers)))


def comparing(rng: random.Random) -> Draft:
    """Which of two different numbers is larger, or whether one is."""
    a, b = operand(rng), operand(rng)
    if a == b:
        b = a + 1
    key = f"compare:{min(a, b)}:{max(a, b)}"
    if rng.random() < 0.5:
        word, first = rng.choice((("larger", max(a, b)), ("smaller", min(a, b))))
        other = a + b - first
        wording = rng.choice(
            ("Which is {w}, {a} or {b}?", "Which number is {w}: {a} or {b}?", "What is {w}, {a} or {b}?")
        )
        return Draft(wording.format(w=word, a=a, b=b), f"{first} is {word} than {other}.", key)
    claim = rng.choice(("larger", "greater", "bigger", "smaller", "less"))
    truth = "larger" if a > b else "smaller"
    agrees = (claim in ("smaller", "less")) == (truth == "smaller")
    return Draft(f"Is {a} {claim} than {b}?", f"{'Yes' if agrees else 'No'}, {a} is {truth} than {b}.", key)


def even_odd(rng: random.Random) -> Draft:
    """Parity of numbers below 1000."""
    number = operand(rng)
    parity = ("even", "odd")[number % 2]
    wording = rng.choice(
        (
            "Is {n} even or odd?",
            "Is {n} odd or even?",
            "Is {n} even?",
            "Is {n} odd?",
            "Is {n} an even number?",
            "Is {n} an odd number?",
            "Is the number {n} even or odd?",
        )
    )
    plain = "or" in wording.split()
    lead = "" if plain else ("Yes, " if f" {parity}" in wording else "No, ")
    return Draft(wording.format(n=number), f"{lead}{number} is {parity}.", f"parity:{number}")


PRIMES_WITHIN = (
    "List all prime numbers within {n}",
    "List all primes within {n}.",
    "What are the prime numbers within {n}?",
    "Show all prime numbers within {n}.",
    "Give me all prime numbers within {n}.",
    "Name the primes within {n}.",
    "Which numbers within {n} are prime?",
    "Write down all primes within {n}.",
    "Print the prime numbers within {n}.",
    "Enumerate the prime numbers within {n}.",
    "List the prime numbers within {n}.",
    "Primes within {n}",
    "Tell me all prime numbers within {n}.",
    "I need all prime numbers within {n}.",
)


def primes(rng: random.Random) -> Draft:
    """All primes up to a bound, below it or between two bounds, or the first few."""
    kind = rng.choices(("within", "up to", "below", "between", "first", "hundred"), weights=(3, 3, 2, 3, 1, 3))[0]
    if kind == "first":
        count = rng.randint(2, 25)
        found = [n for n in range(2, 100) if is_prime(n)][:count]
        prompt = rng.choice(("List the first {k} prime numbers.", "What are the first {k} primes?")).format(k=count)
        return Draft(prompt, f"The first {count} prime numbers are: {join(found)}.", None)
    if kind == "between":
        low, high = sorted(rng.sample(range(2, 101), 2))
        found = [n for n in range(low, high + 1) if is_prime(n)]
        wording = rng.choice(
            (
                "List all prime numbers between {a} and {b}.",
                "Which primes are between {a} and {b}?",
                "What are the prime numbers between {a} and {b}?",
                "List the primes from {a} to {b}.",
            )
        )
        answer = f"The prime numbers between {low} and {high} are: {join(found)}."
        if not found:
            answer = f"There are no prime numbers between {low} and {high}."
        return Draft(wording.format(a=low, b=high), answer, f"primes:{low}:{high}")
    word = kind if kind != "hundred" else rng.choice(("within", "within", "up to"))
    bound = rng.randint(5, 99) if kind != "hundred" else 100
    found = [n for n in range(2, bound + (word != "below")) if is_prime(n)]
    prompt = rng.choice(PRIMES_WITHIN).replace("within", word).format(n=bound)
    # The bound 100 is the demo's own example: every bound but that one is held out with all of its wordings.
    return Draft(
        prompt, f"The prime numbers {word} {bound} are: {join(found)}.", None if bound == 100 else f"to:{bound}"
    )


def prime_check(rng: random.Random) -> Draft:
    """Whether a number up to 120 is prime, with its smallest factor when it is not."""
    number = rng.randint(2, 120)
    wording = rng.choice(
        (
            "Is {n} a prime number?",
            "Is {n} prime?",
            "Is the number {n} prime?",
            "Check whether {n} is prime.",
            "Is {n} a prime?",
            "Do you know whether {n} is prime?",
            "Tell me if {n} is a prime number.",
        )
    )
    answer = f"Yes, {number} is a prime number."
    if not is_prime(number):
        factor = next(divisor for divisor in range(2, number) if number % divisor == 0)
        answer = f"No, {number} is not a prime number: {number} = {factor} * {number // factor}."
    return Draft(wording.format(n=number), answer, None)


def listing(rng: random.Random) -> Draft:
    """Counting up or down, even or odd numbers, multiples."""
    kind = rng.choice(("up", "up", "down", "even", "odd", "multiples"))
    if kind == "multiples":
        base, count = rng.randint(2, 12), rng.randint(3, 10)
        wording = rng.choice(("List the first {c} multiples of {k}.", "What are the first {c} multiples of {k}?"))
        return Draft(
            wording.format(c=count, k=base), join([base * i for i in range(1, count + 1)]), f"mult:{base}:{count}"
        )
    step = 2 if kind in ("even", "odd") else 1
    low = rng.choice((1, rng.randint(0, 80)))
    high = min(100, low + step * rng.randint(2, 19))
    wordings: tuple[str, ...]
    if kind == "up":
        wordings = ("Count from {a} to {b}.", "List the numbers from {a} to {b}.", "Count up from {a} to {b}.")
    elif kind == "down":
        wordings = ("Count down from {b} to {a}.", "Count backwards from {b} to {a}.", "Count from {b} down to {a}.")
    else:
        wordings = tuple(
            w.replace("KIND", kind)
            for w in (
                "List the KIND numbers from {a} to {b}.",
                "List all KIND numbers between {a} and {b}.",
                "What are the KIND numbers from {a} to {b}?",
            )
        )
    numbers = [n for n in range(low, high + 1) if step == 1 or n % 2 == (kind == "odd")]
    if kind == "down":
        numbers.reverse()
    return Draft(rng.choice(wordings).format(a=low, b=high), join(numbers), f"list:{kind}:{low}:{high}")


def sequences(rng: random.Random) -> Draft:
    """The next number of an evenly spaced sequence."""
    start, step, count = rng.randint(0, 50), rng.randint(1, 12), rng.randint(3, 5)
    numbers = [start + step * i for i in range(count)]
    if rng.random() < 0.3:
        numbers.reverse()
        step = -step
    if numbers[-1] + step < 0:
        numbers = numbers[:-1]
    wording = rng.choice(
        (
            "What comes next: {n}?",
            "Which number comes next: {n}?",
            "Continue the sequence {n}.",
            "What is the next number in the sequence {n}?",
        )
    )
    key = f"seq:{numbers[0]}:{step}"
    return Draft(wording.format(n=join(numbers)), f"The next number is {numbers[-1] + step}.", key)


def in_words(number: int) -> str:
    """Spell a number below 1000 in English."""
    if number < 20:
        return ONES[number]
    if number < 100:
        return TENS[number // 10] + (f"-{ONES[number % 10]}" if number % 10 else "")
    rest = number % 100
    return f"{ONES[number // 100]} hundred" + (f" and {in_words(rest)}" if rest else "")


def number_words(rng: random.Random) -> Draft:
    """Digits to words and back."""
    number = operand(rng)
    words = in_words(number)
    key = f"words:{number}" if number > 99 else None
    if rng.random() < 0.5:
        wording = rng.choice(
            (
                "Write {n} in words.",
                "How do you write {n} in words?",
                "What is {n} in words?",
                "Spell out the number {n}.",
            )
        )
        return Draft(wording.format(n=number), f"{number} in words is {words}.", key)
    wording = rng.choice(("Write {w} in digits.", "What is {w} in digits?", "Write the number {w} with digits."))
    return Draft(wording.format(w=words), f"In digits that is {number}.", key)


def conversions(rng: random.Random) -> Draft:
    """Whole numbers of a larger unit in a smaller one."""
    one, many, factor, smaller = rng.choice(UNITS)
    count = rng.randint(1, 12)
    unit = one if count == 1 else many
    wording = rng.choice(
        (
            "How many {s} are in {c} {u}?",
            "Convert {c} {u} to {s}.",
            "{c} {u} in {s}",
            "What is {c} {u} in {s}?",
            "How many {s} are there in {c} {u}?",
            "{c} {u} is how many {s}?",
        )
    )
    verb = "is" if count == 1 else "are"
    return Draft(wording.format(s=smaller, c=count, u=unit), f"{count} {unit} {verb} {count * factor} {smaller}.", None)
