"""`EngineLoop`: an engine that steps in a thread of its own, for callers in others.

There are three parties. Callers, in any thread, register mailboxes and leave commands. The loop's thread carries the
commands out between two steps, in order, steps the engine, and posts what each step brought. Event loops receive what
is posted (see request_stream.py). Only the loop's thread touches the engine; what callers and it share is the table of
mailboxes and the cause of death, under one lock, and the queue of commands.

What a step brought is posted while the next one is on its way, where the ranks run apart. A step that raises ends the
engine, and with it every request.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic

from nanoinfer.engine.llm_engine import LLMEngine
from nanoinfer.engine.output_processor import Completion, Request
from nanoinfer.engine.request_stream import Letter, Mailbox, RequestFailedError, post
from nanoinfer.engine.stats import EngineStats, IterationStats, SequenceTimeline, StatsKeeper
from nanoinfer.executor.base import EngineDeadError
from nanoinfer.sampling_params import RequestOutputKind

logger = logging.getLogger(__name__)

# How often an idle engine looks whether its ranks live.
_IDLE_CHECK_SECONDS = 1.0
# How long the loop may take to end its step when it is asked to stop.
_STOP_SECONDS = 5.0


class QueueFullError(RuntimeError):
    """As many requests wait as may; try again later."""


@dataclass
class _Live:
    """A sequence in the engine."""

    mailbox: Mailbox
    completion: Completion
    timeline: SequenceTimeline


@dataclass
class _Command:
    """For the loop to do between two steps. answer: told when it is done."""

    work: Callable[[], None]
    answer: Future[None] | None = None


class EngineLoop:
    """Starts at once. max_waiting: requests that may wait for their first step."""

    def __init__(self, engine: LLMEngine, max_waiting: int) -> None:
        self.engine = engine
        # See AsyncLLM.
        self.stats_listeners: list[Callable[[IterationStats], None]] = []
        self._max_waiting = max_waiting
        self._commands: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._lock = threading.Lock()
        # Requests that have not ended, by their id.
        self._mailboxes: dict[str, Mailbox] = {}
        # Why there is no engine any more, or none for new requests.
        self._death: str | None = None
        # From here on the loop's own.
        self._keeper = StatsKeeper(engine.scheduler)
        self._live: dict[int, _Live] = {}
        self._news: list[_Live] = []
        self._news_time = 0.0
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="nanoinfer-engine", daemon=True)
        self._thread.start()

    # For any thread.

    @property
    def is_dead(self) -> bool:
        """Whether it takes no more requests."""
        return self._death is not None

    @property
    def is_busy(self) -> bool:
        """Whether a request has not ended, and the loop is there to end it."""
        return bool(self._mailboxes) and self._thread.is_alive()

    def raise_if_dead(self) -> None:
        if self._death is not None:
            raise EngineDeadError(f"the engine is dead: {self._death}")

    def register(self, mailbox: Mailbox) -> None:
        """Takes a place in the queue. Raises ValueError on an id in use, QueueFullError and EngineDeadError."""
        with self._lock:
            self.raise_if_dead()
            if mailbox.request_id in self._mailboxes:
                raise ValueError(f"request_id is {mailbox.request_id!r}, which is the id of a request in progress")
            if len(self._mailboxes) >= self._max_waiting:
                num_waiting = sum(not other.has_started for other in list(self._mailboxes.values()))
                if num_waiting >= self._max_waiting:
                    raise QueueFullError(f"{num_waiting} requests wait, which is as many as may; try again later")
            self._mailboxes[mailbox.request_id] = mailbox

    def add(self, mailbox: Mailbox, request: Request) -> None:
        """Queues the request of a registered mailbox."""
        self._commands.put(_Command(lambda: self._add(mailbox, request)))

    def fail(self, mailbox: Mailbox, error: Exception) -> None:
        """Ends a registered mailbox whose request could not be made."""
        self._commands.put(_Command(lambda: self._fail(mailbox, error)))

    def abort(self, request_id: str) -> Future[None]:
        """Ends a request with finish_reason "abort". Unknown ids are ignored. Raises EngineDeadError, now or later."""
        return self.ask(lambda: self._abort(self._mailboxes.get(request_id)))

    def discard(self, mailbox: Mailbox) -> None:
        """Nobody reads it any more. Called by destructors as well, hence without the lock."""
        self._commands.put(_Command(lambda: self._abort(mailbox)))

    def ask(self, work: Callable[[], None]) -> Future[None]:
        """Has something done between two steps. Raises EngineDeadError, now or as the answer."""
        answer: Future[None] = Future()
        with self._lock:
            self.raise_if_dead()
            self._commands.put(_Command(work, answer))
        return answer

    def stats(self) -> EngineStats:
        return self._keeper.snapshot()

    def refuse(self, reason: str) -> None:
        """Takes no more requests. Those that are there go on."""
        with self._lock:
            self._death = self._death or reason

    def stop(self) -> None:
        """Aborts all requests, and ends the thread and the ranks. Idempotent."""
        self.refuse("it was shut down")
        self._commands.put(_Command(self._prepare_to_stop))
        self._thread.join(_STOP_SECONDS)
        if self._thread.is_alive():
            # It waits for a step that does not end: without ranks, it will.
            self.engine.close()
            self._thread.join(_STOP_SECONDS)

    # What follows runs in the loop's thread.

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
            self.engine.close()

    def _loop(self) -> None:
        engine = self.engine
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
                self.engine.executor.check_health()
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

    def _add(self, mailbox: Mailbox, request: Request) -> None:
        if self._mailboxes.get(mailbox.request_id) is not mailbox:
            return
        mailbox.request = request
        self.engine.add([request])
        for completion in request.completions:
            self._live[completion.seq.seq_id] = _Live(mailbox, completion, SequenceTimeline(completion.seq))
        if mailbox.is_aborted:
            self._abort(mailbox)

    def _fail(self, mailbox: Mailbox, error: Exception) -> None:
        if self._mailboxes.get(mailbox.request_id) is mailbox:
            del self._mailboxes[mailbox.request_id]
            post([(mailbox, error)])

    def _abort(self, *mailboxes: Mailbox | None) -> None:
        ended = []
        for mailbox in mailboxes:
            # By now the id may be another's.
            if mailbox is None or self._mailboxes.get(mailbox.request_id) is not mailbox:
                continue
            mailbox.is_aborted = True
            if mailbox.request is None:  # its prompt is still being tokenized; `_add` will do it
                continue
            self.engine.abort([mailbox.request])
            sequences = [completion.seq for completion in mailbox.request.completions]
            ended += [self._live[seq.seq_id] for seq in sequences if seq.seq_id in self._live]
        self._tell(ended, monotonic())

    def _prepare_to_stop(self) -> None:
        self._is_stopping = True
        self._publish()
        self._abort(*list(self._mailboxes.values()))

    def _publish(self) -> None:
        """Tells what the last step brought, if that has not been done."""
        news, self._news = self._news, []
        # Those that were aborted since have been told so.
        self._tell([live for live in news if live.completion.seq.seq_id in self._live], self._news_time)

    def _tell(self, changed: list[_Live], now: float) -> None:
        """Posts what these sequences have grown by, and keeps the statistics."""
        if not changed:
            return
        iteration = IterationStats()
        letters: list[Letter] = []
        for live in changed:
            seq, mailbox = live.completion.seq, live.mailbox
            self._keeper.count(live.timeline, now, iteration)
            if seq.is_finished:
                self._live.pop(seq.seq_id, None)
                if mailbox.request is not None and mailbox.request.is_done:
                    self._mailboxes.pop(mailbox.request_id, None)
            if seq.error is not None:
                # With all other completions, which end with nobody told. Not at once: a step may be on its way.
                letters.append((mailbox, RequestFailedError(f"{type(seq.error).__name__}: {seq.error}")))
                self.discard(mailbox)
            elif seq.is_finished or mailbox.kind is not RequestOutputKind.FINAL_ONLY:
                letters.append((mailbox, live.completion.new_delta()))
        for mailbox in post(letters):
            self.discard(mailbox)
        for listener in list(self.stats_listeners):
            try:
                listener(iteration)
            except Exception:
                logger.exception("a listener for statistics raised, and is not called any more")
                self.stats_listeners.remove(listener)

    def _die(self, reason: str) -> None:
        """Whatever is waited for ends now, with an error."""
        with self._lock:
            self._death = reason
        with suppress(queue.Empty):
            while True:
                answer = self._commands.get_nowait().answer
                if answer is not None and answer.set_running_or_notify_cancel():
                    answer.set_exception(EngineDeadError(f"the engine is dead: {reason}"))
        letters: list[Letter] = [
            (mailbox, EngineDeadError(f"the engine is dead: {reason}")) for mailbox in self._mailboxes.values()
        ]
        self._mailboxes.clear()
        post(letters)
