"""schemathesis against the server's own description: no bad body is accepted, none is a 500, and answers have the forms
that it declares.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    ignored_auth,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)
from server_kit import ScriptedLLM

from nanoinfer.entrypoints.openai.api_server import create_app
from nanoinfer.entrypoints.openai.config import ServerConfig

KEY = "the-key"
APP = create_app(ScriptedLLM(), ServerConfig(api_key=[KEY], served_model_name=["demo"]))  # type: ignore[arg-type]
HEADERS = {"Authorization": f"Bearer {KEY}"}
SCHEMA = schemathesis.openapi.from_asgi("/openapi.json", APP, headers=HEADERS)
CHECKS = [
    not_a_server_error, negative_data_rejection, status_code_conformance, content_type_conformance,
    response_schema_conformance, ignored_auth, unsupported_method,
]  # fmt: skip


def no_bad_body_is_accepted_and_none_is_a_500(operation: Any) -> Callable[..., None]:
    @SCHEMA.include(path=operation.path, method=operation.method.upper()).parametrize()
    @settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
    def test(case: schemathesis.Case) -> None:
        case.call_and_validate(headers=HEADERS, checks=CHECKS)

    return test


# A function for each operation: those of one function have the same id in pytest 9.2, and xdist would run one of them.
for result in SCHEMA.get_all_operations():
    globals()[f"test_{result.ok().label}"] = no_bad_body_is_accepted_and_none_is_a_500(result.ok())


def test_the_description_names_every_route() -> None:
    assert set(SCHEMA) >= {
        "/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/models/{model}", "/tokenize", "/detokenize",
        "/health", "/metrics", "/version",
    }  # fmt: skip
