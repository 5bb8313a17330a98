"""A small HTTP client for streams, on asyncio's own sockets, because it shares the machine with what it measures."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from time import perf_counter
from typing import Any
from urllib.parse import urlsplit

_DONE = b"[DONE]"
_PIECE = 1 << 16


class HTTPError(Exception):
    """The server's answer is not 200. body: what it said."""

    def __init__(self, status: int, body: str) -> None:
        super().__init__(f"status {status}: {body[:500]}")
        self.status, self.body = status, body


@dataclass
class Recording:
    """A stream as it came. pieces: seconds since the request began, and what the socket then had."""

    pieces: list[tuple[float, bytes]]

    def events(self) -> list[tuple[float, dict[str, Any]]]:
        """When each event's last byte came, and its JSON object; until [DONE]. Raises HTTPError."""
        parser = _Parser()
        found = [(seconds, data) for seconds, piece in self.pieces for data in parser.feed(piece)]
        parser.check_end()
        return [(seconds, json.loads(data)) for seconds, data in found if data != _DONE]


@dataclass
class Client:
    """base_url: such as http://127.0.0.1:8000. Opens a connection per request."""

    base_url: str
    api_key: str | None = None

    async def stream(self, path: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """The JSON objects of a stream's events, until [DONE]. Closing the iterator hangs up. Raises HTTPError."""
        reader, writer = await asyncio.open_connection(*self._address())
        parser = _Parser()
        try:
            writer.write(self._request(path, body))
            while piece := await reader.read(_PIECE):
                for data in parser.feed(piece):
                    if data == _DONE:
                        return
                    yield json.loads(data)
            parser.check_end()
        finally:
            writer.close()

    async def record(self, path: str, body: dict[str, Any]) -> Recording:
        """The whole stream, unread. For measuring: reading it takes time from a server on the same cores."""
        recorder = _Recorder(self._request(path, body))
        transport, _ = await asyncio.get_running_loop().create_connection(lambda: recorder, *self._address())
        try:
            await recorder.is_over
        finally:
            transport.close()
        return Recording(recorder.pieces)

    def _address(self) -> tuple[str, int]:
        url = urlsplit(self.base_url)
        return url.hostname or "localhost", url.port or 80

    def _request(self, path: str, body: dict[str, Any]) -> bytes:
        key = f"Authorization: Bearer {self.api_key}\r\n" if self.api_key else ""
        content = json.dumps(body).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nHost: {urlsplit(self.base_url).netloc}\r\nContent-Type: application/json\r\n"
            f"{key}Content-Length: {len(content)}\r\nConnection: close\r\n\r\n"
        )
        return head.encode() + content


class _Recorder(asyncio.BufferedProtocol):
    """Sends a request, and notes what comes until the other side closes. For the event loop that it was made in.

    With a buffer of its own, since asyncio else makes room for 256 KiB per piece and gives it back, page faults
    included: 12 us in place of 1.5.
    """

    # Shared, for what is in it is taken at once.
    _buffer = bytearray(_PIECE)

    def __init__(self, request: bytes) -> None:
        self._request = request
        self._start = perf_counter()
        self.pieces: list[tuple[float, bytes]] = []
        self.is_over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(self._request)

    def get_buffer(self, sizehint: int) -> bytearray:
        return self._buffer

    def buffer_updated(self, num_bytes: int) -> None:
        self.pieces.append((perf_counter() - self._start, bytes(self._buffer[:num_bytes])))

    def connection_lost(self, error: Exception | None) -> None:
        if self.is_over.done():
            return
        if error is not None:
            self.is_over.set_exception(error)
        else:
            self.is_over.set_result(None)


class _Parser:
    """Of an answer: a chunked body of server-sent events, or an error."""

    def __init__(self) -> None:
        self._status = 0
        self._is_chunked = self._is_whole = False
        self._raw = self._body = b""

    def feed(self, piece: bytes) -> list[bytes]:
        """The data of the events that are now whole."""
        self._raw += piece
        if not self._status:
            head, found, rest = self._raw.partition(b"\r\n\r\n")
            if not found:
                return []
            self._status = int(head.split(None, 2)[1])
            self._is_chunked = b"transfer-encoding: chunked" in head.lower()
            self._raw = rest
        self._unwrap()
        *events, self._body = self._body.split(b"\n\n")
        return [data.removeprefix(b"data: ") for data in events]

    def check_end(self) -> None:
        """When no more comes. Raises ConnectionError if that is too early, HTTPError."""
        if not self._status or (self._is_chunked and not self._is_whole):
            raise ConnectionError("the server closed the connection in the middle of its answer")
        if self._status != 200:
            raise HTTPError(self._status, self._body.decode(errors="replace"))

    def _unwrap(self) -> None:
        while self._is_chunked:
            line, found, rest = self._raw.partition(b"\r\n")
            size = int(line.split(b";")[0], 16) if found else 0
            if not found or len(rest) < size + 2:
                return
            self._is_whole |= size == 0
            self._body += rest[:size]
            self._raw = rest[size + 2 :]
        self._body += self._raw
        self._raw = b""
