"""`create_app`: the routes. What a route does is in the serving modules; what stands before all of them is the gate."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from importlib.resources import files
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse

from nanoinfer.async_llm import AsyncLLM, QueueFullError, RequestFailedError
from nanoinfer.entrypoints.openai import responses
from nanoinfer.entrypoints.openai.config import ServerConfig
from nanoinfer.entrypoints.openai.errors import APIError, handle_exception, user_errors
from nanoinfer.entrypoints.openai.gate import Gate
from nanoinfer.entrypoints.openai.metrics import Metrics
from nanoinfer.entrypoints.openai.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from nanoinfer.entrypoints.openai.serving import ClientGoneError, Serving, unless_client_leaves
from nanoinfer.entrypoints.openai.serving_chat import ChatServing, template_messages, template_tools
from nanoinfer.entrypoints.openai.serving_completion import CompletionServing
from nanoinfer.executor.base import EngineDeadError
from nanoinfer.version import __version__

_CONTENT_TYPES = {"html": "text/html", "js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
_NO_CACHE = {"Cache-Control": "no-cache"}


def create_app(llm: AsyncLLM, config: ServerConfig) -> Gate:
    """The server as an ASGI application."""
    serving = Serving(llm, config)
    app = FastAPI(
        title="nanoinfer", version=__version__, docs_url=None, redoc_url=None, responses=responses.ERRORS, lifespan=None
    )
    handled = (
        APIError, RequestValidationError, HTTPException, EngineDeadError, QueueFullError, RequestFailedError, Exception,
    )  # fmt: skip
    for kind in handled:
        app.add_exception_handler(kind, handle_exception)
    app.add_exception_handler(ClientGoneError, _nobody_listens)
    if config.allowed_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=list(config.allowed_origins), allow_methods=["*"], allow_headers=["*"]
        )
    _add_generation(app, serving)
    _add_tokenizer(app, serving)
    _add_information(app, serving)
    _add_page(app)
    return Gate(app, config, serving.close)


async def _nobody_listens(request: Request, error: Exception) -> Response:
    return Response(status_code=499)


async def _respond(
    request: Request,
    is_stream: bool | None,
    start: Callable[[], Awaitable[Any]],
    complete: Callable[[Any], Awaitable[dict[str, Any]]],
    stream: Callable[[Any], AsyncIterator[bytes]],
) -> Response:
    """The answer of either generating endpoint; a request whose client leaves is aborted."""

    async def start_checked() -> Any:
        with user_errors():
            return await start()

    if is_stream:
        started = await unless_client_leaves(request, start_checked())
        return StreamingResponse(stream(started), media_type="text/event-stream", headers=_NO_CACHE)

    async def work() -> dict[str, Any]:
        return await complete(await start_checked())

    return JSONResponse(await unless_client_leaves(request, work()))


def _add_generation(app: FastAPI, serving: Serving) -> None:
    chat, completion = ChatServing(serving), CompletionServing(serving)

    @app.post(
        "/v1/chat/completions", responses=responses.declared(responses.ChatCompletion, responses.ChatCompletionChunk)
    )
    async def chat_completions(body: ChatCompletionRequest, request: Request) -> Response:
        return await _respond(request, body.stream, lambda: chat.start(body), chat.complete, chat.stream)

    @app.post("/v1/completions", responses=responses.declared(responses.Completion, responses.CompletionChunk))
    async def completions(body: CompletionRequest, request: Request) -> Response:
        start = completion.start
        return await _respond(request, body.stream, lambda: start(body), completion.complete, completion.stream)


def _tokenize(serving: Serving, body: TokenizeRequest) -> tuple[list[int], list[str] | None]:
    """The ids, and their texts if those are wanted."""
    if body.messages is not None:
        tools, generates = template_tools(body.tools), body.add_generation_prompt is not False
        messages = template_messages(body.messages)
        ids = serving.template.render(messages, tools, body.chat_template_kwargs, generates).token_ids
    else:
        ids = serving.tokenize(body.prompt or "")
    return ids, [serving.table.text_of(i) for i in ids] if body.return_token_strs else None


def _add_tokenizer(app: FastAPI, serving: Serving) -> None:
    @app.post("/tokenize", responses=responses.declared(responses.TokenizeResponse))
    async def tokenize(body: TokenizeRequest) -> Response:
        serving.check_model(body.model)
        with user_errors():
            ids, texts = await serving.off_loop(lambda: _tokenize(serving, body))
        length = serving.llm.max_model_len
        return JSONResponse({"count": len(ids), "max_model_len": length, "tokens": ids, "token_strs": texts})

    @app.post("/detokenize", responses=responses.declared(responses.DetokenizeResponse))
    async def detokenize(body: DetokenizeRequest) -> Response:
        serving.check_model(body.model)
        vocab_size = serving.llm.model_config.vocab_size
        if wrong := [i for i in body.tokens if i >= vocab_size]:
            raise APIError(400, f"tokens contains {wrong[0]}; the vocabulary is 0 to {vocab_size - 1}", "tokens")
        return JSONResponse({"prompt": await serving.off_loop(lambda: serving.detokenize(body.tokens))})


def _add_information(app: FastAPI, serving: Serving) -> None:
    metrics = Metrics(serving.llm, serving.model_names[0])

    def card(name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": serving.created,
            "owned_by": "nanoinfer",
            "root": serving.llm.config.model,
            "parent": None,
            "max_model_len": serving.llm.max_model_len,
        }

    @app.get("/v1/models", responses=responses.declared(responses.ModelList))
    async def list_models() -> Response:
        return JSONResponse({"object": "list", "data": [card(name) for name in serving.model_names]})

    @app.get("/v1/models/{model:path}", responses=responses.declared(responses.ModelCard))
    async def retrieve_model(model: str) -> Response:
        return JSONResponse(card(serving.check_model(model)))

    @app.get("/health", response_class=Response)
    async def health(request: Request) -> Response:
        await unless_client_leaves(request, serving.llm.check_health())
        return Response()

    @app.get("/metrics", response_class=PlainTextResponse)
    async def show_metrics() -> Response:
        return PlainTextResponse(metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/version", responses=responses.declared(responses.VersionResponse))
    async def version() -> Response:
        return JSONResponse({"version": __version__})


def _add_page(app: FastAPI) -> None:
    """The web page: files of the package, read once, so that no path of a request reaches the file system."""
    page = {item.name: item.read_bytes() for item in files("nanoinfer.entrypoints").joinpath("web").iterdir()}

    def respond(name: str) -> Response:
        extension = name.rpartition(".")[2]
        if name not in page or extension not in _CONTENT_TYPES:
            raise HTTPException(404, "there is no such file")
        return Response(page[name], media_type=_CONTENT_TYPES[extension], headers=_NO_CACHE)

    @app.get("/", include_in_schema=False)
    async def index() -> Response:
        return respond("index.html")

    @app.get("/web/{name}", include_in_schema=False)
    async def web_file(name: str) -> Response:
        return respond(name)
