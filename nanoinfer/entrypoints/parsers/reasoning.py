"""`ReasoningParser`: generated text that comes in pieces, split into reasoning and content.

Qwen3 writes `<think>`, its reasoning, `</think>`, and then the answer. Where the block begins depends on the prompt: a
hybrid model opens it itself or leaves it out, a thinking-only model's template has opened it already, and with
`enable_thinking=false` the template has closed it. A block that never closes (cut off by max_tokens) is all reasoning.
The result does not depend on how the text is cut into pieces.
"""

from __future__ import annotations

from enum import Enum

THINK_START = "<think>"
THINK_END = "</think>"


class ThinkState(Enum):
    """Where the text stands: before anything was said, inside the block, after it (or without one)."""

    START = "start"
    REASONING = "reasoning"
    CONTENT = "content"


def state_after_prompt(prompt: str) -> ThinkState:
    """What a rendered prompt leaves to its answer: an open block, a closed one, or the choice."""
    tail = prompt.rstrip()
    if tail.endswith(THINK_START):
        return ThinkState.REASONING
    if tail.endswith(THINK_END):
        return ThinkState.CONTENT
    return ThinkState.START


def overlap(text: str, tag: str) -> int:
    """Length of the longest proper prefix of `tag` that ends `text`: what could still become the tag."""
    for length in range(min(len(tag) - 1, len(text)), 0, -1):
        if text.endswith(tag[:length]):
            return length
    return 0


class ReasoningParser:
    """Feed it pieces; it returns (reasoning, content) pairs whose parts concatenate to the whole.

    Line breaks around the reasoning and before the answer are layout, not text, and are left out.
    """

    def __init__(self, state: ThinkState = ThinkState.START) -> None:
        self.state = state
        # Whether there is a think block, also an empty one.
        self.has_block = state is ThinkState.REASONING
        # Text whose meaning the next piece decides: the start of a tag, or line breaks that may be layout.
        self._held = ""
        self._at_start_of_part = state is ThinkState.REASONING

    def feed(self, piece: str) -> tuple[str, str]:
        text, self._held = self._held + piece, ""
        reasoning = ""
        if self.state is ThinkState.START:
            text = self._start(text)
        if self.state is ThinkState.REASONING:
            reasoning, text = self._reasoning(text)
        if self.state is ThinkState.CONTENT:
            return reasoning, self._content(text)
        return reasoning, ""

    def finish(self) -> tuple[str, str]:
        """What was held back, when no more text comes."""
        text, self._held = self._held, ""
        if self.state is ThinkState.REASONING:
            return text.rstrip("\n"), ""
        return "", text

    def _start(self, text: str) -> str:
        body = text.lstrip()
        if body.startswith(THINK_START):
            self.state, self._at_start_of_part, self.has_block = ThinkState.REASONING, True, True
            return body[len(THINK_START) :]
        if THINK_START.startswith(body):  # also when nothing but white space has come
            self._held = text
        else:
            self.state = ThinkState.CONTENT
        return text

    def _reasoning(self, text: str) -> tuple[str, str]:
        """(reasoning, text after the block)."""
        if self._at_start_of_part:
            text = text.lstrip("\n")
            self._at_start_of_part = not text
        before, tag, after = text.partition(THINK_END)
        if tag:
            self.state, self._at_start_of_part = ThinkState.CONTENT, True
            return before.rstrip("\n"), after
        released = text[: len(text) - overlap(text, THINK_END)].rstrip("\n")
        self._held = text[len(released) :]
        return released, ""

    def _content(self, text: str) -> str:
        if self._at_start_of_part:
            text = text.lstrip("\n")
            self._at_start_of_part = not text
        return text
