"""Servers for tests: real ones in a thread, and an engine that says what it is told to, for what only the HTTP layer
decides.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import random
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
from pydantic import BaseModel
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from nanoinfer.async_llm import AsyncLLM
from nanoinfer.config import EngineConfig, ModelConfig
from nanoinfer.demo import demo_model_path
from nanoinfer.engine.detokenizer import Detokenizer, TokenTable
from nanoinfer.engine.stats import EngineStats
from nanoinfer.entrypoints.openai import responses
from nanoinfer.entrypoints.openai.api_server import create_app
from nanoinfer.entrypoints.openai.config import ServerConfig
from nanoinfer.entrypoints.openai.server import Server, address, bind
from nanoinfer.outputs import CompletionOutput, RequestOutput
from nanoinfer.sampling_params import RequestOutputKind, SamplingParams

DEMO = str(demo_model_path())
# Small, in this process, and the same on every machine.
ENGINE = {"distributed_executor_backend": "uni", "dtype": "float32", "seed": 0, "num_kvcache_blocks": 256}


@dataclass
class Running:
    url: str
    server: Server
    llm: Any
    loop: asyncio.AbstractEventLoop

    def client(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60, **options)

    def call(self, make: Callable[[], Any]) -> Any:
        """The result of a coroutine, run in the server's loop."""
        return asyncio.run_coroutine_threadsafe(make(), self.loop).result(60)


@contextlib.contextmanager
def running(llm: Any, **options: Any) -> Iterator[Running]:
    """A server on a free port, in a thread."""
    config = ServerConfig(port=0, **{"served_model_name": ["demo"], **options})
    sock = bind(config)
    loop = asyncio.new_event_loop()
    server = Server(llm, config, sock)
    thread = threading.Thread(target=lambda: loop.run_until_complete(server.run()), daemon=True)
    thread.start()
    one = Running(address(config, sock), server, llm, loop)
    try:
        with one.client() as client:  # the socket listens once uvicorn has started
            for _ in range(200):
                with contextlib.suppress(httpx.ConnectError):
                    client.get("/version")
                    break
        yield one
    finally:
        loop.call_soon_threadsafe(server.stop)
        thread.join(30)
        assert not thread.is_alive(), "the server does not end"
        loop.close()


def demo_llm(**options: Any) -> AsyncLLM:
    return AsyncLLM(DEMO, **{**ENGINE, **options})


def tiny_llm(directory: Path, **options: Any) -> AsyncLLM:
    return AsyncLLM(str(directory), **{**ENGINE, "kvcache_block_size": 8, **options})


def events(text: str) -> list[Any]:
    """The data of a stream's events; checks that it is nothing but events."""
    assert text.endswith("\n\n"), text
    found = []
    for part in text.removesuffix("\n\n").split("\n\n"):
        assert part.startswith("data: ") and "\n" not in part, part
        data = part.removeprefix("data: ")
        found.append(data if data == "[DONE]" else json.loads(data))
    return found


@functools.lru_cache(maxsize=1)
def demo_tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(DEMO)


class ScriptedLLM:
    """Answers with given texts, cut into deltas at random, or raises.

    script: text of the index-th completion of a prompt; an exception in a list of pieces is raised in its place.
    """

    def __init__(self, script: Callable[[str, int], str | list[str | Exception]] = lambda prompt, i: "Hello.") -> None:
        self.script = script
        self.config = EngineConfig(DEMO)
        self.model_config = ModelConfig.from_directory(demo_model_path())
        self.tokenizer = demo_tokenizer()
        self.table = TokenTable(self.tokenizer)
        self.eos_token_ids = frozenset([1000, 998])
        self.max_model_len = 1024
        self.stats_listeners: list[Any] = []
        self.errored = False
        self.error: Exception | None = None  # what `generate` raises
        self.requests: list[tuple[Any, SamplingParams, dict[str, Any]]] = []
        self.num_closed = 0
        self.pause = 0.0  # seconds before each delta
        self.random = random.Random(0)

    def get_default_sampling_params(self) -> SamplingParams:
        return SamplingParams(temperature=0.6, top_k=20, top_p=0.95)

    def stats(self) -> EngineStats:
        return EngineStats()

    async def check_health(self) -> None:
        if self.error is not None:
            raise self.error

    async def shutdown(self, timeout: float = 0) -> None:
        self.errored = True

    def generate(self, prompt: Any, params: SamplingParams, request_id: str | None = None, **options: Any) -> Any:
        if self.error is not None:
            raise self.error
        self.requests.append((prompt, params, options))
        return _Scripted(self, prompt, params)

    def outputs(self, index: int, text: str, params: SamplingParams) -> list[CompletionOutput]:
        """A text as deltas of a few tokens each, the last with the end of sequence."""
        ids = [*self.tokenizer(text, add_special_tokens=False)["input_ids"], 1000]
        reason = "stop"
        if len(ids) > params.max_tokens:
            ids, reason = ids[: params.max_tokens], "length"
        detokenizer = Detokenizer(self.table, skip_special_tokens=True)
        deltas = []
        while ids:
            count = self.random.randint(1, 4)
            part, ids = ids[:count], ids[count:]
            piece = "".join(map(detokenizer.feed, part)) + ("" if ids else detokenizer.flush())
            deltas.append(CompletionOutput(index, piece, part, finish_reason=None if ids else reason))
        return deltas


class _Scripted:
    def __init__(self, llm: ScriptedLLM, prompt: Any, params: SamplingParams) -> None:
        self._llm, self._prompt, self._params = llm, prompt, params
        self._outputs = self._make()
        self._is_closed = False

    def __aiter__(self) -> AsyncIterator[RequestOutput]:
        return self

    async def __anext__(self) -> RequestOutput:
        await asyncio.sleep(self._llm.pause)
        try:
            return next(self._outputs)
        except StopIteration:
            raise StopAsyncIteration from None

    async def aclose(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._llm.num_closed += 1

    def _wrap(self, outputs: list[CompletionOutput]) -> RequestOutput:
        finished = all(output.finish_reason for output in outputs)
        return RequestOutput("x", self._prompt["prompt"], self._prompt["prompt_token_ids"], outputs, finished)

    def _make(self) -> Iterator[RequestOutput]:
        llm, params = self._llm, self._params
        finals = []
        for index in range(params.n):
            script = llm.script(self._prompt["prompt"], index)
            pieces = [script] if isinstance(script, str) else script
            final = CompletionOutput(index)
            for piece in pieces:
                if isinstance(piece, Exception):
                    raise piece
                for delta in llm.outputs(index, piece, params):
                    if piece is not pieces[-1]:
                        delta = replace(delta, finish_reason=None)
                    final.text += delta.text
                    final.token_ids += delta.token_ids
                    final.finish_reason = delta.finish_reason
                    if params.output_kind is RequestOutputKind.DELTA:
                        yield self._wrap([delta])
            finals.append(final)
        if params.output_kind is RequestOutputKind.FINAL_ONLY:
            yield self._wrap(finals)


def asgi_client(llm: Any, **options: Any) -> httpx.AsyncClient:
    """A client of an application in this process, without a socket."""
    return client_of(create_app(llm, ServerConfig(**{"served_model_name": ["demo"], **options})))


FORMS: dict[str, tuple[type[BaseModel], type[BaseModel] | None]] = {
    "/v1/chat/completions": (responses.ChatCompletion, responses.ChatCompletionChunk),
    "/v1/completions": (responses.Completion, responses.CompletionChunk),
    "/v1/models": (responses.ModelList, None),
    "/tokenize": (responses.TokenizeResponse, None),
    "/detokenize": (responses.DetokenizeResponse, None),
    "/version": (responses.VersionResponse, None),
}


async def check_form(response: httpx.Response) -> None:
    """That an answer, and each event of a stream, has the form that the server's description declares."""
    kind = response.headers.get("content-type", "")
    whole, chunk = FORMS.get(response.request.url.path, (None, None))
    await response.aread()
    if response.request.method == "HEAD":
        return
    if kind == "application/json" and response.status_code != 200:
        responses.ErrorResponse.model_validate_json(response.content)
    elif kind == "application/json" and whole is not None:
        whole.model_validate_json(response.content)
    elif kind.startswith("text/event-stream"):
        assert chunk is not None
        for data in events(response.text):
            form = responses.ErrorResponse if "error" in data else chunk
            if data != "[DONE]":
                form.model_validate_json(json.dumps(data))


def client_of(app: Any) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://localhost", event_hooks={"response": [check_form]})
