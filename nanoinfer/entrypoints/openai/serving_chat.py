"""`/v1/chat/completions`: a conversation to the engine, and its text back as reasoning, content and tool calls."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from nanoinfer.async_llm import RequestStream
from nanoinfer.entrypoints.chat_template import ChatPrompt
from nanoinfer.entrypoints.openai.errors import as_api_error, error_body
from nanoinfer.entrypoints.openai.protocol import ChatCompletionRequest, Message, Tool
from nanoinfer.entrypoints.openai.serving import Serving, Usage, finite, last_output, new_id
from nanoinfer.entrypoints.openai.sse import DONE, ChunkWriter, event
from nanoinfer.entrypoints.parsers.reasoning import THINK_END, ReasoningParser, ThinkState, state_after_prompt
from nanoinfer.entrypoints.parsers.tool_calls import HermesToolParser, TextDelta, ToolCallStart, ToolEvent
from nanoinfer.outputs import CompletionOutput, Logprob
from nanoinfer.sampling_params import Grammar

_EFFORT_OFF = "none"


def template_messages(messages: list[Message]) -> list[dict[str, Any]]:
    """As chat templates expect them: contents are strings, there is no developer."""
    result = []
    for message in messages:
        one: dict[str, Any] = {"role": message.role, "content": message.text}
        if message.role == "developer":
            one["role"] = "system"
        if (reasoning := message.reasoning or message.reasoning_content) is not None:
            one["reasoning_content"] = reasoning
        if message.tool_calls:
            one["tool_calls"] = [
                {"type": "function", "function": call.function.model_dump()} for call in message.tool_calls
            ]
        result.append(one)
    return result


def template_tools(tools: list[Tool] | None) -> list[dict[str, Any]] | None:
    return [tool.model_dump(exclude_none=True) for tool in tools] if tools else None


class Choice:
    """One completion on its way: text in, the parts of an assistant's message out."""

    def __init__(self, serving: ChatServing, request: ChatCompletionRequest, state: ThinkState) -> None:
        self._reasoning = ReasoningParser(state) if serving.splits_reasoning else None
        self._tools = HermesToolParser() if serving.parses_tools(request) else None
        self._think_end_id = serving.think_end_id
        self._shows_reasoning = request.include_reasoning is not False
        self._max_calls = 1 if request.parallel_tool_calls is False else None
        self.num_tokens = 0
        self._end_of_thinking: int | None = None
        self._has_calls = False

    def advance(self, output: CompletionOutput) -> dict[str, Any]:
        """The delta of the message that an output brings; {} if nothing is certain yet."""
        if self._end_of_thinking is None and self._think_end_id in output.token_ids:
            self._end_of_thinking = self.num_tokens + output.token_ids.index(self._think_end_id) + 1
        self.num_tokens += len(output.token_ids)
        is_over = output.finish_reason is not None
        reasoning, content = "", output.text
        if self._reasoning is not None:
            reasoning, content = self._reasoning.feed(output.text)
            if is_over:
                rest, more = self._reasoning.finish()
                reasoning, content = reasoning + rest, content + more
        delta: dict[str, Any] = {}
        if reasoning and self._shows_reasoning:
            delta["reasoning"] = reasoning
        events: list[ToolEvent] = [TextDelta(content)] if content else []
        if self._tools is not None:
            events = self._tools.feed(content) + (self._tools.finish() if is_over else [])
        self._add(delta, events)
        return delta

    def _add(self, delta: dict[str, Any], events: list[ToolEvent]) -> None:
        calls: dict[int, dict[str, Any]] = {}
        for one in events:
            if isinstance(one, TextDelta):
                delta["content"] = delta.get("content", "") + one.text
                continue
            if self._max_calls is not None and one.index >= self._max_calls:
                continue
            self._has_calls = True
            call = calls.setdefault(one.index, {"index": one.index, "function": {"arguments": ""}})
            if isinstance(one, ToolCallStart):
                call |= {"id": new_id("call"), "type": "function"}
                call["function"] = {"name": one.name, "arguments": ""}
            else:
                call["function"]["arguments"] += one.text
        if calls:
            delta["tool_calls"] = list(calls.values())

    def finish_reason(self, output: CompletionOutput) -> str | None:
        return "tool_calls" if self._has_calls and output.finish_reason == "stop" else output.finish_reason

    @property
    def num_reasoning_tokens(self) -> int:
        """Up to and with the closing tag."""
        if self._reasoning is None or not self._reasoning.has_block or self._think_end_id is None:
            return 0
        return self.num_tokens if self._end_of_thinking is None else self._end_of_thinking


@dataclass
class Chat:
    """A request in the engine."""

    request: ChatCompletionRequest
    stream: RequestStream
    choices: list[Choice]
    usage: Usage
    head: dict[str, Any]
    prompt_token_ids: list[int]


class ChatServing:
    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self.splits_reasoning = serving.config.reasoning_parser != "none"
        assert serving.tokenizer is not None
        added = {token.content: i for i, token in serving.tokenizer.added_tokens_decoder.items()}
        self.think_end_id = added.get(THINK_END)

    def parses_tools(self, request: ChatCompletionRequest) -> bool:
        config = self._serving.config
        if config.tool_call_parser == "none" or not request.offered_tools:
            return False
        return config.enable_auto_tool_choice or request.forced_tools is not None

    async def render(self, request: ChatCompletionRequest) -> ChatPrompt:
        options = dict(request.chat_template_kwargs or {})
        if request.reasoning_effort is not None:
            options.setdefault("enable_thinking", request.reasoning_effort != _EFFORT_OFF)
        render, tools = self._serving.template.render, request.offered_tools
        return await self._serving.off_loop(
            lambda: render(template_messages(request.messages), template_tools(tools), options)
        )

    async def start(self, request: ChatCompletionRequest) -> Chat:
        """Checks everything and queues the request. Raises before anything was queued."""
        serving = self._serving
        model = serving.check_model(request.model)
        serving.check_count(1, request.n or 1)
        prompt = await self.render(request)
        params = serving.sampling_params(
            request,
            max_tokens=request.max_completion_tokens or request.max_tokens,
            default_max_tokens=None,
            num_prompt_tokens=len(prompt.token_ids),
            logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        )
        state = state_after_prompt(prompt.text)
        grammar = await self._grammar(request, state)
        request_id = new_id("chatcmpl")
        stream = serving.llm.generate(
            {"prompt": prompt.text, "prompt_token_ids": prompt.token_ids},
            params,
            request_id,
            cache_salt=request.cache_salt,
            grammar=grammar,
        )
        head = {"id": request_id, "object": "chat.completion", "created": int(time.time()), "model": model}
        choices = [Choice(self, request, state) for _ in range(params.n)]
        return Chat(request, stream, choices, Usage(len(prompt.token_ids)), head, prompt.token_ids)

    async def _grammar(self, request: ChatCompletionRequest, state: ThinkState) -> Grammar | None:
        serving = self._serving
        if (forced := request.forced_tools) is not None:
            if not self.parses_tools(request):
                raise ValueError("tool_choice cannot be enforced: this server runs with tool_call_parser none")
            functions = [tool.function.model_dump() for tool in forced]
            parallel = request.parallel_tool_calls is not False and request.tool_choice == "required"
            grammar = await serving.grammars.compile(
                lambda: serving.grammars.tool_call_source(functions, parallel), with_tags=True
            )
        else:
            found = await serving.grammar(request, request.response_format)
            if found is None:
                return None
            grammar = found
        if self.splits_reasoning and state is not ThinkState.CONTENT:
            return serving.grammars.after_thinking(grammar, is_open=state is ThinkState.REASONING)
        return grammar

    async def complete(self, chat: Chat) -> dict[str, Any]:
        """The whole answer."""
        final = await last_output(chat.stream)
        choices = []
        for output in final.outputs:
            choice = chat.choices[output.index]
            message = {"role": "assistant", "content": None, "refusal": None, **choice.advance(output)}
            for call in message.get("tool_calls", ()):
                del call["index"]
            if message["content"] is None and "tool_calls" not in message:
                message["content"] = ""
            choices.append(self._choice(chat, output, "message", message))
        self._count(chat, final.num_cached_tokens)
        body = {**chat.head, "choices": choices, "usage": chat.usage.as_dict()}
        if chat.request.return_token_ids:
            body["prompt_token_ids"] = chat.prompt_token_ids
        return body

    async def stream(self, chat: Chat) -> AsyncIterator[bytes]:
        """The answer as server-sent events. What goes wrong on the way is an event too, the last one."""
        write = ChunkWriter({**chat.head, "object": "chat.completion.chunk"}).write
        options = chat.request.stream_options
        with_usage = options is not None and bool(options.include_usage)
        with_all_usage = options is not None and bool(options.continuous_usage_stats)
        no_usage: dict[str, Any] = {"usage": None} if with_usage else {}
        try:
            for index in range(len(chat.choices)):
                first = {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None}
                chunk = {"choices": [{**first, "finish_reason": None}], **no_usage}
                if index == 0 and chat.request.return_token_ids:
                    chunk["prompt_token_ids"] = chat.prompt_token_ids
                yield write(chunk)
            num_cached = 0
            async for result in chat.stream:
                num_cached = result.num_cached_tokens
                for output in result.outputs:
                    delta = chat.choices[output.index].advance(output)
                    choice = self._choice(chat, output, "delta", delta)
                    if not (delta or choice["finish_reason"] or choice["logprobs"] or choice.get("token_ids")):
                        continue
                    chunk = {"choices": [choice], **no_usage}
                    if with_all_usage:
                        self._count(chat, num_cached)
                        chunk["usage"] = chat.usage.as_dict()
                    yield write(chunk)
            if with_usage:
                self._count(chat, num_cached)
                yield write({"choices": [], "usage": chat.usage.as_dict()})
            yield DONE
        except Exception as error:
            yield event(error_body(as_api_error(error)))
        finally:
            await chat.stream.aclose()

    def _choice(self, chat: Chat, output: CompletionOutput, name: str, message: dict[str, Any]) -> dict[str, Any]:
        logprobs = None
        if output.logprobs is not None and (name == "message" or output.logprobs):
            entries = self._serving.visible_logprobs(output, chat.request)
            logprobs = {"content": [self._logprob(entry, chat.request.top_logprobs or 0) for entry in entries]}
        choice = {
            "index": output.index,
            name: message,
            "logprobs": logprobs,
            "finish_reason": chat.choices[output.index].finish_reason(output),
        }
        if output.finish_reason is not None:
            choice["stop_reason"] = output.stop_reason
        if chat.request.return_token_ids:
            choice["token_ids"] = output.token_ids
        return choice

    def _logprob(self, entry: dict[int, Logprob], num_top: int) -> dict[str, Any]:
        """entry: the chosen token first, then the best ones."""
        chosen = next(iter(entry))
        best = sorted(entry.items(), key=lambda item: item[1].rank)[:num_top]
        top = [self._one_logprob(token_id, logprob) for token_id, logprob in best]
        return {**self._one_logprob(chosen, entry[chosen]), "top_logprobs": top}

    def _one_logprob(self, token_id: int, logprob: Logprob) -> dict[str, Any]:
        raw = self._serving.table.bytes_of(token_id)
        return {"token": raw.decode(errors="replace"), "logprob": finite(logprob.logprob), "bytes": list(raw)}

    def _count(self, chat: Chat, num_cached: int) -> None:
        chat.usage.cached_tokens = num_cached
        chat.usage.completion_tokens = sum(choice.num_tokens for choice in chat.choices)
        chat.usage.reasoning_tokens = sum(choice.num_reasoning_tokens for choice in chat.choices)
