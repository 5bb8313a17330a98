"""A small HTTP client for streams, on asyncio's own sockets, because it shares the machine with what it measures."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit


class HTTPError(Exception):
    """The server's answer is not 200. body: what it said."""

    def __init__(self, status: int, body: str) -> None:
        super().__init__(f"status {status}: {body[:500]}")
        self.status, self.body = status, body


@dataclass
class Client:
    """base_url: such as http://127.0.0.1:8000. Opens a connection per request."""

    base_url: str
    api_key: str | None = None

    async def stream(self, path: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """The JSON objects of a stream's events, until [DONE]. Closing the iterator hangs up. Raises HTTPError."""
        url = urlsplit(self.base_url)
        reader, writer = await asyncio.open_connection(url.hostname, url.port)
        try:
            writer.write(self._request(path, json.dumps(body).encode()))
            status, headers = await _head(reader)
            if status != 200:
                raise HTTPError(status, (await _whole_body(reader, headers)).decode(errors="replace"))
            rest = b""
            async for chunk in _chunks(reader):
                *parts, rest = (rest + chunk).split(b"\n\n")
                for part in parts:
                    data = part.removeprefix(b"data: ")
                    if data == b"[DONE]":
                        return
                    yield json.loads(data)
        finally:
            writer.close()

    def _request(self, path: str, body: bytes) -> bytes:
        key = f"Authorization: Bearer {self.api_key}\r\n" if self.api_key else ""
        head = (
            f"POST {path} HTTP/1.1\r\nHost: {urlsplit(self.base_url).netloc}\r\nContent-Type: application/json\r\n"
            f"{key}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        return head.encode() + body


async def _head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    pairs = (line.split(":", 1) for line in lines[1:] if ":" in line)
    return int(lines[0].split()[1]), {name.strip().lower(): value.strip() for name, value in pairs}


async def _whole_body(reader: asyncio.StreamReader, headers: dict[str, str]) -> bytes:
    if "content-length" in headers:
        return await reader.readexactly(int(headers["content-length"]))
    return b"".join([chunk async for chunk in _chunks(reader)])


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Of a body with Transfer-Encoding: chunked."""
    while size := int((await reader.readline()).split(b";")[0] or b"0", 16):
        yield await reader.readexactly(size)
        await reader.readexactly(2)
