"""`run_server`: the application on uvicorn, from the socket to the exit code.

The socket is bound before the model is loaded, so that a port in use is known at once. SIGTERM (or Ctrl-C) refuses new
requests, gives those in progress `shutdown_timeout` seconds, aborts the rest, ends the engine and its ranks, and
returns; a second one skips the waiting. An engine that dies ends the server with exit code 1, after its requests have
been answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import Iterator
from time import monotonic
from typing import Any

import uvicorn

from nanoinfer.async_llm import AsyncLLM
from nanoinfer.entrypoints.openai.api_server import create_app
from nanoinfer.entrypoints.openai.config import ServerConfig
from nanoinfer.entrypoints.openai.gate import Gate
from nanoinfer.entrypoints.openai.hosts import is_loopback
from nanoinfer.entrypoints.openai.metrics import LogLine

logger = logging.getLogger(__name__)

MAX_HEADER_BYTES = 64 * 1024
_BACKLOG = 2048
_LOG_SECONDS = 10.0
_POLL_SECONDS = 0.1
# What answers that are being written get when the engine is gone, and connections when the server is.
_LAST_WORDS_SECONDS = 2.0


def bind(config: ServerConfig) -> socket.socket:
    """Raises OSError, which names the address, if it cannot be had."""
    if config.uds is not None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(config.uds)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.bind(config.uds)
        os.chmod(config.uds, 0o600)
        return sock
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((config.host, config.port))
    except OSError as error:
        sock.close()
        raise OSError(f"cannot listen at {config.host} port {config.port}: {error.strerror} (--port)") from error
    return sock


def address(config: ServerConfig, sock: socket.socket) -> str:
    if config.uds is not None:
        return f"unix:{config.uds}"
    host = f"[{config.host}]" if ":" in config.host else config.host
    return f"http://{host}:{sock.getsockname()[1]}"


class _Uvicorn(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are ours."""
        yield


class Server:
    """exit_code: of the process, once `run` has returned."""

    def __init__(self, llm: AsyncLLM, config: ServerConfig, sock: socket.socket) -> None:
        self._llm, self._config, self._sock = llm, config, sock
        self.gate: Gate = create_app(llm, config)
        self.exit_code = 0
        self._uvicorn = _Uvicorn(
            uvicorn.Config(
                self.gate,
                http="h11",
                lifespan="off",
                log_config=None,
                access_log=not config.disable_access_log,
                server_header=False,
                h11_max_incomplete_event_size=MAX_HEADER_BYTES,
                timeout_graceful_shutdown=int(_LAST_WORDS_SECONDS),
            )
        )
        self._ending: asyncio.Task[None] | None = None
        self._is_hurried = False

    async def run(self) -> None:
        """Serves until `stop`, or until the engine dies."""
        helpers = [asyncio.create_task(self._watch_engine())]
        if not self._config.disable_log_stats:
            helpers.append(asyncio.create_task(self._log()))
        try:
            await self._uvicorn.serve(sockets=[self._sock])
        finally:
            for task in helpers:
                task.cancel()
            self.gate.close()
            await self._llm.shutdown()

    def stop(self) -> None:
        """What a signal does. Called again, it does not wait for requests any longer."""
        if self._ending is None:
            self.gate.is_draining = True
            self._ending = asyncio.get_running_loop().create_task(self._end())
        else:
            self._is_hurried = True

    async def _end(self) -> None:
        timeout = self._config.shutdown_timeout
        logger.info("Shutting down: %d requests get %g s to finish", self.gate.num_active, timeout)
        deadline = monotonic() + timeout
        while self.gate.num_active and monotonic() < deadline and not self._is_hurried:
            await asyncio.sleep(_POLL_SECONDS)
        if self.gate.num_active:
            logger.warning("Aborting %d requests", self.gate.num_active)
        await self._llm.shutdown()
        self.gate.close()
        await self._let_answers_out()
        self._uvicorn.should_exit = True

    async def _let_answers_out(self) -> None:
        deadline = monotonic() + _LAST_WORDS_SECONDS
        while self.gate.num_active and monotonic() < deadline:
            await asyncio.sleep(_POLL_SECONDS)

    async def _watch_engine(self) -> None:
        while not self._llm.errored:
            await asyncio.sleep(_POLL_SECONDS)
        if self._ending is None:
            logger.error("The engine is dead; the server ends")
            self.exit_code = 1
            await self._let_answers_out()
            self._uvicorn.should_exit = True

    async def _log(self) -> None:
        line = LogLine(self._llm.stats)
        while True:
            await asyncio.sleep(_LOG_SECONDS)
            if (text := line.write()) is not None:
                logger.info(text)


def run_server(model: str, engine_options: dict[str, Any], config: ServerConfig) -> int:
    """Serves until a signal or the engine's death; returns the exit code. Raises what loading the model raises."""
    sock = bind(config)
    try:
        llm = AsyncLLM(model, max_waiting=config.max_waiting, **engine_options)

        async def serve() -> int:
            server = Server(llm, config, sock)
            # Whoever reads the line below may connect or send a signal at once, although uvicorn has not started.
            for number in (signal.SIGTERM, signal.SIGINT):
                asyncio.get_running_loop().add_signal_handler(number, server.stop)
            sock.listen(_BACKLOG)
            where = address(config, sock)
            logger.info(
                "Serving %s at %s (the page), %s/v1 (OpenAI's API)",
                (config.served_model_name or (model,))[0],
                where,
                where,
            )
            if not is_loopback(config.host) and not config.api_key and config.uds is None:
                logger.warning("Other machines can reach this server, and it asks for no key (--api-key)")
            await server.run()
            return server.exit_code

        return asyncio.run(serve())
    finally:
        sock.close()
        if config.uds is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(config.uds)
