"""What clients get, as pydantic models, for the server's own description (`/openapi.json`) and for tests.

Answers themselves are plain dicts, written once and straight to JSON; that they have these forms, with no field more,
is checked by the tests and not per token. A field with a default may be absent.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

FinishReason = Literal["stop", "length", "tool_calls", "abort", "error"]


class Answer(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class ErrorObject(Answer):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(Answer):
    error: ErrorObject


# --- Common to both kinds of completions -------------------------------------------------------------------------


class PromptTokensDetails(Answer):
    cached_tokens: int


class CompletionTokensDetails(Answer):
    reasoning_tokens: int


class Usage(Answer):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class Choice(Answer):
    """stop_reason (vLLM's): the stop string or token id, at the end. token_ids: with `return_token_ids`."""

    index: int
    finish_reason: FinishReason | None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


# --- /v1/chat/completions ----------------------------------------------------------------------------------------


class TokenLogprob(Answer):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprobs(TokenLogprob):
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(Answer):
    content: list[TokenLogprobs]


class Function(Answer):
    name: str
    arguments: str


class ToolCall(Answer):
    id: str
    type: Literal["function"]
    function: Function


class ChatMessage(Answer):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning: str | None = None
    tool_calls: list[ToolCall] | None = None


class ChatChoice(Choice):
    message: ChatMessage
    logprobs: ChatLogprobs | None


class ChatCompletion(Answer):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | None = None


class FunctionDelta(Answer):
    name: str | None = None
    arguments: str


class ToolCallDelta(Answer):
    """A call's first delta has its id, type and name; further ones have more of its arguments."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionDelta


class ChatDelta(Answer):
    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatChunkChoice(Choice):
    delta: ChatDelta
    logprobs: ChatLogprobs | None


class ChatCompletionChunk(Answer):
    """The data of one server-sent event; the last one is [DONE], or an ErrorResponse."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = None


# --- /v1/completions ---------------------------------------------------------------------------------------------


class CompletionLogprobs(Answer):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(Answer):
    logprob: float
    rank: int
    decoded_token: str | None


class CompletionChoice(Choice):
    text: str
    logprobs: CompletionLogprobs | None
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | None = None
    prompt_token_ids: list[int] | None = None


class Completion(Answer):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class CompletionChunk(Completion):
    """The data of one server-sent event; the last one is [DONE], or an ErrorResponse."""

    usage: Usage | None = None  # type: ignore[assignment]


# --- The others --------------------------------------------------------------------------------------------------


class ModelCard(Answer):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: int


class ModelList(Answer):
    object: Literal["list"]
    data: list[ModelCard]


class TokenizeResponse(Answer):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeResponse(Answer):
    prompt: str


class VersionResponse(Answer):
    version: str


def declared(model: type[Answer], chunk: type[Answer] | None = None) -> dict[int | str, dict[str, Any]]:
    """For a route's `responses`: the answer, and the events of its stream if it has one."""
    success: dict[str, Any] = {"model": model}
    if chunk is not None:
        text = f"Events whose data is {chunk.__name__}, with `stream`"
        success["content"] = {"text/event-stream": {"schema": {"type": "string", "description": text}}}
    return {200: success}


ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorResponse} for status in (400, 401, 404, 405, 413, 415, 422, 429, 500, 503)
}
