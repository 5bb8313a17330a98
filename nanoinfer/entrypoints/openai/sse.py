"""Server-sent events (https://html.spec.whatwg.org/multipage/server-sent-events.html), as OpenAI sends them."""

from __future__ import annotations

import json
from typing import Any

DONE = b"data: [DONE]\n\n"

_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def event(body: dict[str, Any]) -> bytes:
    return f"data: {_encode(body)}\n\n".encode()


class ChunkWriter:
    """Events that begin alike. head: the fields that all of them have; encoded once, for there is one per token."""

    def __init__(self, head: dict[str, Any]) -> None:
        self._head = _encode(head)[:-1]

    def write(self, rest: dict[str, Any]) -> bytes:
        """rest: the fields of this one, at least one."""
        return f"data: {self._head},{_encode(rest)[1:]}\n\n".encode()
