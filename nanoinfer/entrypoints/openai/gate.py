"""`Gate`: what every request passes before it reaches a route. Plain ASGI, so that streams are not buffered.

Decides by default against: only `/health` is open when there are keys, whatever the path looks like. Refuses calls by
a name that is not the server's (hosts.py) and new requests while the server shuts down, bounds the body while it is
read, counts requests in progress, and sets headers that keep browsers from doing what the page does not need.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import secrets
from collections.abc import Callable

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nanoinfer.entrypoints.openai.config import ServerConfig
from nanoinfer.entrypoints.openai.errors import APIError, error_body
from nanoinfer.entrypoints.openai.hosts import TrustedHosts

OPEN_PATH = "/health"
# Files of the page; a browser that asks for them gets to show its password dialog.
_PAGE = ("/", "/web/")
_HEADERS = [
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-frame-options", b"DENY"),
    (b"content-security-policy", b"default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"),
]


class Gate:
    """Any of the configuration's keys opens; where there are none, everybody may enter.

    close: ends what the application has begun beside its requests; called once it serves no more.
    """

    def __init__(self, app: ASGIApp, config: ServerConfig, close: Callable[[], None]) -> None:
        self._app = app
        self.close = close
        self._key_hashes = [hashlib.sha256(key.encode()).digest() for key in config.api_key]
        self._hosts = TrustedHosts.of(config)
        # Browsers that ask what they may send (CORS) do so without keys, and the application answers them.
        self._answers_preflights = bool(config.allowed_origins)
        self._max_body_size = config.max_body_size
        self.is_draining = False
        self.num_active = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":  # no route speaks websocket
            await send({"type": "websocket.close", "code": 1008})
            return
        headers = {name.lower(): value for name, value in scope["headers"]}
        refusal = self._refusal(scope["method"], scope["path"], headers)
        if refusal is not None:
            await _answer(send, refusal, self._challenge(scope["path"], headers) if refusal.status == 401 else [])
            return
        body = _BoundedBody(receive, self._max_body_size)

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                present = {name for name, _ in message["headers"]}
                message["headers"] = [*message["headers"], *(pair for pair in _HEADERS if pair[0] not in present)]
            await send(message)

        is_work = scope["path"] != OPEN_PATH
        self.num_active += is_work
        try:
            await self._app(scope, body, send_with_headers)
        finally:
            self.num_active -= is_work

    def _refusal(self, method: str, path: str, headers: dict[bytes, bytes]) -> APIError | None:
        is_preflight = method == "OPTIONS" and b"access-control-request-method" in headers and b"origin" in headers
        is_open = path == OPEN_PATH or (is_preflight and self._answers_preflights)
        if not self._hosts.trusts(headers.get(b"host")):
            return _unknown_host(headers[b"host"])
        if self.is_draining:
            return APIError(503, "the server is shutting down", code="shutting_down")
        if not is_open and self._key_hashes and not self._is_known(headers):
            return APIError(
                401, "no valid API key was given; send it as 'Authorization: Bearer KEY'", code="invalid_api_key"
            )
        length = headers.get(b"content-length")
        if length is not None and (not length.isdigit() or len(length) > 15 or int(length) > self._max_body_size):
            return _too_large(self._max_body_size)
        return None

    def _is_known(self, headers: dict[bytes, bytes]) -> bool:
        """Compares with all keys, in the same time whatever is given."""
        given = hashlib.sha256(_key_of(headers)).digest()
        matches = [secrets.compare_digest(given, known) for known in self._key_hashes]
        return any(matches)

    def _challenge(self, path: str, headers: dict[bytes, bytes]) -> list[tuple[bytes, bytes]]:
        is_page = path == _PAGE[0] or path.startswith(_PAGE[1])
        return [(b"www-authenticate", b'Basic realm="nanoinfer"' if is_page else b"Bearer")]


def _key_of(headers: dict[bytes, bytes]) -> bytes:
    scheme, _, value = headers.get(b"authorization", b"").partition(b" ")
    if scheme.lower() == b"bearer":
        return value.strip()
    if scheme.lower() == b"basic":
        try:
            return base64.b64decode(value.strip(), validate=True).partition(b":")[2]
        except binascii.Error:
            return b""
    return headers.get(b"x-api-key", b"")


def _unknown_host(name: bytes) -> APIError:
    shown = name[:200].decode("latin-1")
    return APIError(
        400,
        f"the Host header is {shown!r}, which is no name of this server; --allowed-hosts adds names, '*' all of them",
        code="invalid_host",
    )


def _too_large(limit: int) -> APIError:
    return APIError(413, f"the body is larger than {limit} bytes (--max-body-size)", code="body_too_large")


class _BoundedBody:
    """`receive` that raises when a body without a declared length turns out to be too long."""

    def __init__(self, receive: Receive, limit: int) -> None:
        self._receive = receive
        self._limit = limit
        self._size = 0

    async def __call__(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.request":
            self._size += len(message.get("body", b""))
            if self._size > self._limit:
                raise HTTPException(413, _too_large(self._limit).message)
        return message


async def _answer(send: Send, error: APIError, headers: list[tuple[bytes, bytes]]) -> None:
    body = json.dumps(error_body(error)).encode()
    extra = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *headers]
    if error.status == 503:
        extra.append((b"retry-after", b"1"))
    if error.status in (413, 503):  # the body is not read
        extra.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": error.status, "headers": extra})
    await send({"type": "http.response.body", "body": body})
