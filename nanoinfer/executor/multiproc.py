"""One process per rank, supervised. Start-up is data flow: ranks report what they can offer, the least is what counts.

All ranks are children, rank 0 too. Running rank 0 in the engine's process would save the hop to it and back, which is
0.18 ms a step at batch 1 (`python bench.py --step-overhead`, 2 cores, two ranks), and make a hang or a crash of rank 0
one of the engine: not worth it.

A rank that raises sends its traceback; one that dies closes its socket; one that hangs runs into `step_timeout`. In
each case the pending call raises `EngineDeadError`, every rank is killed, and later calls say that the engine is dead.
The ranks in turn watch their socket, and end when this process does.
"""

from __future__ import annotations

import logging
import os
import select
import shutil
import signal
import tempfile
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from types import FrameType
from typing import Any, NoReturn

from nanoinfer.config import EngineConfig, ModelConfig, SchedulerConfig
from nanoinfer.executor.base import EngineDeadError, Executor, StepHandle
from nanoinfer.executor.messages import (
    Allocate,
    Allocated,
    Failed,
    Reply,
    Start,
    Started,
    Step,
    StepDone,
    encode,
    receive,
    receive_at_once,
)
from nanoinfer.executor.rank_process import RankProcess, hear, how_it_ended, kill, spawn, stacks_of, stop
from nanoinfer.step import KVCacheCapacity, SchedulerOutput, StepResult

logger = logging.getLogger(__name__)

# How long to listen for what other ranks have to say once one has failed.
_NEWS_SECONDS = 1.0
# Two such are far below what a socket buffers, in which the step before may lie unread when one is sent.
_SMALL_FRAME = 1 << 14


@dataclass(frozen=True)
class _Deadline:
    seconds: float
    at: float

    @classmethod
    def of(cls, seconds: float) -> _Deadline:
        return cls(seconds, monotonic() + seconds)


class MultiprocExecutor(Executor):
    """Raises ValueError if the ranks find the model or the options unusable, EngineDeadError if one fails otherwise."""

    runs_apart = True
    # The module that a rank process runs; tests put one here that fails on purpose.
    worker_module = "nanoinfer.executor.worker_main"

    def __init__(self, config: EngineConfig, model_config: ModelConfig, model_dir: Path, seed: int) -> None:
        self._timeout, self._load_timeout = config.step_timeout, config.load_timeout
        self._death: str | None = None
        # The last step that was submitted, and the last one whose answer has been taken.
        self._last_index = self._last_taken = 0
        # Whether the last frame may lie half unread in the sockets.
        self._was_large = False
        # A frame that not all ranks may have got, because sending it was interrupted.
        self._unsure: bytes | None = None
        # Until then a rank's ValueError is about the model or the options; later it is a fault of ours.
        self._has_started = False
        # Of the last step that came back: how long rank 0 was at it, and in collectives.
        self.busy_seconds = self.collective_seconds = 0.0
        self._directory = tempfile.mkdtemp(prefix="nanoinfer-")
        self._ranks: list[RankProcess] = []
        self._by_fd: dict[int, RankProcess] = {}
        self._poller = select.poll()
        # Runs at close, at garbage collection and at interpreter exit, whichever comes first.
        self._finalizer = weakref.finalize(self, stop, self._ranks, self._directory, os.getpid())
        if may_run_on_cpu(config.device):
            _build_kernels()
        try:
            for index in range(config.tensor_parallel_size):
                self._ranks.append(spawn(index, config.tensor_parallel_size, self.worker_module))
            for rank in self._ranks:
                rank.sock.settimeout(self._timeout)
                self._by_fd[rank.sock.fileno()] = rank
                self._poller.register(rank.sock.fileno(), select.POLLIN)
            rendezvous_file = str(Path(self._directory) / "rendezvous")
            for rank in self._ranks:
                self._send(rank, encode(Start(config, model_config, str(model_dir), seed, rank.index, rendezvous_file)))
            what = "loading the model"
            self._started = [
                self._expect(Started, rank, what, _Deadline.of(self._load_timeout)) for rank in self._ranks
            ]
            if self.capacity().device == "cpu":
                shutil.rmtree(self._directory, ignore_errors=True)  # they have met
            # NCCL's monitor looks into the file every second for as long as a rank lives. Without it, it would wait for
            # the file to come back, and the rank that is to leave for the monitor.
        except BaseException:
            kill(self._ranks)
            self._finalizer()
            raise

    def capacity(self) -> KVCacheCapacity:
        return min((started.capacity for started in self._started), key=lambda capacity: capacity.num_blocks)

    def allocate(self, limits: SchedulerConfig) -> None:
        self._broadcast(encode(Allocate(limits)))
        for rank in self._ranks:
            # On a GPU graphs are captured and kernels compiled for them: a part of the start, not a step.
            self._expect(Allocated, rank, "allocating the KV cache", _Deadline.of(self._load_timeout))
        self._has_started = True

    def submit(self, plan: SchedulerOutput) -> StepHandle:
        has_unanswered = self._last_taken < self._last_index
        # The number before it is left for the empty step of `_wait_until_idle`.
        self._last_index += 2
        index = self._last_index
        frame = encode(Step(index, plan))
        if has_unanswered and len(frame) > _SMALL_FRAME:
            # The ranks take it when they are through, and we don't listen while we send: they might then be stuck with
            # a large answer, and Ctrl-C would have to wait.
            self._wait_until_idle(index - 1)
        self._broadcast(frame)
        return _Pending(self, index)

    def check_health(self) -> None:
        if self._death is not None:
            raise EngineDeadError(f"the engine is dead: {self._death}")
        if any(rank.process.poll() is not None for rank in self._ranks):
            self._blame({})

    def close(self) -> None:
        self._finalizer()
        self._death = self._death or "it was closed"

    def _wait_for_step(self, index: int) -> StepResult:
        deadline = _Deadline.of(self._timeout)
        while True:
            # Answers to steps whose caller was interrupted are still on their way; they are dropped here.
            done = self._expect(StepDone, self._ranks[0], "a step", deadline)
            if done.index == index:
                self._last_taken = index
                self.busy_seconds, self.collective_seconds = done.busy_seconds, done.collective_seconds
                return done.result

    def _wait_until_idle(self, index: int) -> None:
        """Until all steps that were submitted have been answered. Keeps their answers.

        Asks the ranks by an empty step, rather than counting answers: an interruption may have lost some.
        """
        self._broadcast(encode(Step(index, SchedulerOutput())))
        deadline = _Deadline.of(self._timeout)
        while not any(isinstance(reply, StepDone) and reply.index == index for reply in self._ranks[0].inbox):
            self._listen("a step", deadline)

    def _broadcast(self, frame: bytes) -> None:
        if self._death is not None:
            raise EngineDeadError(f"the engine is dead: {self._death}")
        is_large = len(frame) > _SMALL_FRAME
        if self._unsure is not None or is_large or self._was_large:
            # A long frame cut short would garble all that follows.
            with _uninterrupted():
                for one in filter(None, (self._unsure, frame)):
                    for rank in self._ranks:
                        self._send(rank, one)
                self._unsure, self._was_large = None, is_large
            return
        # A small frame is taken by the socket at once or not at all. If a Ctrl-C comes in between, it is sent again
        # next time, and ranks that have it already know it by its index: cheaper than putting signals off each time.
        self._unsure = frame
        for rank in self._ranks:
            self._send(rank, frame)
        self._unsure = None

    def _send(self, rank: RankProcess, frame: bytes) -> None:
        try:
            rank.sock.sendall(frame)
        except TimeoutError:
            self._fail(f"rank {rank.index} took no command for {self._timeout:g} s\n{stacks_of(self._ranks)}")
        except OSError:
            self._blame({})

    def _expect(self, kind: type[Any], rank: RankProcess, what: str, deadline: _Deadline) -> Any:
        """The next message of `rank`, which must be of that kind; meanwhile, watches over all ranks."""
        while not rank.inbox:
            self._listen(what, deadline)
        message = rank.inbox.popleft()
        assert isinstance(message, kind), f"rank {rank.index} sent {type(message).__name__}, not {kind.__name__}"
        return message

    def _listen(self, what: str, deadline: _Deadline) -> None:
        """Waits until a rank says something, and takes it in."""
        ready = self._poller.poll(1000 * max(0.0, deadline.at - monotonic()))
        if not ready:
            self._fail(f"{what} did not come to an end in {deadline.seconds:g} s\n{stacks_of(self._ranks)}")
        for fd, _ in ready:
            self._by_fd[fd].inbox.append(self._receive(self._by_fd[fd]))

    def _receive(self, rank: RankProcess) -> Reply:
        try:
            message = receive_at_once(rank.sock)
            if message is None:
                with _uninterrupted():
                    message = receive(rank.sock)
        except (EOFError, OSError):
            self._blame({})
        if isinstance(message, Failed):
            self._blame({rank.index: message})
        assert isinstance(message, Reply)
        return message

    def _blame(self, failures: dict[int, Failed]) -> NoReturn:
        """Some rank has failed. Finds the one that did so first, for its failure makes others fail; then gives up.

        failures: what has been heard already, by rank.
        """
        silent: list[RankProcess] = []
        deadline = monotonic() + _NEWS_SECONDS
        while True:
            for rank in self._ranks:
                if rank.index not in failures and rank not in silent:
                    news = hear(rank)
                    if isinstance(news, Failed):
                        failures[rank.index] = news
                    elif news == "gone":
                        silent.append(rank)
            quiet = deadline - monotonic()
            if quiet <= 0 or len(failures) + len(silent) == len(self._ranks):
                break
            select.select([], [], [], min(0.05, quiet))
        if silent:
            # Dead without a word: nothing that another rank did could cause that.
            self._fail("; ".join(map(how_it_ended, silent)))
        index, first = min(failures.items(), key=lambda item: item[1].when)
        self._fail(f"rank {index} raised\n{first.traceback}", None if self._has_started else first.user_error)

    def _fail(self, reason: str, user_error: str | None = None) -> NoReturn:
        """Tears everything down and raises."""
        self._death = reason
        kill(self._ranks)
        self._finalizer()
        if user_error is not None:
            raise ValueError(user_error) from EngineDeadError(reason)
        raise EngineDeadError(f"the engine is dead: {reason}")


@dataclass(frozen=True)
class _Pending(StepHandle):
    executor: MultiprocExecutor
    index: int

    def result(self) -> StepResult:
        return self.executor._wait_for_step(self.index)


def may_run_on_cpu(device: str, gpu_control: Path = Path("/dev/nvidiactl")) -> bool:
    """Whether ranks are likely to, as far as one can tell without torch, which this process need not load."""
    return device == "cpu" or (device == "auto" and not gpu_control.exists())


def _build_kernels() -> None:
    """Compiles the CPU kernels if need be, once for all ranks, which otherwise would wait for the first that does. What
    goes wrong, the ranks will find and say."""
    from nanoinfer.kernels.cpu.build import BuildError, build_kernels

    with suppress(BuildError):
        build_kernels()


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Puts a Ctrl-C off until the end of the block. For blocks that don't wait; in the main thread only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler):
        yield  # ignored, deadly, or not Python's: none of these comes back here as an exception
        return
    caught: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: caught.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if caught:
            handler(*caught[0])
