"""`AsyncLLM`: the engine for programs on asyncio, such as the server. Many requests at once, each an async iterator.

The engine loop runs in a thread of its own (engine/engine_loop.py), and the ranks in processes of their own: an event
loop that is busy, or a client that is slow, does not slow a step. Texts are tokenized in a thread of their own, too: a
long one does not hold up the streams of others.
"""

from __future__ import annotations

import asyncio
import atexit
import itertools
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

from nanoinfer.config import EngineConfig, ModelConfig
from nanoinfer.engine.engine_loop import EngineLoop, QueueFullError
from nanoinfer.engine.input_processor import Prompt
from nanoinfer.engine.llm_engine import LLMEngine
from nanoinfer.engine.output_processor import Request
from nanoinfer.engine.request_stream import Mailbox, RequestFailedError, RequestStream
from nanoinfer.engine.stats import EngineStats, IterationStats
from nanoinfer.executor.base import EngineDeadError
from nanoinfer.sampling_params import Grammar, SamplingParams
from nanoinfer.step import KVCacheCapacity

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["AsyncLLM", "QueueFullError", "RequestFailedError", "RequestStream"]

_DRAIN_POLL_SECONDS = 0.02


class AsyncLLM:
    """A model, ready to serve. Loads it, and starts the engine loop.

        llm = AsyncLLM("Qwen/Qwen3-0.6B")
        async for output in llm.generate("The capital of France is", SamplingParams(temperature=0)):
            print(output.text)
        await llm.shutdown()

    options: those of `EngineConfig`, as of `LLM`. Each rank, also a single one, is a process of its own
        (`distributed_executor_backend="uni"` changes that, for tests).
    max_waiting: requests that may wait for their first step.
    """

    def __init__(self, model: str | Path, *, max_waiting: int = 1024, **options: Any) -> None:
        if isinstance(max_waiting, bool) or not isinstance(max_waiting, int) or max_waiting < 1:
            raise ValueError(f"max_waiting is {max_waiting!r}; it must be an integer of at least 1")
        config = EngineConfig.create(model, **options)
        if config.distributed_executor_backend is None:
            config = replace(config, distributed_executor_backend="mp")
        self.max_waiting = max_waiting
        self._engine = LLMEngine(config)
        self._loop = EngineLoop(self._engine, max_waiting)
        # Called after every step, in the engine loop's thread, while the next step runs. One that raises is removed.
        self.stats_listeners: list[Callable[[IterationStats], None]] = self._loop.stats_listeners
        # One thread, so that texts are queued in the order that they came in.
        self._tokenizing = ThreadPoolExecutor(1, thread_name_prefix="nanoinfer-tokenizer")
        self._numbers = itertools.count()
        atexit.register(self._stop)

    @property
    def config(self) -> EngineConfig:
        return self._engine.config

    @property
    def model_config(self) -> ModelConfig:
        return self._engine.model_config

    @property
    def capacity(self) -> KVCacheCapacity:
        """The KV pool, and the device and dtype in use."""
        return self._engine.capacity

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        return self._engine.tokenizer

    @property
    def max_model_len(self) -> int:
        """Of prompt plus output, as start-up found it."""
        return self._engine.scheduler.config.max_model_len

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """What ends an output, of all sources: config.json, generation_config.json and the tokenizer."""
        return self._engine.input_processor.eos_token_ids

    def get_default_sampling_params(self) -> SamplingParams:
        """Those of the checkpoint's generation_config.json."""
        return self._engine.input_processor.default_params

    @property
    def errored(self) -> bool:
        """Whether the engine is dead (or was shut down)."""
        return self._loop.is_dead

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        cache_salt: str | None = None,
        grammar: Grammar | None = None,
    ) -> RequestStream:
        """Queues a request; the result is an async iterator over its outputs, as `sampling_params.output_kind` says.

        Raises at once, before anything is queued: ValueError on bad input, QueueFullError when `max_waiting` requests
        wait, EngineDeadError. The iterator raises EngineDeadError, or RequestFailedError if the grammar failed.

        A text is tokenized in another thread and queued then, texts among themselves in the order of their calls. What
        only its tokens tell, such as that they are too many, is a ValueError that the iterator raises.

        cache_salt: blocks of the prefix cache are shared only under equal salts. grammar: a fresh one; with `n` above
        1 each completion gets a copy (copy.deepcopy).
        """
        self._loop.raise_if_dead()
        if cache_salt is not None:
            if not isinstance(prompt, Mapping):
                prompt = {"prompt" if isinstance(prompt, str) else "prompt_token_ids": prompt}
            prompt = {**prompt, "cache_salt": cache_salt}
        processor = self._engine.input_processor
        params = processor.check_params(sampling_params)
        mailbox = Mailbox(request_id or f"request-{next(self._numbers)}", params)
        if processor.needs_tokenizer(prompt, params):
            self._loop.register(mailbox)
            self._tokenizing.submit(self._prepare_and_add, mailbox, prompt, params, grammar)
        else:
            request = self._prepare(mailbox, prompt, params, grammar)
            self._loop.register(mailbox)
            self._loop.add(mailbox, request)
        return RequestStream(mailbox, self._loop.discard)

    def _prepare(self, mailbox: Mailbox, prompt: Prompt, params: SamplingParams, grammar: Grammar | None) -> Request:
        (request,) = self._engine.prepare([prompt], params, request_id=mailbox.request_id, grammar=grammar)
        return request

    def _prepare_and_add(
        self, mailbox: Mailbox, prompt: Prompt, params: SamplingParams, grammar: Grammar | None
    ) -> None:
        """In the tokenizing thread."""
        try:
            request = self._prepare(mailbox, prompt, params, grammar)
        except Exception as error:
            self._loop.fail(mailbox, error)
        else:
            self._loop.add(mailbox, request)

    async def abort(self, request_id: str) -> None:
        """Ends a request with finish_reason "abort", which its iterator tells. Unknown ids are ignored.

        When this returns, its blocks are free, but for those that a step in flight writes to.
        """
        with suppress(EngineDeadError):  # then it has ended
            await asyncio.wrap_future(self._loop.abort(request_id))

    async def check_health(self) -> None:
        """Asks the engine loop, which answers between two steps. Raises EngineDeadError if it or a rank is dead."""
        await asyncio.wrap_future(self._loop.ask(self._engine.executor.check_health))

    def stats(self) -> EngineStats:
        return self._loop.stats()

    async def shutdown(self, timeout: float = 0) -> None:
        """Refuses new requests, waits up to `timeout` seconds for the others, aborts what is left, ends all."""
        self._loop.refuse("it is shutting down")
        deadline = monotonic() + timeout
        while self._loop.is_busy and monotonic() < deadline:
            await asyncio.sleep(_DRAIN_POLL_SECONDS)
        await asyncio.to_thread(self._stop)

    def _stop(self) -> None:
        """Ends the engine loop, its requests and the ranks. Idempotent."""
        atexit.unregister(self._stop)
        self._loop.stop()
        self._tokenizing.shutdown(wait=False, cancel_futures=True)
