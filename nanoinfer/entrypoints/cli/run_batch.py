"""`nanoinfer run-batch [MODEL] -i IN -o OUT`: requests in OpenAI's batch format, through the server's own code.

Each line is {"custom_id", "method": "POST", "url": "/v1/chat/completions" or "/v1/completions", "body"}; each line of
the output has the same custom_id and the answer, in the order of the input. A bad line is an error of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanoinfer.config import EngineConfig
from nanoinfer.entrypoints.cli.flags import add_flags, add_model, given, model_of, new_parser
from nanoinfer.entrypoints.cli.serve import server_config
from nanoinfer.entrypoints.openai.config import ServerConfig

if TYPE_CHECKING:
    from nanoinfer.entrypoints.openai.serving import Serving

# Enough to keep an engine busy, few enough to keep a large file out of memory.
MAX_IN_FLIGHT = 512
_NOT_FLAGS = (
    "host", "port", "uds", "api_key", "allowed_hosts", "allowed_origins", "max_waiting", "max_body_size",
    "shutdown_timeout", "disable_log_stats", "disable_access_log",
)  # fmt: skip


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    parser = new_parser(subparsers, "run-batch", "Answer a file of requests in OpenAI's batch format")
    add_model(parser)
    parser.add_argument("-i", "--input-file", required=True, metavar="FILE", help="JSON lines with the requests")
    parser.add_argument(
        "-o", "--output-file", required=True, metavar="FILE", help="where the answers go, as JSON lines"
    )
    add_flags(parser, ServerConfig, "requests", exclude=_NOT_FLAGS)
    add_flags(parser, EngineConfig, "engine", exclude=["model"])
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    lines = [line for line in Path(args.input_file).read_text(encoding="utf-8").splitlines() if line.strip()]
    engine = given(args, EngineConfig)
    engine.pop("model", None)
    num_failed = asyncio.run(_run(lines, Path(args.output_file), model_of(args), engine, server_config(args)))
    print(f"{len(lines) - num_failed} of {len(lines)} requests answered, {num_failed} refused", file=sys.stderr)
    return 0


async def _run(lines: list[str], output: Path, model: str, engine: dict[str, Any], config: ServerConfig) -> int:
    from nanoinfer.async_llm import AsyncLLM
    from nanoinfer.entrypoints.openai.serving import Serving

    llm = AsyncLLM(model, **engine)
    try:
        num_failed = 0
        with contextlib.closing(Serving(llm, config)) as serving, output.open("w", encoding="utf-8") as file:
            async for answer in answers(serving, lines):
                num_failed += answer["response"]["status_code"] != 200
                file.write(json.dumps(answer, ensure_ascii=False) + "\n")
        return num_failed
    finally:
        await llm.shutdown()


async def answers(serving: Serving, lines: list[str]) -> AsyncIterator[dict[str, Any]]:
    """In the order of the lines, at most MAX_IN_FLIGHT at work."""
    from nanoinfer.entrypoints.openai.batch import answer

    waiting: list[asyncio.Task[dict[str, Any]]] = []
    try:
        for line in lines:
            waiting.append(asyncio.create_task(answer(serving, line)))
            if len(waiting) >= MAX_IN_FLIGHT:
                yield await waiting.pop(0)
        while waiting:
            yield await waiting.pop(0)
    finally:
        for task in waiting:
            task.cancel()
