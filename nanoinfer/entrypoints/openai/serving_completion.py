"""`/v1/completions`: prompts as they are, text with control tokens or token ids; echo and logprobs for evaluations."""

from __future__ import annotations

import asyncio
import codecs
import copy
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from nanoinfer.async_llm import RequestStream
from nanoinfer.entrypoints.openai.errors import APIError, as_api_error, error_body
from nanoinfer.entrypoints.openai.protocol import CompletionRequest
from nanoinfer.entrypoints.openai.serving import Serving, Usage, finite, last_output, new_id
from nanoinfer.entrypoints.openai.sse import DONE, ChunkWriter, event
from nanoinfer.outputs import CompletionOutput, Logprob, RequestOutput
from nanoinfer.sampling_params import SamplingParams

# OpenAI's.
DEFAULT_MAX_TOKENS = 16


class LogprobsWriter:
    """Logprobs in the legacy form; remembers how long the text is, for `text_offset`."""

    def __init__(self, serving: Serving, num_top: int) -> None:
        self._table = serving.table
        self._num_top = num_top
        self._num_chars = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def write(self, entries: list[tuple[int, dict[int, Logprob] | None]]) -> dict[str, Any]:
        """entries: (token id, its logprobs with the best ones; None for the prompt's first token)."""
        written: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token_id, entry in entries:
            written["tokens"].append(self._table.text_of(token_id))
            written["text_offset"].append(self._num_chars)
            self._num_chars += len(self._decoder.decode(self._table.bytes_of(token_id)))
            if entry is None:
                written["token_logprobs"].append(None)
                written["top_logprobs"].append(None)
                continue
            best = sorted(entry.items(), key=lambda item: item[1].rank)[: self._num_top]
            written["token_logprobs"].append(finite(entry[token_id].logprob))
            top: dict[str, float] = {}
            for other, logprob in best:
                top.setdefault(self._table.text_of(other), finite(logprob.logprob))
            written["top_logprobs"].append(top)
        return written


@dataclass
class Prompt:
    """One of a request's prompts in the engine. first_index: of its completions among the request's.

    text: of ids only if it is to be echoed, else empty.
    """

    text: str
    token_ids: list[int]
    first_index: int
    stream: RequestStream


@dataclass
class Completion:
    """A request in the engine."""

    request: CompletionRequest
    prompts: list[Prompt]
    writers: list[LogprobsWriter]
    usage: Usage
    head: dict[str, Any]

    async def close(self) -> None:
        for prompt in self.prompts:
            await prompt.stream.aclose()


class CompletionServing:
    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    async def start(self, request: CompletionRequest) -> Completion:
        """Checks everything and queues the prompts, all or none. Raises before anything was queued."""
        serving = self._serving
        model = serving.check_model(request.model)
        given = as_prompts(request.prompt)
        n = request.n or 1
        serving.check_count(len(given), n)
        texts_and_ids = await self._prompts(given, with_texts=bool(request.echo))
        params = [self._params(request, len(ids)) for _, ids in texts_and_ids]
        grammar = await serving.grammar(request, request.response_format)
        request_id = new_id("cmpl")
        prompts: list[Prompt] = []
        try:
            for i, (text, ids) in enumerate(texts_and_ids):
                stream = serving.llm.generate(
                    {"prompt": text, "prompt_token_ids": ids},
                    params[i],
                    f"{request_id}-{i}",
                    cache_salt=request.cache_salt,
                    grammar=copy.deepcopy(grammar),
                )
                prompts.append(Prompt(text, ids, i * n, stream))
        except BaseException:
            for prompt in prompts:
                await prompt.stream.aclose()
            raise
        head = {"id": request_id, "object": "text_completion", "created": int(time.time()), "model": model}
        writers = [LogprobsWriter(serving, request.logprobs or 0) for _ in range(len(given) * n)]
        usage = Usage(sum(len(prompt.token_ids) for prompt in prompts))
        return Completion(request, prompts, writers, usage, head)

    async def _prompts(self, given: list[str] | list[list[int]], with_texts: bool) -> list[tuple[str, list[int]]]:
        """(text, ids) of each; of one that came as ids, the text is left empty unless it is wanted."""
        serving = self._serving

        def complete(prompt: str | list[int]) -> tuple[str, list[int]]:
            if isinstance(prompt, str):
                return prompt, serving.tokenize(prompt)
            return serving.detokenize(prompt) if with_texts else "", prompt

        if with_texts or isinstance(given[0], str):
            completed = await serving.off_loop(lambda: list(map(complete, given)))
        else:
            completed = list(map(complete, given))
        if not all(ids for _, ids in completed):
            raise APIError(400, "a prompt is empty; it needs at least one token", "prompt")
        return completed

    def _params(self, request: CompletionRequest, num_prompt_tokens: int) -> SamplingParams:
        prompt_logprobs = request.prompt_logprobs
        if request.echo and request.logprobs is not None:
            prompt_logprobs = max(request.logprobs, prompt_logprobs or 0)
        max_tokens = request.max_tokens
        return self._serving.sampling_params(
            request,
            # The engine generates at least one token; with 0 it is left out of the answer.
            max_tokens=max_tokens or (1 if max_tokens == 0 else None),
            default_max_tokens=DEFAULT_MAX_TOKENS,
            num_prompt_tokens=num_prompt_tokens,
            logprobs=request.logprobs,
            prompt_logprobs=prompt_logprobs,
        )

    async def complete(self, completion: Completion) -> dict[str, Any]:
        """The whole answer."""
        try:
            finals = await gather_all([last_output(prompt.stream) for prompt in completion.prompts])
        finally:
            await completion.close()
        choices = []
        for prompt, final in zip(completion.prompts, finals, strict=True):
            completion.usage.cached_tokens += final.num_cached_tokens
            for output in final.outputs:
                choices.append(await self._write(completion, prompt, output, final, is_first=True))
        return {**completion.head, "choices": choices, "usage": completion.usage.as_dict()}

    async def stream(self, completion: Completion) -> AsyncIterator[bytes]:
        """The answer as server-sent events. What goes wrong on the way is an event too, the last one."""
        options = completion.request.stream_options
        with_usage = options is not None and bool(options.include_usage)
        with_all_usage = options is not None and bool(options.continuous_usage_stats)
        no_usage: dict[str, Any] = {"usage": None} if with_usage else {}
        write = ChunkWriter(completion.head).write
        begun: set[int] = set()
        try:
            async for prompt, result in merged(completion.prompts):
                if result.finished:
                    completion.usage.cached_tokens += result.num_cached_tokens
                for output in result.outputs:
                    index = prompt.first_index + output.index
                    choice = await self._write(completion, prompt, output, result, is_first=index not in begun)
                    begun.add(index)
                    chunk = {"choices": [choice], **no_usage}
                    if with_all_usage:
                        chunk["usage"] = completion.usage.as_dict()
                    yield write(chunk)
            if with_usage:
                yield write({"choices": [], "usage": completion.usage.as_dict()})
            yield DONE
        except Exception as error:
            yield event(error_body(as_api_error(error)))
        finally:
            await completion.close()

    async def _write(
        self, completion: Completion, prompt: Prompt, output: CompletionOutput, result: RequestOutput, *, is_first: bool
    ) -> dict[str, Any]:
        """As `_choice`; in a thread where there are log-probabilities of a whole prompt to write."""
        if result.prompt_logprobs is None:
            return self._choice(completion, prompt, output, result, is_first=is_first)
        return await asyncio.to_thread(self._choice, completion, prompt, output, result, is_first=is_first)

    def _choice(
        self, completion: Completion, prompt: Prompt, output: CompletionOutput, result: RequestOutput, *, is_first: bool
    ) -> dict[str, Any]:
        """is_first: nothing of this completion was written before, so an echo comes first."""
        request, index = completion.request, prompt.first_index + output.index
        writer = completion.writers[index]
        text, token_ids = output.text, output.token_ids
        entries: list[tuple[int, dict[int, Logprob] | None]] = []
        if request.logprobs is not None:
            visible = self._serving.visible_logprobs(output, request)
            entries = list(zip(token_ids, visible, strict=False))
        if request.max_tokens == 0:
            text, token_ids, entries = "", [], []
        if request.echo and is_first:
            text = prompt.text + text
            if request.logprobs is not None and result.prompt_logprobs is not None:
                entries = [*zip(prompt.token_ids, result.prompt_logprobs, strict=True), *entries]
        completion.usage.completion_tokens += len(token_ids)
        choice: dict[str, Any] = {
            "index": index,
            "text": text,
            "logprobs": writer.write(entries) if request.logprobs is not None else None,
            "finish_reason": "length" if request.max_tokens == 0 else output.finish_reason,
        }
        if output.finish_reason is not None:
            choice["stop_reason"] = output.stop_reason
        if request.prompt_logprobs is not None and result.prompt_logprobs is not None:
            choice["prompt_logprobs"] = [self._prompt_logprob(entry) for entry in result.prompt_logprobs]
        if request.return_token_ids:
            choice |= {"token_ids": token_ids, "prompt_token_ids": prompt.token_ids}
        return choice

    def _prompt_logprob(self, entry: dict[int, Logprob] | None) -> dict[str, Any] | None:
        """vLLM's form."""
        if entry is None:
            return None
        return {
            str(token_id): {"logprob": finite(one.logprob), "rank": one.rank, "decoded_token": one.decoded_token}
            for token_id, one in entry.items()
        }


def as_prompts(prompt: Any) -> list[str] | list[list[int]]:
    if isinstance(prompt, str):
        return [prompt]
    return [prompt] if isinstance(prompt[0], int) else prompt


async def gather_all(works: list[Any]) -> list[Any]:
    """As asyncio.gather, but what still runs when one fails is cancelled."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


async def merged(prompts: list[Prompt]) -> AsyncIterator[tuple[Prompt, RequestOutput]]:
    """The outputs of several prompts as they come."""
    if len(prompts) == 1:
        async for result in prompts[0].stream:
            yield prompts[0], result
        return
    waiting = {asyncio.ensure_future(prompt.stream.__anext__()): prompt for prompt in prompts}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                prompt = waiting.pop(task)
                try:
                    result = task.result()
                except StopAsyncIteration:
                    continue
                yield prompt, result
                waiting[asyncio.ensure_future(prompt.stream.__anext__())] = prompt
    finally:
        for task in waiting:
            task.cancel()
