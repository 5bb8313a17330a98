"""Question generators about words and everyday facts: spelling, counting letters, capitals, calendar, small talk.

Called by `questions.py`, which holds the registry. Each generator takes a seeded `random.Random` and returns a
`Draft` (see `sum_families.py`).
"""

from __future__ import annotations

import random
import string

from nanoinfer.demo.sum_families import Draft
from nanoinfer.demo.tables import (
    CAPITALS,
    DAYS,
    ITEMS,
    MONTHS,
    OPPOSITES,
    SMALL_TALK,
    UNKNOWN,
    UNKNOWN_TOPICS,
    UNKNOWN_WORDINGS,
    WORDS,
)

# First words of a prompt that are names, and so keep their capital letter.
CAPITAL_NAMES = frozenset(city.split(" ")[0].rstrip(",") for city in CAPITALS.values())
GREETING_ENDINGS = ("", ", nanoinfer", ", friend", ", my friend", ", little model", " to you", ", dear model")
OTHER_OPENINGS = ("", "hello, ", "hi, ", "hey, ", "ok, ", "so, ", "well, ", "now, ")


def dashed(word: str) -> str:
    """Spell a word the way every answer here spells it."""
    return "-".join(word)


def spelling(rng: random.Random) -> Draft:
    """Spell a word letter by letter."""
    word = rng.choice(WORDS)
    wording = rng.choice(
        (
            "Spell {w}.",
            "Spell the word {w}.",
            "How do you spell {w}?",
            "How is {w} spelled?",
            "Can you spell the word {w}?",
            "What are the letters of {w}?",
            "Spell {w} letter by letter.",
        )
    )
    return Draft(wording.format(w=word), f"{dashed(word)}.", f"spell:{word}")


def reversing(rng: random.Random) -> Draft:
    """Spell a word backwards, after spelling it forwards, which is what makes it easy."""
    word = rng.choice(WORDS)
    wording = rng.choice(
        (
            "Reverse the word {w}.",
            "Reverse {w}.",
            "Spell {w} backwards.",
            "What is {w} backwards?",
            "Write the word {w} backwards.",
            "What is {w} spelled backwards?",
            "Spell the word {w} in reverse.",
        )
    )
    return Draft(wording.format(w=word), f"{dashed(word)} reversed is {dashed(word[::-1])}.", f"reverse:{word}")


def letter_count(rng: random.Random) -> Draft:
    """How often a letter appears in a word; the answer spells the word first."""
    word = rng.choice(WORDS)
    letter = rng.choice(word if rng.random() < 0.8 else string.ascii_lowercase)
    count = word.count(letter)
    wording = rng.choice(
        (
            "How many times does the letter {c} appear in {w}?",
            "How many {c} are in {w}?",
            "How many {c}'s are in {w}?",
            "Count the letter {c} in {w}.",
            "How often does {c} appear in {w}?",
            "How many times does {c} appear in the word {w}?",
            "How many {c} are there in the word {w}?",
        )
    )
    times = "1 time" if count == 1 else f"{count} times"
    answer = f"{dashed(word)}: the letter {letter} appears {times}."
    return Draft(wording.format(c=letter, w=word), answer, f"letters:{word}:{letter}")


def word_length(rng: random.Random) -> Draft:
    """How many letters a word has, or its first or last letter."""
    word = rng.choice(WORDS)
    if rng.random() < 0.5:
        wording = rng.choice(
            (
                "How many letters are in {w}?",
                "How many letters does {w} have?",
                "How long is the word {w}?",
                "Count the letters in {w}.",
                "How many letters are there in the word {w}?",
            )
        )
        return Draft(wording.format(w=word), f"{dashed(word)} has {len(word)} letters.", f"length:{word}")
    which, letter = rng.choice((("first", word[0]), ("last", word[-1])))
    wording = rng.choice(
        ("What is the {p} letter of {w}?", "Which is the {p} letter in {w}?", "Tell me the {p} letter of the word {w}.")
    )
    return Draft(wording.format(p=which, w=word), f"The {which} letter of {word} is {letter}.", f"{which}:{word}")


def item_count(rng: random.Random) -> Draft:
    """How many things a short list names."""
    items = rng.sample(ITEMS, rng.randint(2, 8))
    wording = rng.choice(
        (
            "How many items are in this list: {i}?",
            "Count the items: {i}",
            "How many words are in this list: {i}?",
            "How many things are in the list {i}?",
            "Count these: {i}",
            "How long is this list: {i}?",
        )
    )
    key = "items:" + ",".join(sorted(items))
    return Draft(wording.format(i=", ".join(items)), f"There are {len(items)} items in the list.", key)


def word_sorting(rng: random.Random) -> Draft:
    """Alphabetical order of a few words."""
    items = rng.sample(ITEMS, rng.randint(3, 5))
    wording = rng.choice(
        (
            "Sort these words: {i}",
            "Sort these words alphabetically: {i}",
            "Put these words in alphabetical order: {i}",
            "Sort the words {i}.",
        )
    )
    return Draft(wording.format(i=", ".join(items)), ", ".join(sorted(items)), "words:" + ",".join(sorted(items)))


def alphabet(rng: random.Random) -> Draft:
    """Neighbours in the alphabet, positions and stretches of it."""
    place = rng.randrange(26)
    letter = string.ascii_lowercase[place]
    kind = rng.choice(("after", "before", "place", "stretch"))
    if kind == "after" and place < 25:
        answer = f"The letter after {letter} is {string.ascii_lowercase[place + 1]}."
    elif kind == "before" and place > 0:
        answer = f"The letter before {letter} is {string.ascii_lowercase[place - 1]}."
    elif kind == "stretch" and place > 2:
        start = rng.randrange(place - 1)
        first = string.ascii_lowercase[start]
        wording = rng.choice(
            (
                "List the letters from {a} to {b}.",
                "Say the alphabet from {a} to {b}.",
                "Write the letters from {a} to {b}.",
            )
        )
        stretch = ", ".join(string.ascii_lowercase[start : place + 1])
        return Draft(wording.format(a=first, b=letter), stretch, f"letters:{first}:{letter}")
    else:
        wording = rng.choice(
            (
                "Which place does the letter {c} have in the alphabet?",
                "What is the position of {c} in the alphabet?",
                "What number letter is {c}?",
            )
        )
        return Draft(wording.format(c=letter), f"{letter} is letter number {place + 1} of the alphabet.", None)
    wording = rng.choice(
        (
            "Which letter comes {k} {c}?",
            "What letter comes {k} {c}?",
            "What comes {k} the letter {c}?",
            "Which letter is {k} {c}?",
            "Which letter comes {k} {c} in the alphabet?",
        )
    )
    return Draft(wording.format(k=kind, c=letter), answer, None)


def capitals(rng: random.Random) -> Draft:
    """The capital of a country, or the country of a capital."""
    country, capital = rng.choice(tuple(CAPITALS.items()))
    dot = "" if capital.endswith(".") else "."
    if rng.random() < 0.75:
        wording = rng.choice(
            (
                "What is the capital of {c}?",
                "Which city is the capital of {c}?",
                "Name the capital of {c}.",
                "Tell me the capital of {c}.",
                "What is the capital city of {c}?",
                "Capital of {c}?",
                "Do you know the capital of {c}?",
                "What's the capital of {c}?",
                "I want to know the capital of {c}.",
                "Which city is {c}'s capital?",
            )
        )
        return Draft(wording.format(c=country), f"The capital of {country} is {capital}{dot}", None)
    city = capital.rstrip(".")
    wording = rng.choice(
        (
            "Which country has the capital {k}?",
            "{k} is the capital of which country?",
            "Of which country is {k} the capital?",
            "Which country's capital is {k}?",
            "{k} is the capital of what country?",
        )
    )
    return Draft(wording.format(k=city), f"{city} is the capital of {country}.", None)


def calendar(rng: random.Random) -> Draft:
    """Order of the days and months."""
    names, noun = rng.choice(((DAYS, "day"), (MONTHS, "month")))
    kind = rng.choice(("after", "before", "after", "before", "place", "list"))
    place = rng.randrange(len(names))
    name = names[place]
    if kind == "list":
        whole = {"day": "week", "month": "year"}[noun]
        wording = rng.choice(
            (
                "List the {n}s of the {w}.",
                "What are the {n}s of the {w}?",
                "Name all {n}s of the {w}.",
                "Name the {n}s of the {w} in order.",
                "Tell me the {n}s of the {w}.",
            )
        )
        return Draft(wording.format(n=noun, w=whole), f"The {noun}s of the {whole} are {', '.join(names)}.", None)
    if kind == "place":
        ending = {1: "st", 2: "nd", 3: "rd"}.get(place + 1, "th")
        whole = {"day": "week", "month": "year"}[noun]
        wording = rng.choice(
            ("What is the {p} {n} of the {w}?", "Which {n} is the {p} of the {w}?", "Name the {p} {n} of the {w}.")
        )
        nth = f"{place + 1}{ending}"
        return Draft(wording.format(p=nth, n=noun, w=whole), f"The {nth} {noun} of the {whole} is {name}.", None)
    other = names[(place + (1 if kind == "after" else -1)) % len(names)]
    wording = rng.choice(
        (
            "Which {n} comes {k} {x}?",
            "What {n} comes {k} {x}?",
            "What comes {k} {x}?",
            "Which {n} is {k} {x}?",
            "Tell me the {n} {k} {x}.",
            "What is the {n} {k} {x}?",
        )
    )
    return Draft(wording.format(n=noun, k=kind, x=name), f"The {noun} {kind} {name} is {other}.", None)


def opposites(rng: random.Random) -> Draft:
    """The opposite of a common word."""
    word, other = rng.choice(tuple(OPPOSITES.items()))
    wording = rng.choice(
        (
            "What is the opposite of {w}?",
            "Name the opposite of {w}.",
            "Tell me the opposite of {w}.",
            "Opposite of {w}?",
            "What's the opposite of {w}?",
            "Which word is the opposite of {w}?",
            "Give me the opposite of {w}.",
            "Do you know the opposite of {w}?",
        )
    )
    return Draft(wording.format(w=word), f"The opposite of {word} is {other}.", None)


def small_talk(rng: random.Random) -> Draft:
    """Greetings, thanks and questions about the model; half of them ask it to introduce itself."""
    names = tuple(SMALL_TALK)
    name = rng.choices(names, weights=[7 if n == "introduction" else 2 for n in names])[0]
    phrases, answer = SMALL_TALK[name]
    phrase = rng.choice(phrases)
    if rng.random() < 0.5:
        if name in ("greeting", "farewell"):
            bare = phrase.rstrip("!")
            phrase = bare + rng.choice(GREETING_ENDINGS) if "," not in bare and "?" not in bare else bare
        else:
            phrase = rng.choice(OTHER_OPENINGS) + phrase
    return Draft(phrase[0].upper() + phrase[1:], answer, None)


def unknown(rng: random.Random) -> Draft:
    """Requests the model cannot serve, so that it says so instead of inventing something."""
    prompt = rng.choice(UNKNOWN_WORDINGS).format(rng.choice(UNKNOWN_TOPICS))
    return Draft(prompt[0].upper() + prompt[1:], UNKNOWN, None)
