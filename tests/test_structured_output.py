"""Structured output with random weights: what finishes is valid, most of it finishes; errors are their request's."""

from __future__ import annotations

import asyncio
import copy
import functools
import json
import re
import threading
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import numpy as np
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit import byte_tokenizer, checkpoint, qwen3_tokenizer, qwen3_tokenizer_dir
from server_kit import asgi_client, tiny_llm

from nanoinfer.async_llm import QueueFullError
from nanoinfer.entrypoints.grammar_trial import GrammarTrial
from nanoinfer.entrypoints.structured_outputs import (
    MAX_CACHED,
    AfterThinking,
    GrammarCompiler,
    choice_source,
    grammar_source,
    json_schema_source,
    regex_source,
)

VOCAB = 320


def small(kind: str, **limits: Any) -> dict[str, Any]:
    return {"type": kind, **limits}


def obj(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


DIGIT = small("integer", minimum=0, maximum=9)
WORD = small("string", maxLength=6)
SCHEMAS: list[dict[str, Any]] = [
    DIGIT, small("integer", minimum=-50, maximum=50), small("integer", minimum=1000, maximum=1003), WORD,
    small("string", minLength=3, maxLength=5), small("string", pattern="^[a-c]{2,4}$"), small("boolean"), small("null"),
    {"enum": ["red", "green", 3, None, True]}, {"const": {"a": [1, "b"]}}, {"anyOf": [DIGIT, small("null")]},
    small("array", items=DIGIT, maxItems=3), small("array", items=WORD, minItems=2, maxItems=2),
    small("array", items=small("array", items=small("boolean"), maxItems=2), maxItems=2),
    {"type": "array", "prefixItems": [DIGIT, WORD], "items": False, "minItems": 2},
    obj(a=DIGIT), obj(name=WORD, age=small("integer", minimum=0, maximum=120)), obj(a=obj(b=obj(c=small("boolean")))),
    obj(tags=small("array", items={"enum": ["x", "y"]}, maxItems=4)), obj(x={"anyOf": [WORD, DIGIT]}, y=small("null")),
    obj(points=small("array", items=obj(x=DIGIT, y=DIGIT), minItems=1, maxItems=2)),
    {"type": "object", "properties": {"a": DIGIT, "b": WORD}, "required": ["a"], "additionalProperties": False},
    obj(kind={"const": "circle"}, radius=small("integer", minimum=1, maximum=99)),
    {"anyOf": [obj(kind={"const": "a"}, v=DIGIT), obj(kind={"const": "b"}, w=small("boolean"))]},
    {"$defs": {"d": DIGIT}, **obj(a={"$ref": "#/$defs/d"}, b={"$ref": "#/$defs/d"})}, small("string", format="date"),
    obj(code=small("string", pattern="^[A-Z]{3}-[0-9]{2}$")),
    obj(ok=small("boolean"), why={"enum": ["", "late", "early"]}),
    small("number", minimum=0, maximum=1, multipleOf=0.5), obj(**{'a"b': DIGIT, "<|im_end|>": small("boolean")}),
]  # fmt: skip


def post(bodies: list[dict[str, Any]], path: str = "/v1/completions", **options: Any) -> list[httpx.Response]:
    """The answers to requests that run at once over a model with random weights."""

    async def run() -> list[httpx.Response]:
        llm = tiny_llm(checkpoint(tokenizer=True).directory, **options)
        try:
            async with asgi_client(llm, grammar_timeout=60) as client:
                return await asyncio.gather(*(client.post(path, json=body) for body in bodies))
        finally:
            await llm.shutdown()

    return asyncio.run(run())


def body(structured: dict[str, Any], **extra: Any) -> dict[str, Any]:
    return {"prompt": "x", "max_tokens": 120, "seed": 1, "structured_outputs": structured, **extra}


def test_thirty_bounded_schemas() -> None:
    assert len(SCHEMAS) == 30
    for temperature in (1.0, 0.0):
        answers = post([body({"json": schema}, temperature=temperature) for schema in SCHEMAS])
        num_finished = 0
        for schema, answer in zip(SCHEMAS, answers, strict=True):
            assert answer.status_code == 200, f"{schema}: {answer.text}"
            (choice,) = answer.json()["choices"]
            assert choice["finish_reason"] in ("stop", "length")
            if choice["finish_reason"] == "stop":
                num_finished += 1
                jsonschema.validate(json.loads(choice["text"]), schema)
        assert num_finished >= 0.8 * len(SCHEMAS), f"{num_finished} of {len(SCHEMAS)} finished"


def test_regex_choice_grammar_and_json_object() -> None:
    regex, choices = r"[ab]{2,5}-\d{3}", ["yes", "no", 'may"be', "<|im_end|>"]
    grammar = 'start: "(" inner ")"\ninner: /[0-9]{1,3}/ | "(" inner ")"'
    gbnf = 'root ::= "left" | "right" [0-9]'
    wanted = [{"regex": regex}, {"choice": choices}, {"grammar": grammar}, {"grammar": gbnf}, {"json_object": True}]
    answers = post([body(one, n=3, temperature=1.0) for one in wanted])
    texts = [
        [choice["text"] for choice in answer.json()["choices"] if choice["finish_reason"] == "stop"]
        for answer in answers
    ]
    assert texts[0] and texts[1] and texts[3]
    assert all(re.fullmatch(regex, text) for text in texts[0])
    assert all(text in choices for text in texts[1])
    assert all(re.fullmatch(r"\(+\d{1,3}\)+", t) and t.count("(") == t.count(")") for t in texts[2])
    assert all(re.fullmatch(r"left|right\d", text) for text in texts[3])
    assert all(isinstance(json.loads(text), dict) for text in texts[4])


def test_a_constrained_request_does_not_disturb_its_neighbours() -> None:
    free = {"prompt": "abc", "max_tokens": 12, "seed": 4, "temperature": 1.0}
    alone = [answer.json()["choices"][0]["text"] for answer in post([free, {**free, "seed": 5}])]
    mixed = post([free, body({"regex": "[ab]{40}"}), {**free, "seed": 5}, body({"regex": "("}), body({"json": DIGIT})])
    assert [answer.status_code for answer in mixed] == [200, 200, 200, 400, 200]
    assert [mixed[0].json()["choices"][0]["text"], mixed[2].json()["choices"][0]["text"]] == alone


def test_a_constraint_survives_preemption() -> None:
    bodies = [body({"regex": f"[ab]{{{20 + i}}}c"}, seed=i, temperature=1.0) for i in range(8)]
    for answers in (post(bodies), post(bodies, num_kvcache_blocks=17, max_num_batched_tokens=16)):
        texts = [answer.json()["choices"][0]["text"] for answer in answers]
        assert [re.fullmatch(f"[ab]{{{20 + i}}}c", text) is not None for i, text in enumerate(texts)] == [True] * 8


def test_the_end_of_sequence_is_among_the_logprobs_only_if_it_is_text() -> None:
    (answer,) = post([body({"regex": "ab"}, logprobs=0)])
    (choice,) = answer.json()["choices"]
    assert choice["text"] == "ab" == "".join(choice["logprobs"]["tokens"])


# --- The grammar objects -----------------------------------------------------------------------------------------


@functools.cache
def compiler(timeout: float = 60) -> GrammarCompiler:
    return GrammarCompiler(byte_tokenizer(), VOCAB, [byte_tokenizer().eos_token_id], timeout)


def compiled(source: str, one: GrammarCompiler | None = None) -> Any:
    return asyncio.run((one or compiler()).compile(lambda: source))


def allowed(grammar: Any) -> set[int]:
    row = np.full(VOCAB // 32, -1, np.int32)
    grammar.fill_mask(row)
    return set(np.nonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))[0].tolist())


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.text(st.sampled_from('abthe <|im_end|>"\\é'), min_size=1, max_size=8), min_size=1, max_size=4),
    st.data(),
)
def test_whatever_the_masks_allow_is_one_of_the_choices(choices: list[str], data: st.DataObject) -> None:
    tokenizer = byte_tokenizer()
    grammar = compiled(choice_source(choices))
    eos = tokenizer.eos_token_id
    ids: list[int] = []
    while not grammar.is_terminated:
        candidates = sorted(allowed(grammar))
        token_id = data.draw(st.sampled_from(candidates))
        if token_id == eos:
            break
        assert grammar.accept([token_id])
        ids.append(token_id)
    assert tokenizer.decode(ids) in choices


def test_a_token_that_is_not_allowed_is_not_accepted_and_copies_are_apart() -> None:
    tokenizer = byte_tokenizer()
    a, b, c = (tokenizer.convert_tokens_to_ids(char) for char in "abc")
    grammar = compiled(regex_source("a[bc]"))
    other = copy.deepcopy(grammar)
    assert allowed(grammar) >= {a} and c not in allowed(grammar)
    assert grammar.accept([a, b]) and grammar.is_terminated and not other.is_terminated
    assert allowed(other) == allowed(compiled(regex_source("a[bc]")))
    assert other.accept([a]) and allowed(other) == {b, c}
    with pytest.raises(ValueError, match="the grammar stopped"):
        other.accept([a])


def test_after_thinking_everything_may_be_said_until_the_block_is_closed() -> None:
    tokenizer = byte_tokenizer()
    start, end, a, z = (tokenizer.convert_tokens_to_ids(token) for token in ("<think>", "</think>", "a", "z"))
    one = compiler()
    opened = one.after_thinking(compiled(regex_source("a"), one), is_open=True)
    assert isinstance(opened, AfterThinking) and len(allowed(opened)) == VOCAB
    assert opened.accept([z, z, start, end]) and allowed(opened) == {a} and not opened.is_terminated
    choice = one.after_thinking(compiled(regex_source("a"), one), is_open=False)
    copied = copy.deepcopy(choice)
    assert allowed(choice) == {a, start}
    assert (
        choice.accept([start, z]) and len(allowed(choice)) == VOCAB and choice.accept([end, a]) and choice.is_terminated
    )
    assert copied.accept([a]) and copied.is_terminated


@pytest.mark.skipif(qwen3_tokenizer_dir() is None, reason="the real Qwen3 tokenizer is not on this machine")
def test_the_real_tokenizer_with_its_padded_vocabulary() -> None:
    """A call in Qwen3's form is accepted as its own tokenizer cuts it, and the end is allowed after it only."""
    tokenizer = qwen3_tokenizer()
    eos = [151645, 151643]
    one = GrammarCompiler(tokenizer, 151936, eos, timeout=60)
    tools = [{"name": "f", "parameters": obj(city=small("string", maxLength=20), n=DIGIT)}]
    grammar = asyncio.run(one.compile(lambda: one.tool_call_source(tools, parallel=True), with_tags=True))
    call = '<tool_call>\n{"name": "f", "arguments": {"city": "Köln", "n": 3}}\n</tool_call>'
    for token_id in tokenizer(call)["input_ids"]:
        row = np.full(151936 // 32, -1, np.int32)
        grammar.fill_mask(row)
        bits = np.unpackbits(row.view(np.uint8), bitorder="little")
        assert bits[token_id] and not bits[eos].any() and not bits[151669:].any()
        assert grammar.accept([token_id])
    row = np.full(151936 // 32, -1, np.int32)
    grammar.fill_mask(row)
    assert np.unpackbits(row.view(np.uint8), bitorder="little")[eos].all() and grammar.accept([eos[1]])


def test_the_cache_is_bounded_and_hits() -> None:
    one = compiler(61)
    for i in range(MAX_CACHED + 10):
        compiled(regex_source(f"a{{{i + 1}}}"), one)
    assert len(one._cache) == MAX_CACHED
    before = list(one._cache)
    compiled(before[0][0], one)
    assert list(one._cache) == [*before[1:], before[0]]


def endless(number: int) -> str:
    """Takes longer than anybody waits: each further pattern that a string must match makes it several times as long."""
    patterns = [small("string", pattern=f"^.*{number}a.{{{i}}}$") for i in range(1, 60)]
    return json_schema_source({"allOf": patterns})


def test_a_compilation_that_does_not_end_is_ended_and_harms_no_other() -> None:
    async def run() -> list[Any]:
        one = GrammarCompiler(byte_tokenizer(), VOCAB, [byte_tokenizer().eos_token_id], timeout=1)
        try:
            # More than are compiled at once, twice.
            for round in range(2):
                sources = [endless(3 * round + i) for i in range(3)]
                works = [one.compile(lambda source=source: source) for source in sources]  # type: ignore[misc]
                for error in await asyncio.gather(*works, return_exceptions=True):
                    assert isinstance(error, QueueFullError | ValueError), error
                    assert "try again later" in str(error) or "more than 1 s" in str(error)
            one._timeout = 60
            return [await one.compile(lambda i=i: regex_source(f"a{i}")) for i in range(3)]  # type: ignore[misc]
        finally:
            one.close()

    before = set(psutil.Process().children())
    assert all(allowed(grammar) for grammar in asyncio.run(run()))
    assert set(psutil.Process().children()) <= before


def test_the_trial_imports_what_the_server_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever that is installed: here, a llguidance that only this process's path leads to."""
    (tmp_path / "llguidance.py").write_text(
        "class LLTokenizer:\n    def __init__(self, *a, **k): pass\n"
        "class LLMatcher(LLTokenizer):\n    def is_error(self): return True\n"
        "    def get_error(self): return 'said by the one on the path'\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    trial = GrammarTrial(compiler()._tokenizer_parts)
    try:
        with pytest.raises(ValueError, match="said by the one on the path"):
            trial.run("x", False, 60)
    finally:
        trial.close()


def test_a_compiler_that_crashes_is_an_error_of_one_request() -> None:
    async def run() -> None:
        one = GrammarCompiler(byte_tokenizer(), VOCAB, [byte_tokenizer().eos_token_id], timeout=60)
        try:
            await one.compile(lambda: regex_source("a"))
            (trial,) = (trial for trial in one._trials if trial._process is not None)
            has_begun, ask = threading.Event(), trial._write
            trial._write = lambda *line: (ask(*line), has_begun.set())  # type: ignore[assignment, func-returns-value]
            compiling = asyncio.ensure_future(one.compile(lambda: endless(0)))
            assert await asyncio.to_thread(has_begun.wait, 30)
            trial._process.kill()  # type: ignore[union-attr]
            with pytest.raises(ValueError, match="broke the compiler"):
                await compiling
            assert allowed(await one.compile(lambda: regex_source("b")))
            # The end does not wait for a compilation.
            compiling = asyncio.ensure_future(one.compile(lambda: endless(1)))
            while len(one._free_trials) == len(one._trials):
                await asyncio.sleep(0)
            one.close()
            with pytest.raises(ValueError):
                await compiling
            with pytest.raises((ValueError, RuntimeError)):
                await one.compile(lambda: regex_source("c"))
        finally:
            one.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    "make",
    [
        lambda: json_schema_source({"type": "nonsense"}),
        lambda: json_schema_source("{"),
        lambda: json_schema_source("3"),
        lambda: json_schema_source("[" * 50_000),
        lambda: json_schema_source('{"items":' * 200 + "{}" + "}" * 200),
        lambda: regex_source("(a"),
        lambda: regex_source("a" * 300_000),
        lambda: grammar_source("start: nothing"),
        lambda: grammar_source("root ::= ("),
        lambda: grammar_source(""),
    ],
)
def test_what_is_wrong_with_a_grammar_is_a_value_error(make: Any) -> None:
    with pytest.raises(ValueError):
        asyncio.run(compiler().compile(make))
