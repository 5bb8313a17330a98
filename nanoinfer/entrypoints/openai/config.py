"""`ServerConfig`: options of the server, a frozen dataclass like the engine's; `nanoinfer serve` makes flags of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class ServerConfig:
    """Options of `nanoinfer serve` beside the engine's. Names follow vLLM.

    host: the address to listen at. The default can be reached from this machine alone.
    port: the port to listen at; 0 lets the system choose.
    uds: the path of a Unix socket to listen at instead.
    api_key: keys of which a request must bring one, as `Authorization: Bearer KEY` or `X-Api-Key: KEY` (a browser: as
        the password of its dialog). Guards everything but /health. None lets everybody in.
    allowed_hosts: names by which requests may call this server (their Host header), beside localhost and `host`;
        "*.example.com" is every name below, "*" is all. If none are given, a server without keys on this machine's own
        address takes no others, and any other server takes all.
    allowed_origins: origins of web pages that may call this server from a browser (CORS); "*" is all of them.
    served_model_name: names by which requests may call the model; the first is the one that answers give. None is the
        model as it was given.
    chat_template: a file with a Jinja template that replaces the checkpoint's.
    default_chat_template_kwargs: template options for requests that do not set them, such as
        {"enable_thinking": false}.
    allowed_chat_template_kwargs: template options, beside enable_thinking, that requests may set.
    parse_control_tokens: text of messages may contain control tokens such as <|im_end|>. Off, they are plain text.
    generation_config: "auto" takes the sampling defaults from the checkpoint's generation_config.json, "none" does not.
    reasoning_parser: "qwen3" splits reasoning off the content, "none" does not.
    tool_call_parser: "hermes" turns calls in the text into tool_calls, "none" does not.
    enable_auto_tool_choice: requests with tools and no tool_choice may call them.
    max_waiting: requests that may wait for their first step; more are answered with 429.
    max_body_size: bytes of a request's body.
    max_num_prompts: completions that one request may ask for: its prompts times n.
    grammar_timeout: seconds that a grammar or schema may take to compile.
    shutdown_timeout: seconds that requests in progress get to finish after SIGTERM, before they are aborted.
    disable_log_stats: no periodic log line.
    disable_access_log: no log line per request.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None
    api_key: Sequence[str] = ()
    allowed_hosts: Sequence[str] = ()
    allowed_origins: Sequence[str] = ()
    served_model_name: Sequence[str] = ()
    chat_template: str | None = None
    default_chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    allowed_chat_template_kwargs: Sequence[str] = ()
    parse_control_tokens: bool = False
    generation_config: str = "auto"
    reasoning_parser: str = "qwen3"
    tool_call_parser: str = "hermes"
    enable_auto_tool_choice: bool = True
    max_waiting: int = 1024
    max_body_size: int = 16 * 2**20
    max_num_prompts: int = 256
    grammar_timeout: float = 5.0
    shutdown_timeout: float = 0.0
    disable_log_stats: bool = False
    disable_access_log: bool = False

    def __post_init__(self) -> None:
        choices = {
            "generation_config": ("auto", "none"),
            "reasoning_parser": ("qwen3", "none"),
            "tool_call_parser": ("hermes", "none"),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} is {getattr(self, name)!r}; allowed are {' and '.join(map(repr, allowed))}")
        if not 0 <= self.port < 2**16:
            raise ValueError(f"port is {self.port}; it must be from 0 to 65535")
        for name in ("max_waiting", "max_body_size", "max_num_prompts"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.grammar_timeout <= 0 or self.shutdown_timeout < 0:
            raise ValueError("grammar_timeout must be above 0, and shutdown_timeout at least 0 seconds")
        for name in (
            "api_key",
            "allowed_hosts",
            "allowed_origins",
            "served_model_name",
            "allowed_chat_template_kwargs",
        ):
            value = getattr(self, name)
            if isinstance(value, str) or not all(isinstance(item, str) and item for item in value):
                raise ValueError(f"{name} must be a list of non-empty strings")
            object.__setattr__(self, name, tuple(value))
