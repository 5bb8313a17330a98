"""`HermesToolParser`: content that comes in pieces, split into text and tool calls.

Qwen3 writes a call as `<tool_call>\\n{"name": "f", "arguments": {...}}\\n</tool_call>`, several in a row if need be.
The JSON object is followed character by character, so a tag inside an argument's string is part of the string, and
arguments are handed on while they are still being written. What looks like a call and turns out not to be one is text.
The result does not depend on how the content is cut into pieces.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from nanoinfer.entrypoints.parsers.reasoning import overlap

TOOL_CALL_START = "<tool_call>"
TOOL_CALL_END = "</tool_call>"


@dataclass(frozen=True)
class TextDelta:
    text: str


@dataclass(frozen=True)
class ToolCallStart:
    """The `index`-th call begins; its arguments follow."""

    index: int
    name: str


@dataclass(frozen=True)
class ToolCallArguments:
    """A further piece of a call's arguments, as the model wrote them (JSON)."""

    index: int
    text: str


ToolEvent = TextDelta | ToolCallStart | ToolCallArguments

_CLOSERS = {"{": "}", "[": "]"}
_WHITE_SPACE = " \t\r\n"
# What stands outside strings and brackets in JSON: numbers, true, false, null, separators.
_BARE = frozenset("0123456789+-.eEtrufalsn:,")


class _ObjectScanner:
    """Follows one JSON object and cuts out its members' raw texts. `key`: the member whose value is being read."""

    def __init__(self) -> None:
        self.members: dict[str, str] = {}
        self.key: str | None = None
        self.value: list[str] = []  # of `key`, so far, in characters
        self.is_complete = False
        self.is_broken = False
        self._key_text = ""
        self._stack: list[str] = []
        self._in_string = False
        self._is_escaped = False
        self._is_value_done = False

    def feed(self, char: str) -> None:
        if self._in_string:
            self._take(char)
            if self._is_escaped:
                self._is_escaped = False
            elif char == "\\":
                self._is_escaped = True
            elif char == '"':
                self._in_string = False
                self._is_value_done = len(self._stack) == 1
        elif char == '"':
            self._in_string = True
            self._take(char)
        elif char in _CLOSERS:
            if self._stack:
                self._take(char)
            self._stack.append(_CLOSERS[char])
        elif char in "}]":
            self._close(char)
        elif len(self._stack) == 1 and char in ":,":
            self._separator(char)
        elif char in _WHITE_SPACE or (char in _BARE and self.key is not None):
            self._take(char)
        else:
            self.is_broken = True

    def _take(self, char: str) -> None:
        if self.key is None:
            self._key_text += char
        elif not self._is_value_done and (self.value or char not in _WHITE_SPACE):
            self.value.append(char)
        elif self._is_value_done and char not in _WHITE_SPACE:
            self.is_broken = True

    def _close(self, char: str) -> None:
        if self._stack[-1] != char:
            self.is_broken = True
            return
        self._stack.pop()
        if self._stack:
            self._take(char)
            self._is_value_done = len(self._stack) == 1
        else:
            self._end_member()
            self.is_complete = not self.is_broken

    def _separator(self, char: str) -> None:
        if char == ",":
            self._end_member()
            return
        try:
            key = json.loads(self._key_text)
        except ValueError:
            key = None
        if self.key is not None or not isinstance(key, str) or key in self.members:
            self.is_broken = True
            return
        self.key, self.value, self._is_value_done = key, [], False

    def _end_member(self) -> None:
        if self.key is not None:
            self.members[self.key] = "".join(self.value).rstrip(_WHITE_SPACE)
        elif self._key_text.strip(_WHITE_SPACE):
            self.is_broken = True
        self.key, self._key_text, self.value, self._is_value_done = None, "", [], False


class _Call:
    """One block between the tags. `name` is set once the call is certain; then its arguments flow."""

    def __init__(self) -> None:
        self.raw: list[str] = []
        self.name: str | None = None
        self._scanner: _ObjectScanner | None = None
        self._num_sent = 0

    def feed(self, char: str) -> bool | None:
        """True: the object is complete. False: this is no call. None: it goes on."""
        self.raw.append(char)
        if self._scanner is None:
            if char == "{":
                self._scanner = _ObjectScanner()
                self._scanner.feed(char)
            elif char not in _WHITE_SPACE:
                return False
            return None
        self._scanner.feed(char)
        if self._scanner.is_broken:
            return False
        if self.name is None:
            self._look_for_name()
        if self._scanner.is_complete:
            return self.name is not None
        return None

    def _look_for_name(self) -> None:
        """A call starts when its arguments do, or at its end."""
        scanner = self._scanner
        assert scanner is not None
        if "name" in scanner.members and (scanner.is_complete or (scanner.key == "arguments" and scanner.value)):
            try:
                name = json.loads(scanner.members["name"])
            except ValueError:
                return
            self.name = name if isinstance(name, str) and name else None

    def new_arguments(self) -> str:
        """What has come of them since the last call. Only an object flows; other values are given at their end."""
        scanner = self._scanner
        if scanner is None or self.name is None:
            return ""
        if "arguments" in scanner.members or scanner.is_complete:
            delta = _as_arguments(scanner.members.get("arguments"))[self._num_sent :]
        elif scanner.key == "arguments" and scanner.value[0] == "{":
            delta = "".join(scanner.value[self._num_sent :])
        else:
            return ""
        self._num_sent += len(delta)
        return delta


def _as_arguments(raw: str | None) -> str:
    """Arguments written as a string hold JSON themselves; missing ones and null are an empty object."""
    if raw in (None, "", "null"):
        return "{}"
    assert raw is not None
    if raw.startswith('"'):
        try:
            return str(json.loads(raw, strict=False))
        except ValueError:
            return raw
    return raw


class HermesToolParser:
    """Feed it pieces of content; it returns events whose texts concatenate to the whole.

    White space around a call is layout, not text, and is left out.
    """

    def __init__(self) -> None:
        self.num_calls = 0
        self._held = ""
        self._call: _Call | None = None
        self._after_call = False

    def feed(self, piece: str) -> list[ToolEvent]:
        events: list[ToolEvent] = []
        text, self._held = self._held + piece, ""
        while text:
            text = self._text(text, events) if self._call is None else self._in_call(self._call, text, events)
        return _merged(events)

    def finish(self) -> list[ToolEvent]:
        """What was held back, when no more text comes. A call that was cut off keeps the arguments that it has."""
        text, self._held = self._held, ""
        if self._call is not None:
            if self._call.name is None:
                text = TOOL_CALL_START + "".join(self._call.raw)
            self._call = None
        elif self._after_call and TOOL_CALL_END.startswith(text.strip(_WHITE_SPACE)):
            text = ""
        return [TextDelta(text)] if text else []

    def _text(self, text: str, events: list[ToolEvent]) -> str:
        """Takes text up to the next call's tag; returns the rest. Holds back what may be part of a tag, or layout."""
        if self._after_call:
            text = text.lstrip(_WHITE_SPACE)
            while text.startswith(TOOL_CALL_END):
                text = text[len(TOOL_CALL_END) :].lstrip(_WHITE_SPACE)
            if TOOL_CALL_END.startswith(text):
                self._held = text
                return ""
        before, tag, after = text.partition(TOOL_CALL_START)
        if tag:
            if before.strip(_WHITE_SPACE):
                events.append(TextDelta(before.rstrip(_WHITE_SPACE)))
            self._call = _Call()
            return after
        released = text[: len(text) - overlap(text, TOOL_CALL_START)].rstrip(_WHITE_SPACE)
        self._held = text[len(released) :]
        if released:
            self._after_call = False
            events.append(TextDelta(released))
        return ""

    def _in_call(self, call: _Call, text: str, events: list[ToolEvent]) -> str:
        was_certain = call.name is not None
        outcome = None
        i = -1
        for i, char in enumerate(text):  # noqa: B007
            outcome = call.feed(char)
            if outcome is not None:
                break
        if call.name is not None:
            if not was_certain:
                events.append(ToolCallStart(self.num_calls, call.name))
                self.num_calls += 1
            if arguments := call.new_arguments():
                events.append(ToolCallArguments(self.num_calls - 1, arguments))
        if outcome is None:
            return ""
        self._call = None
        if call.name is None:
            return self._not_a_call(call, text[i + 1 :], events)
        self._after_call = True
        return text[i + 1 :] if outcome else text[i:]

    def _not_a_call(self, call: _Call, rest: str, events: list[ToolEvent]) -> str:
        """The tag was text. What followed it is read again, since another call may begin within it."""
        self._after_call = False
        events.append(TextDelta(TOOL_CALL_START))
        return "".join(call.raw) + rest


def _merged(events: list[ToolEvent]) -> list[ToolEvent]:
    """Neighbours of one kind as one."""
    merged: list[ToolEvent] = []
    for event in events:
        last = merged[-1] if merged else None
        if isinstance(event, TextDelta) and isinstance(last, TextDelta):
            merged[-1] = TextDelta(last.text + event.text)
        elif isinstance(event, ToolCallArguments) and isinstance(last, ToolCallArguments) and last.index == event.index:
            merged[-1] = ToolCallArguments(event.index, last.text + event.text)
        else:
            merged.append(event)
    return merged
