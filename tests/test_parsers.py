"""The parsers of think blocks and tool calls: the same text, cut everywhere, gives the same result."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit import ROOT
from transformers import AutoTokenizer

from nanoinfer.entrypoints.parsers.reasoning import ReasoningParser, ThinkState, state_after_prompt
from nanoinfer.entrypoints.parsers.tool_calls import HermesToolParser, TextDelta, ToolCallArguments, ToolCallStart

START, REASONING, CONTENT = ThinkState.START, ThinkState.REASONING, ThinkState.CONTENT

# Text out of whose pieces every tag, half a tag, a tag in a string and broken JSON come together.
FRAGMENTS = [
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<", ">", "</", "\n", " ", "a", "é", '"', "\\", "{", "}", "[",
    "]", ":", ",", "1", "null", '{"name": "f", "arguments": ', '{"a": "b"}', '"name"', '"arguments"', "think",
    "tool_call",
    '<tool_call>\n{"name": "g", "arguments": {"x": [1, {"y": "</tool_call>"}]}}\n</tool_call>',
]  # fmt: skip
texts = st.lists(st.sampled_from(FRAGMENTS), max_size=14).map("".join)


def cut(text: str, places: list[int]) -> list[str]:
    bounds = sorted({min(place, len(text)) for place in places} | {0, len(text)})
    return [text[a:b] for a, b in itertools.pairwise(bounds)]


cuts = st.lists(st.integers(0, 120), max_size=8)


def split(pieces: list[str], state: ThinkState = START) -> tuple[str, str]:
    parser = ReasoningParser(state)
    parts = [*(parser.feed(piece) for piece in pieces), parser.finish()]
    return "".join(r for r, _ in parts), "".join(c for _, c in parts)


@pytest.mark.parametrize(
    ("state", "text", "expected"),
    [
        (START, "<think>\nI see.\n</think>\n\nYes.", ("I see.", "Yes.")),
        (START, "\n<think>I see.</think>Yes.", ("I see.", "Yes.")),
        (START, "Yes, <think> is a tag", ("", "Yes, <think> is a tag")),
        (START, "<think>\nnever closed", ("never closed", "")),
        (START, "<think>\ncut in its tag</thi", ("cut in its tag</thi", "")),
        (START, "<thin", ("", "<thin")),
        (START, "<think>\n\n</think>\n\nNo thought.", ("", "No thought.")),
        (REASONING, "opened by the prompt\n</think>\n\nYes.", ("opened by the prompt", "Yes.")),
        (REASONING, "cut off by", ("cut off by", "")),
        (CONTENT, "closed by the prompt, </think> is text", ("", "closed by the prompt, </think> is text")),
        (START, "<think>a\n\nb</think>c</think>\n", ("a\n\nb", "c</think>\n")),
        (START, "", ("", "")),
    ],
)
def test_reasoning_and_content(state: ThinkState, text: str, expected: tuple[str, str]) -> None:
    assert split([text], state) == expected
    assert split(list(text), state) == expected


@settings(max_examples=100, deadline=None)
@given(texts, cuts, st.sampled_from(list(ThinkState)))
def test_where_reasoning_is_cut_does_not_matter(text: str, places: list[int], state: ThinkState) -> None:
    whole = split([text], state)
    assert split(cut(text, places), state) == whole == split(list(text), state)
    assert sum(map(len, whole)) <= len(text)


@given(texts)
def test_content_of_a_prompt_that_closed_the_block_is_untouched(text: str) -> None:
    assert split(list(text), CONTENT) == ("", text)


def test_the_state_is_read_off_the_template_of_the_real_model() -> None:
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "nanoinfer" / "demo")

    def render(**options: Any) -> str:
        messages = [{"role": "user", "content": "hi <think>"}]
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **options)

    assert state_after_prompt(render()) is START
    assert state_after_prompt(render(enable_thinking=True)) is START
    assert state_after_prompt(render(enable_thinking=False)) is CONTENT
    assert state_after_prompt(render() + "<think>\n") is REASONING  # as the template of Thinking-2507 ends


# --- Tool calls --------------------------------------------------------------------------------------------------


def parse(pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    """(content, [(name, arguments)]), checked for the order that clients rely on."""
    parser = HermesToolParser()
    content: list[str] = []
    calls: list[list[str]] = []
    for event in [event for piece in pieces for event in parser.feed(piece)] + parser.finish():
        if isinstance(event, TextDelta):
            assert event.text
            content.append(event.text)
        elif isinstance(event, ToolCallStart):
            assert event.index == len(calls) and event.name
            calls.append([event.name, ""])
        else:
            assert isinstance(event, ToolCallArguments)
            assert event.index == len(calls) - 1 and event.text, "arguments of a call that has not begun"
            calls[-1][1] += event.text
    assert parser.num_calls == len(calls)
    return "".join(content), [(name, arguments) for name, arguments in calls]


F = '{"name": "f", "arguments": {"a": 1}}'


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (f"<tool_call>\n{F}\n</tool_call>", "", [("f", '{"a": 1}')]),
        (f"Let me see.\n<tool_call>\n{F}\n</tool_call>", "Let me see.", [("f", '{"a": 1}')]),
        (f"<tool_call>{F}</tool_call><tool_call>{F}</tool_call>", "", [("f", '{"a": 1}')] * 2),
        (f"<tool_call>\n{F}\n</tool_call>\n<tool_call>\n{F}\n</tool_call>\nDone.", "Done.", [("f", '{"a": 1}')] * 2),
        ('<tool_call>{"arguments": {"b": "}"}, "name": "f"}</tool_call>', "", [("f", '{"b": "}"}')]),
        ('<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
        ('<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [("f", "{}")]),
        ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("f", '{"a": 1}')]),
        (
            '<tool_call>{"name": "f", "arguments": {"s": "</tool_call><tool_call>\\""}}</tool_call>',
            "",
            [("f", '{"s": "</tool_call><tool_call>\\""}')],
        ),
        # Cut off by max_tokens: what there is of the arguments stays; before the name is sure, it is text.
        ('<tool_call>\n{"name": "f", "arguments": {"a": [1, ', "", [("f", '{"a": [1, ')]),
        (f"<tool_call>\n{F}\n</tool_c", "", [("f", '{"a": 1}')]),
        ('<tool_call>\n{"name": "f', '<tool_call>\n{"name": "f', []),
        # No calls.
        ("a < b, <tool, <tool_call", "a < b, <tool, <tool_call", []),
        ("<tool_call> is a tag", "<tool_call> is a tag", []),
        ('<tool_call>{"arguments": {}}</tool_call>', '<tool_call>{"arguments": {}}</tool_call>', []),
        (f"<tool_call><tool_call>\n{F}\n</tool_call>", "<tool_call>", [("f", '{"a": 1}')]),
        # The object is left unfinished: the next call is still found.
        (
            f'<tool_call>{{"name": "f", "arguments": {{"a": 1</tool_call>\n<tool_call>{F}</tool_call>',
            "",
            [("f", '{"a": 1'), ("f", '{"a": 1}')],
        ),
        ("  text with its spaces \n ", "  text with its spaces \n ", []),
    ],
)
def test_tool_calls(text: str, content: str, calls: list[tuple[str, str]]) -> None:
    assert parse([text]) == (content, calls)
    assert parse(list(text)) == (content, calls)


@settings(max_examples=250, deadline=None)
@given(texts, cuts)
def test_where_content_is_cut_does_not_matter(text: str, places: list[int]) -> None:
    whole = parse([text])
    assert parse(cut(text, places)) == whole == parse(list(text))


names = st.text(st.sampled_from("abz_09-"), min_size=1, max_size=8)
strings = st.lists(st.sampled_from([*FRAGMENTS, "\t", "\u2028", "😀"]), max_size=4).map("".join)
values = st.recursive(
    strings | st.integers() | st.booleans() | st.none() | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(strings, inner, max_size=3),
    max_leaves=8,
)
tool_calls = st.lists(st.tuples(names, st.dictionaries(strings, values, max_size=3)), min_size=1, max_size=3)


@settings(max_examples=100, deadline=None)
@given(tool_calls, st.sampled_from(["", "Let me look that up.", "a < b"]), cuts)
def test_calls_as_the_template_writes_them_come_back(
    calls: list[tuple[str, dict[str, Any]]], text: str, places: list[int]
) -> None:
    """The checkpoint's own template renders a conversation's calls; parsing gives them again, however it is cut."""
    message = {
        "role": "assistant",
        "content": text,
        "tool_calls": [{"function": {"name": name, "arguments": arguments}} for name, arguments in calls],
    }
    rendered = _TOKENIZER.apply_chat_template([{"role": "user", "content": "q"}, message], tokenize=False)
    answer = rendered.split("<|im_start|>assistant\n")[1].removeprefix("<think>\n\n</think>\n\n")
    content, found = parse(cut(answer.removesuffix("<|im_end|>\n"), places))
    assert content == text
    assert [(name, json.loads(arguments)) for name, arguments in found] == calls


_TOKENIZER = AutoTokenizer.from_pretrained(ROOT / "nanoinfer" / "demo")


def test_a_long_argument_and_nested_tags_take_linear_time() -> None:
    """Counted in characters that the scanner reads, not in seconds."""
    from nanoinfer.entrypoints.parsers import tool_calls as module

    count = 0
    feed = module._Call.feed

    def counting(self: Any, char: str) -> bool | None:
        nonlocal count
        count += 1
        return feed(self, char)

    for unit in ('<tool_call>{"', '<tool_call>{\\"', '<tool_call>{"a":"', "<tool_call>", '<tool_call>{"a":[{'):
        text = '<tool_call>{"' + unit * 2000 + '"<'
        count = 0
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module._Call, "feed", counting)
            parse([text])
        assert count <= 6 * len(text), unit
