"""What the endpoints share: the model, its names and defaults, requests to sampling parameters, watching clients."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from starlette.requests import Request

from nanoinfer.async_llm import AsyncLLM, QueueFullError, RequestStream
from nanoinfer.engine.detokenizer import TokenTable
from nanoinfer.entrypoints.chat_template import ChatTemplate, encode
from nanoinfer.entrypoints.openai.config import ServerConfig
from nanoinfer.entrypoints.openai.errors import APIError
from nanoinfer.entrypoints.openai.protocol import ChatCompletionRequest, ResponseFormat, SamplingOptions
from nanoinfer.entrypoints.structured_outputs import (
    GrammarCompiler,
    LLGuidanceGrammar,
    choice_source,
    grammar_source,
    json_object_source,
    json_schema_source,
    regex_source,
)
from nanoinfer.outputs import CompletionOutput, Logprob, RequestOutput
from nanoinfer.sampling_params import RequestOutputKind, SamplingParams

logger = logging.getLogger(__name__)
T = TypeVar("T")

# Those that a model's generation_config.json has a say in.
_MODEL_DEFAULTS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_PASSED_ON = (
    *_MODEL_DEFAULTS, "presence_penalty", "frequency_penalty", "seed", "n", "stop", "stop_token_ids",
    "include_stop_str_in_output", "ignore_eos", "min_tokens", "skip_special_tokens", "allowed_token_ids", "bad_words",
)  # fmt: skip


class ClientGoneError(Exception):
    """Nobody waits for the answer any more."""


class Serving:
    """The model as requests see it."""

    def __init__(self, llm: AsyncLLM, config: ServerConfig) -> None:
        self.llm = llm
        self.config = config
        self.model_names: Sequence[str] = config.served_model_name or (llm.config.model,)
        self.created = int(time.time())
        self.tokenizer = tokenizer = llm.tokenizer
        if tokenizer is None:
            raise ValueError(f"{llm.config.model} has no tokenizer, which serving needs")
        self.table = TokenTable(tokenizer)
        self.template = ChatTemplate(
            tokenizer,
            template=Path(config.chat_template).read_text(encoding="utf-8") if config.chat_template else None,
            default_options=config.default_chat_template_kwargs,
            allowed_options=config.allowed_chat_template_kwargs,
            parse_control_tokens=config.parse_control_tokens,
        )
        self.grammars = GrammarCompiler(
            tokenizer, llm.model_config.vocab_size, sorted(llm.eos_token_ids), config.grammar_timeout
        )
        # One thread: texts of any length, in the order that they came in, with the event loop free for streams.
        self._text_thread = ThreadPoolExecutor(1, thread_name_prefix="nanoinfer-text")
        self._num_texts = 0
        self.defaults = llm.get_default_sampling_params() if config.generation_config == "auto" else SamplingParams()
        shown = {name: getattr(self.defaults, name) for name in _MODEL_DEFAULTS}
        origin = "model" if config.generation_config == "auto" else "the server"
        logger.info("Using default sampling params from %s: %s", origin, shown)

    async def off_loop(self, work: Callable[[], T]) -> T:
        """The result of what takes longer the longer a request's texts are. Raises QueueFullError if too many wait."""
        if self._num_texts >= self.config.max_waiting:
            raise QueueFullError(
                f"{self._num_texts} texts wait to be tokenized, which is as many as may; try again later"
            )
        self._num_texts += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._text_thread, work)
        finally:
            self._num_texts -= 1

    def close(self) -> None:
        """Begins nothing more off the loop."""
        self._text_thread.shutdown(wait=False, cancel_futures=True)
        self.grammars.close()

    def check_model(self, name: str | None) -> str:
        if name is not None and name not in self.model_names:
            known = ", ".join(map(repr, self.model_names))
            raise APIError(
                404, f"the model {name[:200]!r} does not exist; served is {known}", "model", "model_not_found"
            )
        return name or self.model_names[0]

    def check_count(self, num_prompts: int, n: int) -> None:
        if num_prompts * n > self.config.max_num_prompts:
            raise APIError(
                400,
                f"{num_prompts} prompts times n = {n} are too many; at most {self.config.max_num_prompts} "
                "completions per request are allowed (--max-num-prompts)",
                "n" if num_prompts == 1 else "prompt",
            )

    def sampling_params(
        self,
        request: SamplingOptions,
        *,
        max_tokens: int | None,
        default_max_tokens: int | None,
        num_prompt_tokens: int,
        logprobs: int | None,
        prompt_logprobs: int | None = None,
    ) -> SamplingParams:
        """The request's, over the model's defaults. max_tokens None is the default's, or all that the context has left.

        Raises APIError if prompt and output do not fit the context, ValueError on a value that is not allowed.
        """
        room = self.llm.max_model_len - num_prompt_tokens
        if room < 1 or (max_tokens or 0) > room:
            wanted = f" and max_tokens is {max_tokens}" if room >= 1 else ""
            raise APIError(
                400,
                f"the context is {self.llm.max_model_len} tokens long; the prompt has {num_prompt_tokens}{wanted}",
                "max_tokens" if room >= 1 else "messages" if isinstance(request, ChatCompletionRequest) else "prompt",
                "context_length_exceeded",
            )
        values: dict[str, Any] = {name: getattr(self.defaults, name) for name in _MODEL_DEFAULTS}
        values |= {name: value for name in _PASSED_ON if (value := getattr(request, name)) is not None}
        if request.logit_bias:
            values["logit_bias"] = {int(token_id): bias for token_id, bias in request.logit_bias.items()}
        return SamplingParams(
            **values,
            max_tokens=max_tokens or min(room, default_max_tokens or room),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            output_kind=RequestOutputKind.DELTA if request.stream else RequestOutputKind.FINAL_ONLY,
        )

    async def grammar(
        self, request: SamplingOptions, response_format: ResponseFormat | None
    ) -> LLGuidanceGrammar | None:
        """What the request's `response_format` or `structured_outputs` ask for, compiled. Raises ValueError."""
        wanted = request.structured_outputs
        if response_format is not None and response_format.type == "json_object":
            return await self.grammars.compile(json_object_source)
        if response_format is not None and response_format.json_schema is not None:
            schema = response_format.json_schema.schema_
            assert schema is not None
            return await self.grammars.compile(lambda: json_schema_source(schema))
        if wanted is None:
            return None
        if (json_schema := wanted.json_schema) is not None:
            return await self.grammars.compile(lambda: json_schema_source(json_schema))
        if (regex := wanted.regex) is not None:
            return await self.grammars.compile(lambda: regex_source(regex))
        if (choice := wanted.choice) is not None:
            return await self.grammars.compile(lambda: choice_source(choice))
        if (grammar := wanted.grammar) is not None:
            return await self.grammars.compile(lambda: grammar_source(grammar))
        return await self.grammars.compile(json_object_source)

    def visible_logprobs(self, output: CompletionOutput, request: SamplingOptions) -> list[dict[int, Logprob]]:
        """Without those of the token that ended the text, unless it is shown.

        Tokens that a stop string cut from the text keep theirs, as in vLLM: they may hold text that stays.
        """
        logprobs = output.logprobs or []
        if output.finish_reason != "stop" or isinstance(output.stop_reason, str) or not output.token_ids:
            return logprobs
        last = output.token_ids[-1]
        is_ended_by_it = last == output.stop_reason or last in self.llm.eos_token_ids
        return logprobs[:-1] if is_ended_by_it and not request.include_stop_str_in_output else logprobs

    def tokenize(self, text: str) -> list[int]:
        """With control tokens: a prompt of completions is written by a program. Safe in any thread."""
        assert self.tokenizer is not None
        return encode(self.tokenizer.backend_tokenizer, text)

    def detokenize(self, token_ids: Sequence[int]) -> str:
        return b"".join(self.table.bytes_of(token_id) for token_id in token_ids).decode(errors="replace")


@dataclass
class Usage:
    """Tokens of a request, over all of its prompts and completions."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0

    def as_dict(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
        }


async def last_output(stream: RequestStream) -> RequestOutput:
    """Of a stream that tells only the end."""
    outputs = [output async for output in stream]
    return outputs[-1]


def new_id(prefix: str) -> str:
    return f"{prefix}-{uuid.uuid4().hex}"


def finite(logprob: float) -> float:
    """JSON has no infinity; this is what vLLM puts in its place."""
    return max(logprob, -9999.0)


async def unless_client_leaves(request: Request, work: Awaitable[T]) -> T:
    """The result of the work, which is cancelled when the client hangs up; ClientGoneError then."""

    async def client_left() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(client_left())
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        return task.result()
    finally:
        watcher.cancel()
        if not task.done():
            task.cancel()
