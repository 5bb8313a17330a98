"""One place where exceptions become OpenAI's error objects. Of a bug the client is told an id in the log."""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse

from nanoinfer.async_llm import QueueFullError, RequestFailedError
from nanoinfer.executor.base import EngineDeadError

logger = logging.getLogger(__name__)

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}
# Of a message, so that a value that is repeated in it cannot make it long.
_MAX_MESSAGE = 1000
_FIELD = re.compile(r"[a-z0-9_]+")


class APIError(Exception):
    """An answer other than 200. param: the field of the request that is wrong."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code


def as_api_error(error: BaseException) -> APIError:
    """Any exception as what the client is told of it."""
    if isinstance(error, APIError):
        return error
    if isinstance(error, RequestValidationError):
        return _validation_error(error)
    if isinstance(error, HTTPException):
        return APIError(error.status_code, str(error.detail))
    if isinstance(error, EngineDeadError):
        return APIError(503, "the engine is dead; the server is about to end", code="engine_dead")
    if isinstance(error, QueueFullError):
        return APIError(429, str(error), code="queue_full")
    if isinstance(error, RequestFailedError):
        return APIError(400, str(error), code="request_failed")
    error_id = secrets.token_hex(8)
    logger.error("internal error %s", error_id, exc_info=error)
    return APIError(500, f"internal error {error_id}; the server's log has its cause")


@contextmanager
def user_errors() -> Iterator[None]:
    """For the checks of a request, which raise ValueError on what is wrong with it."""
    try:
        yield
    except ValueError as error:
        raise APIError(400, str(error)) from error


def _validation_error(error: RequestValidationError) -> APIError:
    details = [detail for detail in error.errors() if isinstance(detail, dict)]
    # In a union each member complains; the deepest complaint is about the member that was meant.
    detail = max(details, key=lambda one: len(one["loc"]))
    # Pydantic names the members of unions in the path too, which is no business of clients.
    path = [str(part) for part in detail["loc"][1:] if _FIELD.fullmatch(str(part)) and part not in ("str", "list")]
    param = ".".join(path)
    if detail["type"] == "json_invalid":
        return APIError(400, f"the body is not valid JSON: {detail.get('ctx', {}).get('error', '')}")
    message = detail["msg"].removeprefix("Value error, ")
    if detail["type"] == "extra_forbidden":
        message = "this server does not know the field"
    return APIError(400, f"{param}: {message}" if param else message, param or None)


def error_body(error: APIError) -> dict[str, Any]:
    message = "".join(char if char.isprintable() else " " for char in error.message[:_MAX_MESSAGE])
    kind = _TYPES.get(error.status, "internal_error" if error.status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": error.param, "code": error.code}}


def error_response(error: BaseException) -> JSONResponse:
    api_error = as_api_error(error)
    headers = {"Retry-After": "1"} if api_error.status in (429, 503) else None
    return JSONResponse(error_body(api_error), api_error.status, headers)


async def handle_exception(request: Request, error: Exception) -> JSONResponse:
    response = error_response(error)
    if isinstance(error, HTTPException) and error.headers:
        response.headers.update(error.headers)
    return response
