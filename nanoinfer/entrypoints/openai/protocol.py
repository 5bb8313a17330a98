"""What clients may send: OpenAI's requests with vLLM's additions, as pydantic models.

Strict: a value of another type is an error and not converted, an unknown field is an error and not ignored, and sizes
are bounded here, before anything is done with them. Fields of OpenAI's that only concern its own service are accepted
and have no effect; those that ask for what this server cannot do are refused.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator

MAX_N = 128
MAX_STOPS = 64
MAX_STOP_LENGTH = 1024
MAX_TOKEN_ID_LIST = 4096
MAX_BAD_WORDS = 256
MAX_MESSAGES = 8192
MAX_TOOLS = 128
MAX_LOGPROBS = 20
MAX_DEPTH = 64
INT64 = 2**63

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
JsonObject = Annotated[dict[str, Any], AfterValidator(lambda value: _shallow(value))]
FunctionName = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[a-zA-Z0-9_.\-]+$")]


def check_depth(value: Any, what: str) -> None:
    """Raises ValueError on nested values that would be too deep for what recurses over them."""
    stack = [(value, 0)]
    while stack:
        item, depth = stack.pop()
        if depth > MAX_DEPTH:
            raise ValueError(f"{what} is nested more than {MAX_DEPTH} levels deep")
        if isinstance(item, dict):
            stack += [(inner, depth + 1) for inner in item.values()]
        elif isinstance(item, list):
            stack += [(inner, depth + 1) for inner in item]


def _shallow(value: Any) -> Any:
    check_depth(value, "the value")
    return value


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, populate_by_name=True)


class RequestBody(Body):
    """A whole body."""

    @model_validator(mode="before")
    @classmethod
    def _is_text(cls, value: Any) -> Any:
        """JSON can spell half of a surrogate pair, anywhere, and nothing can tokenize that, log it or send it back."""
        if not isinstance(value, dict):  # bytes, of another content type; refused after this
            return value
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ValueError("the body has half of a surrogate pair (\\ud800 to \\udfff), which is no text") from None
        except RecursionError:
            raise ValueError("the body is nested too deep") from None
        return value


def example(**fields: Any) -> ConfigDict:
    """For a model's `model_config`: a request to show in the server's description, which is also a test case."""
    return ConfigDict(json_schema_extra={"examples": [fields]})


class StreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class StructuredOutputs(Body):
    """vLLM's `structured_outputs`: exactly one of these."""

    json_schema: JsonObject | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[Annotated[str, Field(min_length=1)]] | None = Field(None, min_length=1, max_length=1024)
    grammar: str | None = None
    json_object: bool | None = None

    @model_validator(mode="after")
    def _exactly_one(self) -> StructuredOutputs:
        given = [name for name in type(self).model_fields if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            raise ValueError(
                f"structured_outputs gives {given}; it needs one of json, regex, choice, grammar, json_object"
            )
        return self


class SamplingOptions(RequestBody):
    """What completions and chat completions have in common."""

    model: str | None = Field(None, max_length=512)
    # OpenAI's.
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    seed: int | None = Field(None, ge=-INT64, lt=INT64)
    n: int | None = Field(None, ge=1, le=MAX_N)
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOPS)] | None = None
    logit_bias: dict[Annotated[str, Field(pattern=r"^[0-9]{1,9}$")], float] | None = Field(
        None, max_length=MAX_TOKEN_ID_LIST
    )
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    # vLLM's.
    top_k: int | None = Field(None, ge=-1, lt=2**31)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0, le=1e6)
    stop_token_ids: list[TokenId] | None = Field(None, max_length=MAX_TOKEN_ID_LIST)
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = Field(None, ge=0, lt=2**31)
    skip_special_tokens: bool | None = None
    allowed_token_ids: list[TokenId] | None = Field(None, min_length=1, max_length=2**18)
    bad_words: list[StopString] | None = Field(None, max_length=MAX_BAD_WORDS)
    cache_salt: str | None = Field(None, min_length=1, max_length=1024)
    return_token_ids: bool | None = None
    structured_outputs: StructuredOutputs | None = None

    @field_validator("logit_bias")
    @classmethod
    def _bias_in_range(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        for token_id, bias in (value or {}).items():
            if not -100 <= bias <= 100:
                raise ValueError(f"the bias of {token_id} is {bias}; allowed are -100 to 100")
        return value

    @model_validator(mode="after")
    def _stream_options_need_stream(self) -> SamplingOptions:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is given without stream=true")
        return self


class JsonSchemaFormat(Body):
    name: str = Field(max_length=256)
    description: str | None = None
    schema_: JsonObject | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="after")
    def _schema_belongs_to_its_type(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("response_format of type json_schema needs 'json_schema', and only that type takes it")
        if self.json_schema is not None and self.json_schema.schema_ is None:
            raise ValueError("response_format.json_schema needs 'schema'")
        return self


class CompletionRequest(SamplingOptions):
    """`/v1/completions`. prompt: a text, token ids, or several of either."""

    model_config = example(prompt="The capital of France is", max_tokens=16, logprobs=1, echo=True)
    prompt: str | list[str] | list[TokenId] | list[list[TokenId]]
    max_tokens: int | None = Field(None, ge=0, lt=2**31)
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    response_format: ResponseFormat | None = None
    best_of: int | None = Field(None, ge=1, le=MAX_N)
    suffix: None = None

    @model_validator(mode="after")
    def _together(self) -> CompletionRequest:
        if not self.prompt:
            raise ValueError("prompt is an empty list; give at least one prompt")
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise ValueError(f"best_of is {self.best_of} and n is {self.n or 1}; only equal values are supported")
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens is 0; at least 1 is needed unless echo is true")
        if self.stream and self.prompt_logprobs is not None:
            raise ValueError("prompt_logprobs cannot be streamed; leave stream out")
        if self.structured_outputs and self.response_format and self.response_format.type != "text":
            raise ValueError("response_format and structured_outputs both constrain the output; give one of them")
        return self


class TextPart(Body):
    type: Literal["text"]
    text: str


class FunctionCall(Body):
    name: FunctionName
    arguments: str


class ToolCall(Body):
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None


class Message(Body):
    """One turn. What an assistant's message of a response carries may be sent back as it came."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = Field(None, max_length=MAX_TOOLS)
    tool_call_id: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: None = None
    function_call: None = None

    @model_validator(mode="after")
    def _fields_of_the_role(self) -> Message:
        if self.role != "assistant":
            for name in ("reasoning", "reasoning_content", "tool_calls"):
                if getattr(self, name) is not None:
                    raise ValueError(f"a message of role {self.role} has no {name}")
            if self.content is None:
                raise ValueError(f"a message of role {self.role} needs content")
        elif self.content is None and not self.tool_calls and self.reasoning is None and self.reasoning_content is None:
            raise ValueError("a message of role assistant needs content or tool_calls")
        return self

    @property
    def text(self) -> str:
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""


class FunctionDefinition(Body):
    name: FunctionName
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"]
    function: FunctionDefinition


class NamedFunction(Body):
    name: FunctionName


class NamedToolChoice(Body):
    type: Literal["function"]
    function: NamedFunction


class ChatCompletionRequest(SamplingOptions):
    """`/v1/chat/completions`."""

    model_config = example(messages=[{"role": "user", "content": "What is 3 + 4?"}], logprobs=True, top_logprobs=2)
    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_tokens: int | None = Field(None, ge=1, lt=2**31)
    max_completion_tokens: int | None = Field(None, ge=1, lt=2**31)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    response_format: ResponseFormat | None = None
    tools: list[Tool] | None = Field(None, min_length=1, max_length=MAX_TOOLS)
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    # vLLM's.
    chat_template_kwargs: JsonObject | None = None
    include_reasoning: bool | None = None
    # OpenAI's, for its own service: accepted, without effect.
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    modalities: list[Literal["text"]] | None = None

    @model_validator(mode="after")
    def _together(self) -> ChatCompletionRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs is given without logprobs=true")
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            raise ValueError("max_tokens and max_completion_tokens are two names of one limit; give one of them")
        self._check_tools()
        constraints = {
            "response_format": self.response_format is not None and self.response_format.type != "text",
            "structured_outputs": self.structured_outputs is not None,
            "tool_choice": self.forced_tools is not None,
        }
        given = [name for name, is_given in constraints.items() if is_given]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} both constrain the output; give one of them")
        return self

    def _check_tools(self) -> None:
        names = [tool.function.name for tool in self.tools or ()]
        if len(set(names)) != len(names):
            raise ValueError(f"tools defines the functions {names}; their names must differ")
        if self.tool_choice not in (None, "none") and not names:
            raise ValueError("tool_choice is given without tools")
        if isinstance(self.tool_choice, NamedToolChoice) and self.tool_choice.function.name not in names:
            raise ValueError(f"tool_choice names {self.tool_choice.function.name!r}; tools has {names}")

    @property
    def offered_tools(self) -> list[Tool] | None:
        """Those that the model may call; none of them if tool_choice says so."""
        return None if self.tool_choice == "none" else self.tools

    @property
    def forced_tools(self) -> list[Tool] | None:
        """Those of which it must call one; None where it may."""
        if self.tool_choice == "required":
            return self.tools
        if isinstance(self.tool_choice, NamedToolChoice):
            name = self.tool_choice.function.name
            return [tool for tool in self.tools or () if tool.function.name == name]
        return None


class TokenizeRequest(RequestBody):
    """vLLM's `/tokenize`: a text, or a conversation through the chat template."""

    model_config = example(prompt="The capital of France is", return_token_strs=True)
    model: str | None = Field(None, max_length=512)
    prompt: str | None = None
    messages: list[Message] | None = Field(None, min_length=1, max_length=MAX_MESSAGES)
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None
    tools: list[Tool] | None = Field(None, min_length=1, max_length=MAX_TOOLS)
    chat_template_kwargs: JsonObject | None = None

    @model_validator(mode="after")
    def _one_of_both(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        return self


class DetokenizeRequest(RequestBody):
    model_config = example(tokens=[40, 2, 40])
    model: str | None = Field(None, max_length=512)
    tokens: list[TokenId] = Field(max_length=2**20)
