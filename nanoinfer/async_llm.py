"""`AsyncLLM`: the engine for programs on asyncio, such as the server. Many requests at once, each an async iterator.

The engine loop runs in a thread of its own, and the ranks in processes of their own: an event loop that is busy, or a
client that is slow, does not slow a step. Requests and aborts go to the loop through a queue, in order. What a step
brought goes back in one piece per event loop and step, while the next step is on its way; whoever reads slowly finds
it merged. A step that raises ends the engine, and with it every request.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import queue
import threading
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

from nanoinfer.config import EngineConfig, ModelConfig
from nanoinfer.engine.input_processor import Prompt
from nanoinfer.engine.llm_engine import LLMEngine
from nanoinfer.engine.output_processor import Completion, CompletionDelta, Request
from nanoinfer.engine.stats import EngineStats, IterationStats, SequenceTimeline, StatsKeeper
from nanoinfer.executor.base import EngineDeadError
from nanoinfer.outputs import CompletionOutput, RequestOutput
from nanoinfer.sampling_params import Grammar, RequestOutputKind, SamplingParams
from nanoinfer.step import KVCacheCapacity

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

# How often an idle engine looks whether its ranks live.
_IDLE_CHECK_SECONDS = 1.0
# How long the loop may take to end its step when it is asked to stop.
_STOP_SECONDS = 5.0
_DRAIN_POLL_SECONDS = 0.02


class QueueFullError(RuntimeError):
    """As many requests wait as may; try again later."""


class RequestFailedError(RuntimeError):
    """Something went wrong that is this request's alone: its grammar raised, or allowed nothing."""


class _Mailbox:
    """What has come for one request and has not been read. Lives in the event loop that `generate` was called in."""

    def __init__(self, request: Request, params: SamplingParams) -> None:
        self.request = request
        self.kind = params.output_kind
        self.loop = asyncio.get_running_loop()
        self._with_logprobs = params.logprobs is not None
        # All that has come; of a stream of deltas, all that has not been read.
        self._parts = [self._fresh(index) for index in range(len(request.completions))]
        self._unread: set[int] = set()
        self._unfinished = set(range(len(request.completions)))
        self._has_been_read = False
        self._waiter: asyncio.Future[None] | None = None
        self.error: BaseException | None = None

    @property
    def is_complete(self) -> bool:
        return not self._unfinished or self.error is not None

    @property
    def can_be_read(self) -> bool:
        if self.kind is RequestOutputKind.FINAL_ONLY:
            return bool(self._unread) and not self._unfinished
        return bool(self._unread)

    @property
    def has_started(self) -> bool:
        seq = self.request.seq
        return seq.first_scheduled_time is not None or seq.is_finished

    def push(self, delta: CompletionDelta) -> None:
        """Takes in what a completion has grown by."""
        if self.error is not None:
            return
        part, new = self._parts[delta.index], delta.output(self.request.table)
        part.text += new.text
        part.token_ids += new.token_ids
        if part.logprobs is not None and new.logprobs is not None:
            part.logprobs += new.logprobs
            part.cumulative_logprob = (part.cumulative_logprob or 0.0) + (new.cumulative_logprob or 0.0)
        part.finish_reason, part.stop_reason = new.finish_reason, new.stop_reason
        self._unread.add(delta.index)
        if new.finish_reason is not None:
            self._unfinished.discard(delta.index)
        self._wake()

    def fail(self, error: BaseException) -> None:
        """Nothing more will come. What has come can still be read."""
        self.error = error
        self._wake()

    async def wait(self) -> None:
        if self._waiter is not None:
            raise RuntimeError(f"request {self.request.request_id} is already being waited for")
        self._waiter = self.loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def read(self) -> RequestOutput:
        if self.kind is RequestOutputKind.DELTA:
            parts = [self._parts[index] for index in sorted(self._unread)]
            for part in parts:
                self._parts[part.index] = self._fresh(part.index)
        else:
            parts = [
                replace(part, token_ids=part.token_ids.copy(), logprobs=part.logprobs and part.logprobs.copy())
                for part in self._parts
            ]
        self._unread.clear()
        output = self.request.wrap(parts, finished=not self._unfinished)
        if self.kind is RequestOutputKind.DELTA and self._has_been_read:
            output.prompt_logprobs = None
        self._has_been_read = True
        return output

    def _fresh(self, index: int) -> CompletionOutput:
        if self._with_logprobs:
            return CompletionOutput(index=index, logprobs=[], cumulative_logprob=0.0)
        return CompletionOutput(index=index)


class RequestStream(AsyncIterator[RequestOutput]):
    """The outputs of one request. Closing it, cancelling whoever waits for it, or dropping it aborts the request.

    For the event loop that it was made in. Not a generator, because one that was never started is not cleaned up after.
    """

    def __init__(self, mailbox: _Mailbox, discard: Callable[[_Mailbox], None]) -> None:
        self._mailbox = mailbox
        self._discard = discard
        self._is_over = False

    @property
    def request_id(self) -> str:
        return self._mailbox.request.request_id

    async def __anext__(self) -> RequestOutput:
        mailbox = self._mailbox
        while not self._is_over:
            if mailbox.can_be_read:
                output = mailbox.read()
                self._is_over = output.finished
                return output
            if mailbox.error is not None:
                self._is_over = True
                raise mailbox.error
            try:
                await mailbox.wait()
            except asyncio.CancelledError:
                self._close()
                raise
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """The iteration ends; a request that has not ended is aborted."""
        self._close()

    def _close(self) -> None:
        self._is_over = True
        if not self._mailbox.is_complete:
            self._discard(self._mailbox)

    def __del__(self) -> None:
        self._close()


@dataclass
class _Live:
    """A sequence in the engine loop."""

    mailbox: _Mailbox
    completion: Completion
    timeline: SequenceTimeline


@dataclass
class _Command:
    """For the engine loop to do between two steps. answer: told when it is done."""

    work: Callable[[], None]
    answer: Future[None] | None = None


_Letters = dict[asyncio.AbstractEventLoop, list[tuple[_Mailbox, CompletionDelta | Exception]]]


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
        self._keeper = StatsKeeper(self._engine.scheduler)
        # Called after every step, in the engine loop's thread, while the next step runs.
        self.stats_listeners: list[Callable[[IterationStats], None]] = []
        self._commands: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        # Requests that have not ended, by their id. Added to under the lock, which also guards `_death`.
        self._mailboxes: dict[str, _Mailbox] = {}
        self._lock = threading.Lock()
        self._death: str | None = None
        # The engine loop's own.
        self._live: dict[int, _Live] = {}
        self._news: list[_Live] = []
        self._news_time = 0.0
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="nanoinfer-engine", daemon=True)
        self._thread.start()
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
        return self._death is not None

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
        wait, EngineDeadError. The iterator raises EngineDeadError, or RequestFailedError if the grammar failed. Text
        is tokenized here, in the caller's thread; pass ids where that takes too long.

        cache_salt: blocks of the prefix cache are shared only under equal salts. grammar: a fresh one; with `n` above
        1 each completion gets a copy (copy.deepcopy).
        """
        if cache_salt is not None:
            if not isinstance(prompt, Mapping):
                prompt = {"prompt" if isinstance(prompt, str) else "prompt_token_ids": prompt}
            prompt = {**prompt, "cache_salt": cache_salt}
        self._raise_if_dead()
        (request,) = self._engine.prepare([prompt], sampling_params, request_id=request_id, grammar=grammar)
        mailbox = _Mailbox(request, request.seq.params)
        with self._lock:
            self._raise_if_dead()
            if request.request_id in self._mailboxes:
                raise ValueError(f"request_id is {request.request_id!r}, which is the id of a request in progress")
            if len(self._mailboxes) >= self.max_waiting:
                num_waiting = sum(not other.has_started for other in list(self._mailboxes.values()))
                if num_waiting >= self.max_waiting:
                    raise QueueFullError(f"{num_waiting} requests wait, which is as many as may; try again later")
            self._mailboxes[request.request_id] = mailbox
            self._commands.put(_Command(lambda: self._add(mailbox)))
        return RequestStream(mailbox, self._discard)

    async def abort(self, request_id: str) -> None:
        """Ends a request with finish_reason "abort", which its iterator tells. Unknown ids are ignored.

        When this returns, its blocks are free, but for those that a step in flight writes to.
        """
        with suppress(EngineDeadError):  # then it has ended
            await self._ask(lambda: self._abort([request_id]))

    async def check_health(self) -> None:
        """Asks the engine loop, which answers between two steps. Raises EngineDeadError if it or a rank is dead."""
        await self._ask(self._engine.executor.check_health)

    def stats(self) -> EngineStats:
        return self._keeper.snapshot()

    async def shutdown(self, timeout: float = 0) -> None:
        """Refuses new requests, waits up to `timeout` seconds for the others, aborts what is left, ends all."""
        with self._lock:
            self._death = self._death or "it is shutting down"
        deadline = monotonic() + timeout
        while self._mailboxes and self._thread.is_alive() and monotonic() < deadline:
            await asyncio.sleep(_DRAIN_POLL_SECONDS)
        await asyncio.to_thread(self._stop)

    def _stop(self) -> None:
        """Ends the engine loop, its requests and the ranks. Idempotent."""
        atexit.unregister(self._stop)
        with self._lock:
            self._death = self._death or "it was shut down"
        self._commands.put(_Command(self._prepare_to_stop))
        self._thread.join(_STOP_SECONDS)
        if self._thread.is_alive():
            # It waits for a step that does not end: without ranks, it will.
            self._engine.close()
            self._thread.join(_STOP_SECONDS)

    async def _ask(self, work: Callable[[], None]) -> None:
        answer: Future[None] = Future()
        with self._lock:
            self._raise_if_dead()
            self._commands.put(_Command(work, answer))
        await asyncio.wrap_future(answer)

    def _discard(self, mailbox: _Mailbox) -> None:
        """Nobody reads it any more. Called by destructors as well, so in any thread and without the lock."""
        self._commands.put(_Command(lambda: self._abort([mailbox.request.request_id], mailbox)))

    def _raise_if_dead(self) -> None:
        if self._death is not None:
            raise EngineDeadError(f"the engine is dead: {self._death}")

    # What follows runs in the engine loop's thread.

    def _run(self) -> None:
        try:
            self._loop()
        except BaseException as error:
            reason = str(error) if isinstance(error, EngineDeadError) else f"a step raised {error!r}"
            logger.exception("the engine is dead")
            self._die(reason.removeprefix("the engine is dead: "))
        else:
            self._die("it was shut down")
        finally:
            self._engine.close()

    def _loop(self) -> None:
        engine = self._engine
        is_apart = engine.executor.runs_apart
        while True:
            self._obey(wait=not engine.has_unfinished)
            if self._is_stopping:
                return
            if engine.has_unfinished:
                # What the step before has brought is told while this one runs.
                engine.step(self._publish if is_apart else None)
                self._news = [self._live[seq.seq_id] for seq in engine.changed if seq.seq_id in self._live]
                self._news_time = monotonic()
            if not (is_apart and engine.has_unfinished):
                self._publish()

    def _obey(self, wait: bool) -> None:
        """Carries out all commands that are there; if there are none and it should, waits for one."""
        while True:
            try:
                command = self._commands.get(block=wait, timeout=_IDLE_CHECK_SECONDS)
            except queue.Empty:
                if not wait:
                    return
                self._engine.executor.check_health()
                continue
            wait = False
            answer = command.answer
            if answer is not None and not answer.set_running_or_notify_cancel():
                answer = None
            try:
                command.work()
            except BaseException as error:
                if answer is not None:
                    answer.set_exception(error)
                raise
            if answer is not None:
                answer.set_result(None)

    def _add(self, mailbox: _Mailbox) -> None:
        self._engine.add([mailbox.request])
        for completion in mailbox.request.completions:
            self._live[completion.seq.seq_id] = _Live(mailbox, completion, SequenceTimeline(completion.seq))

    def _abort(self, request_ids: list[str], only: _Mailbox | None = None) -> None:
        """only: not if the id is another request's by now."""
        ended = []
        for request_id in request_ids:
            mailbox = self._mailboxes.get(request_id)
            if mailbox is not None and only in (None, mailbox):
                self._engine.abort([mailbox.request])
                sequences = [completion.seq for completion in mailbox.request.completions]
                ended += [self._live[seq.seq_id] for seq in sequences if seq.seq_id in self._live]
        self._tell(ended, monotonic())

    def _prepare_to_stop(self) -> None:
        self._is_stopping = True
        self._publish()
        self._abort(list(self._mailboxes))

    def _publish(self) -> None:
        """Tells what the last step brought, if that has not been done."""
        news, self._news = self._news, []
        # Those that were aborted since have been told so.
        self._tell([live for live in news if live.completion.seq.seq_id in self._live], self._news_time)

    def _tell(self, changed: list[_Live], now: float) -> None:
        """Sends out what these sequences have grown by, and keeps the statistics."""
        if not changed:
            return
        iteration = IterationStats()
        letters: _Letters = defaultdict(list)
        for live in changed:
            seq, mailbox = live.completion.seq, live.mailbox
            self._keeper.count(live.timeline, now, iteration)
            if seq.is_finished:
                self._live.pop(seq.seq_id, None)
                if mailbox.request.is_done:
                    self._mailboxes.pop(mailbox.request.request_id, None)
            if seq.error is not None:
                # With all other completions, which end with nobody told. Not at once: a step may be on its way.
                letters[mailbox.loop].append((mailbox, RequestFailedError(f"{type(seq.error).__name__}: {seq.error}")))
                self._discard(mailbox)
            elif seq.is_finished or mailbox.kind is not RequestOutputKind.FINAL_ONLY:
                letters[mailbox.loop].append((mailbox, live.completion.new_delta()))
        self._send(letters)
        for listener in list(self.stats_listeners):
            try:
                listener(iteration)
            except Exception:
                logger.exception("a listener for statistics raised, and is not called any more")
                self.stats_listeners.remove(listener)

    def _send(self, letters: _Letters) -> None:
        for loop, batch in letters.items():
            try:
                loop.call_soon_threadsafe(_deliver, batch)
            except RuntimeError:  # that loop is closed, and nobody is left who could read
                for mailbox, _ in batch:
                    self._discard(mailbox)

    def _die(self, reason: str) -> None:
        """Whatever is waited for ends now, with an error."""
        with self._lock:
            self._death = reason
        with suppress(queue.Empty):
            while True:
                answer = self._commands.get_nowait().answer
                if answer is not None and answer.set_running_or_notify_cancel():
                    answer.set_exception(EngineDeadError(f"the engine is dead: {reason}"))
        letters: _Letters = defaultdict(list)
        for mailbox in self._mailboxes.values():
            letters[mailbox.loop].append((mailbox, EngineDeadError(f"the engine is dead: {reason}")))
        self._mailboxes.clear()
        self._send(letters)


def _deliver(batch: list[tuple[_Mailbox, CompletionDelta | Exception]]) -> None:
    """In the mailboxes' event loop."""
    for mailbox, letter in batch:
        if isinstance(letter, Exception):
            mailbox.fail(letter)
        else:
            mailbox.push(letter)
