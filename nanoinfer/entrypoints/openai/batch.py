"""One line of a batch file: OpenAI's batch format in, its answer out, without HTTP in between."""

from __future__ import annotations

import json
from typing import Any

from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from nanoinfer.entrypoints.openai.errors import APIError, as_api_error, error_body, user_errors
from nanoinfer.entrypoints.openai.protocol import ChatCompletionRequest, CompletionRequest
from nanoinfer.entrypoints.openai.serving import Serving, new_id
from nanoinfer.entrypoints.openai.serving_chat import ChatServing
from nanoinfer.entrypoints.openai.serving_completion import CompletionServing
from nanoinfer.executor.base import EngineDeadError

_ENDPOINTS: dict[str, tuple[type[ChatCompletionRequest] | type[CompletionRequest], Any]] = {
    "/v1/chat/completions": (ChatCompletionRequest, ChatServing),
    "/v1/completions": (CompletionRequest, CompletionServing),
}


async def answer(serving: Serving, line: str) -> dict[str, Any]:
    """Raises EngineDeadError, which concerns all lines; whatever else is wrong is in the answer."""
    custom_id = None
    try:
        item = _parse(line)
        custom_id = item.get("custom_id")
        status, body = 200, await _complete(serving, item)
    except EngineDeadError:
        raise
    except Exception as exception:
        error = as_api_error(exception)
        status, body = error.status, error_body(error)
    response = {"status_code": status, "request_id": new_id("req"), "body": body}
    return {"id": new_id("batch"), "custom_id": custom_id, "response": response, "error": None}


def _parse(line: str) -> dict[str, Any]:
    try:
        item = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise APIError(400, f"the line is not valid JSON: {error}") from error
    if not isinstance(item, dict) or not isinstance(item.get("custom_id"), str):
        raise APIError(400, "a line is an object with custom_id, method, url and body", "custom_id")
    return item


async def _complete(serving: Serving, item: dict[str, Any]) -> dict[str, Any]:
    if item.get("method") != "POST" or item.get("url") not in _ENDPOINTS:
        raise APIError(400, f"method must be POST and url one of {list(_ENDPOINTS)}", "url")
    model, endpoint = _ENDPOINTS[item["url"]]
    try:
        request = model.model_validate(item.get("body"))
    except ValidationError as error:
        errors = [{**detail, "loc": ("body", *detail["loc"])} for detail in error.errors()]
        raise RequestValidationError(errors) from error
    if request.stream:
        raise APIError(400, "a batch does not stream; leave stream out", "stream")
    worker = endpoint(serving)
    with user_errors():
        started = await worker.start(request)
    result: dict[str, Any] = await worker.complete(started)
    return result
