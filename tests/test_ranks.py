"""Rank processes behave: whatever a rank or the user's program does, the pending call raises within seconds with the
cause, nothing is left (no process, no file descriptor, no file), Ctrl-C leaves a working engine, and engines don't get
into each other's way. Also the messages and the collectives that they speak with.

Facts about processes come from /proc. Waiting is always for such a fact, with a deadline.
"""

from __future__ import annotations

import array
import fcntl
import gc
import itertools
import json
import logging
import os
import queue
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import termios
import threading
import time
import types
import typing
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

import faulty_worker
import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kit import wait_until

from nanoinfer import LLM, SamplingParams
from nanoinfer.config import EngineConfig, ModelConfig, SchedulerConfig
from nanoinfer.executor import messages, multiproc, rank_process, worker_main
from nanoinfer.executor.base import EngineDeadError, Executor
from nanoinfer.executor.multiproc import MultiprocExecutor
from nanoinfer.step import KVCacheCapacity, NewSequence, SchedulerOutput, StepResult, TokenLogprobs

TESTS = Path(__file__).parent
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "num_kvcache_blocks": 64,
    "kvcache_block_size": 8,
    "seed": 0,
    "async_scheduling": True,  # the harder case: a step is with the ranks while another one runs
    "step_timeout": 30.0,  # so that a fault is not a test that hangs
}
# What a call that fails may take. The machine may be busy; a hang is minutes.
SECONDS = 20.0
PROMPTS = [[5, 6, 7], [300, 2], [9]]
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


# --- Facts about processes ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Process:
    """A process, told from a later one of the same number by when it was started."""

    pid: int
    start_time: str

    @property
    def is_alive(self) -> bool:
        state = _stat(self.pid)
        return state is not None and state[19] == self.start_time and state[0] not in "ZX"


def _stat(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat after the name: state, parent, ..."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None


def children(parent: int) -> list[Process]:
    """The rank processes of a program, dead or alive, in the order of their start."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (stat := _stat(int(entry.name))) is not None and int(stat[1]) == parent:
            found.append(Process(int(entry.name), stat[19]))
    return sorted(found, key=lambda process: (int(process.start_time), process.pid))


def ranks_of(parent: int) -> list[Process]:
    return [process for process in children(parent) if b"worker" in Path(f"/proc/{process.pid}/cmdline").read_bytes()]


def assert_gone(ranks: list[Process], seconds: float = 10.0) -> None:
    assert ranks
    wait_until(lambda: not any(rank.is_alive for rank in ranks), "all ranks gone", seconds)


def open_files(pid: int | None = None) -> list[str]:
    """What the file descriptors of a process, or of this one, are; not those of its terminal."""
    found = []
    for path in Path(f"/proc/{pid or os.getpid()}/fd").iterdir():
        # The one with which the folder is read is gone by now.
        with suppress(FileNotFoundError):
            if int(path.name) > 2:
                found.append(os.readlink(path))
    return found


@pytest.fixture
def leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a test starts, opens or writes to the temporary directory is gone when it ends."""
    directory = tmp_path / "temporary"
    directory.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    before, descriptors = children(os.getpid()), open_files()
    yield
    assert children(os.getpid()) == before, "processes are left"
    assert len(open_files()) <= len(descriptors), f"left open: {set(open_files()) - set(descriptors)}"
    assert list(directory.iterdir()) == []


@pytest.fixture(autouse=True)
def is_bounded() -> Iterator[None]:
    """A test that hangs fails, whatever it is waiting for in the main thread."""

    def raise_error(number: int, frame: FrameType | None) -> None:
        raise AssertionError("the test hangs")

    previous = signal.signal(signal.SIGALRM, raise_error)
    signal.setitimer(signal.ITIMER_REAL, 58)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, previous)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp("model"))


class Model:
    """A model of one layer, what it must answer, and engines over it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.reference = tiny.Reference(tiny.save(directory, num_hidden_layers=1))

    def start(self, size: int = 2, **options: Any) -> LLM:
        return LLM(self.directory, tensor_parallel_size=size, **{**OPTIONS, **options})

    def start_ranks(self, **options: Any) -> tuple[LLM, list[Process]]:
        """An engine over two ranks, and its rank processes."""
        before = ranks_of(os.getpid())
        llm = self.start(**options)
        ranks = [rank for rank in ranks_of(os.getpid()) if rank not in before]
        assert len(ranks) == 2 and all(rank.is_alive for rank in ranks)
        return llm, ranks

    def assert_answers(self, llm: LLM) -> None:
        self.assert_right(answers(llm))

    def assert_right(self, pairs: list[tuple[list[int], list[int]]]) -> None:
        assert len(pairs) > 1
        for prompt, output in pairs:
            assert len(output) == 8
            self.reference.assert_greedy(prompt, output)


def answers(llm: LLM) -> list[tuple[list[int], list[int]]]:
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    return [(prompt, output.token_ids) for prompt, output in zip(PROMPTS, outputs, strict=True)]


def set_fault(monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
    monkeypatch.setattr(MultiprocExecutor, "worker_module", "faulty_worker")
    monkeypatch.setenv(faulty_worker.VARIABLE, json.dumps(options))


def assert_dead(llm: LLM, ranks: list[Process], why: str) -> None:
    """The engine says at once that it is dead, and why; closing it is no error; its ranks are gone."""
    assert not any(rank.is_alive for rank in ranks)
    for _ in range(2):
        begin = time.monotonic()
        with pytest.raises(EngineDeadError, match="engine is dead") as caught:
            llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        assert why in str(caught.value)
        assert time.monotonic() - begin < SECONDS
    llm.close()
    llm.close()


# --- A rank fails while it starts --------------------------------------------------------------------------------


@pytest.mark.usefixtures("leaves_nothing")
@pytest.mark.parametrize(("place", "rank"), [("load", 1), ("join", 0), ("allocate", 1)])
def test_a_value_error_of_a_rank_that_starts_is_raised_as_it_is(
    place: str, rank: int, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_fault(monkeypatch, place=place, rank=rank, what="ValueError")
    begin = time.monotonic()
    with pytest.raises(ValueError, match=f"^{faulty_worker.MESSAGE}$"):
        model.start()
    assert time.monotonic() - begin < SECONDS


@pytest.mark.usefixtures("leaves_nothing")
@pytest.mark.parametrize(("place", "rank", "function"), [("load", 1, "faulty_load"), ("join", 1, "faulty_join")])
def test_another_error_of_a_rank_that_starts_is_raised_with_the_rank_s_traceback(
    place: str, rank: int, function: str, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_fault(monkeypatch, place=place, rank=rank, what="RuntimeError")
    begin = time.monotonic()
    with pytest.raises(EngineDeadError, match=f"rank {rank}") as caught:
        model.start()
    assert time.monotonic() - begin < SECONDS
    assert f"RuntimeError: {faulty_worker.MESSAGE}" in str(caught.value)
    assert function in str(caught.value) and "faulty_worker.py" in str(caught.value)


@pytest.mark.usefixtures("leaves_nothing")
def test_a_rank_that_exits_while_it_starts_is_named_with_its_status(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_fault(monkeypatch, place="load", rank=1, what="exit")
    with pytest.raises(EngineDeadError, match=rf"rank 1\b.*status {faulty_worker.STATUS}"):
        model.start()


@pytest.mark.usefixtures("leaves_nothing")
def test_ranks_that_cannot_even_start_are_an_error(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MultiprocExecutor, "worker_module", "there_is_no_such_module")
    with pytest.raises(EngineDeadError, match="status 1"):
        model.start()


@pytest.mark.usefixtures("leaves_nothing")
def test_a_checkpoint_that_ranks_find_unusable_is_the_same_error_as_with_one_rank(model: Model, tmp_path: Path) -> None:
    for path in model.directory.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes()[: 100_000 if "safetensors" in path.name else None])
    with pytest.raises(ValueError, match="safetensors") as alone:
        LLM(tmp_path, **OPTIONS)
    with pytest.raises(ValueError, match="safetensors") as together:
        LLM(tmp_path, tensor_parallel_size=2, **OPTIONS)
    assert str(together.value) == str(alone.value)


# --- A rank fails in a step --------------------------------------------------------------------------------------


@pytest.mark.usefixtures("leaves_nothing")
@pytest.mark.parametrize("what", ["RuntimeError", "ValueError"])
def test_an_error_in_a_step_is_raised_with_the_rank_s_traceback(
    what: str, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_fault(monkeypatch, place="step", rank=1, step=5, what=what)
    llm, ranks = model.start_ranks()
    begin = time.monotonic()
    with pytest.raises(EngineDeadError, match="rank 1 raised") as caught:
        llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert time.monotonic() - begin < SECONDS
    assert f"{what}: {faulty_worker.MESSAGE}" in str(caught.value)
    assert "faulty_logits" in str(caught.value)
    assert_dead(llm, ranks, faulty_worker.MESSAGE)


@pytest.mark.usefixtures("leaves_nothing")
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_exits_in_a_step_is_named_with_its_status(
    rank: int, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_fault(monkeypatch, place="step", rank=rank, step=5, what="exit")
    llm, ranks = model.start_ranks()
    begin = time.monotonic()
    why = rf"rank {rank}\b.*status {faulty_worker.STATUS}"
    with pytest.raises(EngineDeadError, match=why):
        llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert time.monotonic() - begin < SECONDS
    assert_dead(llm, ranks, f"status {faulty_worker.STATUS}")


@pytest.mark.usefixtures("leaves_nothing")
@pytest.mark.parametrize("what", ["RuntimeError", "exit"])
def test_the_rank_that_failed_is_named_even_when_the_others_have_failed_of_it_since(
    what: str, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others' collectives break when a rank is gone; their error is no news."""
    set_fault(monkeypatch, place="step", rank=1, step=1, what=what)
    llm, ranks = model.start_ranks()
    llm.engine.add_requests(PROMPTS, GREEDY)
    handle = llm.engine.executor.submit(llm.engine.scheduler.schedule())
    # The engine is late: by now all of them have failed.
    wait_until(lambda: not any(rank.is_alive for rank in ranks), "all ranks have failed")
    with pytest.raises(EngineDeadError) as caught:
        handle.result()
    cause = f"RuntimeError: {faulty_worker.MESSAGE}" if what == "RuntimeError" else f"status {faulty_worker.STATUS}"
    assert cause in str(caught.value)
    assert "rank 1" in str(caught.value)
    assert_dead(llm, ranks, cause)


@pytest.mark.usefixtures("leaves_nothing")
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_killed_is_named_with_the_signal(victim: int, model: Model) -> None:
    llm, ranks = model.start_ranks()
    model.assert_answers(llm)
    num_steps = 0

    def kill_in_fifth_step(stats: object) -> None:
        nonlocal num_steps
        num_steps += 1
        if num_steps == 5:
            os.kill(ranks[victim].pid, signal.SIGKILL)

    llm.engine.on_step = kill_in_fifth_step
    begin = time.monotonic()
    with pytest.raises(EngineDeadError, match=rf"rank {victim}\b.*SIGKILL"):
        llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert time.monotonic() - begin < SECONDS
    assert_dead(llm, ranks, "SIGKILL")


@pytest.mark.usefixtures("leaves_nothing")
def test_a_rank_that_sleeps_is_an_error_that_tells_the_time_out_and_what_each_rank_is_at(
    model: Model, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    set_fault(monkeypatch, place="step", rank=1, step=5, what="sleep", folder=str(tmp_path))
    llm, ranks = model.start_ranks(step_timeout=2.0)
    begin = time.monotonic()
    with pytest.raises(EngineDeadError, match="2 s") as caught:
        llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert 2 <= time.monotonic() - begin < SECONDS
    first, second = str(caught.value).split("rank 1", 1)
    assert "rank 0" in first and "all_gather" in first, "rank 0 waits for the other in a collective"
    assert "faulty_worker.py" in second and "fail" in second, "rank 1 sleeps"
    assert_dead(llm, ranks, "2 s")


@pytest.mark.parametrize("depth", [1, 150])
def test_the_end_of_a_stack_is_found_and_no_earlier(depth: int, tmp_path: Path) -> None:
    """A rank writes its stack piece by piece, which a busy machine can stretch out."""
    program = "def dive(n):\n    dive(n - 1) if n else faulthandler.dump_traceback(all_threads=False)\n"
    (tmp_path / "deep.py").write_text(f"import faulthandler\n{program}dive({depth})\n")
    command = [sys.executable, "-c", rank_process._BOOT, "deep", json.dumps([str(tmp_path), *sys.path])]
    stack = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    assert stack.count("in dive") == min(depth + 1, 100)
    assert [n for n in range(len(stack) + 1) if rank_process._STACK_END.search(stack[:n])] == [len(stack)]


@pytest.mark.usefixtures("leaves_nothing")
@pytest.mark.parametrize("victim", [0])
def test_a_rank_that_cannot_even_tell_where_it_hangs_is_an_error_all_the_same(victim: int, model: Model) -> None:
    llm, ranks = model.start_ranks(step_timeout=2.0)
    os.kill(ranks[victim].pid, signal.SIGSTOP)
    begin = time.monotonic()
    with pytest.raises(EngineDeadError, match="2 s"):
        llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert 2 <= time.monotonic() - begin < SECONDS
    assert_dead(llm, ranks, "2 s")


@pytest.mark.usefixtures("leaves_nothing")
def test_a_rank_that_takes_no_more_commands_is_an_error_too(model: Model) -> None:
    """A plan larger than what the kernel holds between two processes waits for the rank to take it."""
    llm, ranks = model.start_ranks(step_timeout=2.0)
    os.kill(ranks[1].pid, signal.SIGSTOP)
    begin = time.monotonic()
    with pytest.raises(EngineDeadError, match="2 s"):
        llm.engine.executor.submit(large_plan()).result()
    assert 2 <= time.monotonic() - begin < SECONDS
    assert_dead(llm, ranks, "2 s")


# --- An engine that lives: what it uses, and what it leaves alone ------------------------------------------------


@pytest.fixture(scope="module")
def engine(model: Model) -> Iterator[tuple[LLM, list[Process]]]:
    llm, ranks = model.start_ranks()
    yield llm, ranks
    llm.close()


Engine = tuple[LLM, list[Process]]


def test_messages_do_not_go_through_shared_memory(model: Model, engine: Engine) -> None:
    llm, ranks = engine
    model.assert_answers(llm)
    for process in [Process(os.getpid(), ""), *ranks]:
        assert not [name for name in open_files(process.pid) if "/dev/shm" in name]
        mappings = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
        shared = [line for line in mappings if "/dev/shm" in line or "SYSV" in line]
        # tqdm makes a lock, in a page of its own.
        assert all("/dev/shm/sem." in line for line in shared) and len(shared) <= 2


@pytest.mark.usefixtures("leaves_nothing")
def test_nccl_finds_the_file_in_which_ranks_have_met_as_long_as_they_live(
    model: Model, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its monitor asks the store every second; a FileStore waits for a file that is gone, and with it who leaves."""

    def file_of(llm: LLM) -> Path:
        executor = llm.engine.executor
        assert isinstance(executor, MultiprocExecutor)
        return Path(executor._directory, "rendezvous")

    assert not file_of(engine[0]).exists(), "gloo does not need it any more"
    set_fault(monkeypatch, place="card")
    with model.start() as llm:
        model.assert_answers(llm)
        assert file_of(llm).stat().st_size > 0


def test_what_a_rank_listens_on_is_loopback(engine: Engine) -> None:
    sockets = {name for rank in engine[1] for name in open_files(rank.pid)}
    addresses = set()
    for table in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/{os.getpid()}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if f"socket:[{fields[9]}]" in sockets:
                addresses.add(fields[1].rpartition(":")[0])
    assert addresses, "gloo speaks over TCP"
    # 127.0.0.1, ::1 and ::ffff:127.0.0.1 in the byte order of the tables.
    assert addresses <= {"0100007F", "0" * 24 + "01000000", "0000000000000000FFFF00000100007F"}


def test_ranks_share_no_socket_with_the_program_or_with_each_other(engine: Engine) -> None:
    """Else one that is closed here would stay open there, and nobody would be told."""
    first, second = ({name for name in open_files(rank.pid) if "socket:" in name} for rank in engine[1])
    assert first and second
    assert not first & second
    assert not (first | second) & set(open_files())


@pytest.mark.usefixtures("leaves_nothing")
def test_torch_signals_and_environment_of_the_program_stay_as_the_user_has_set_them(model: Model) -> None:
    def state() -> dict[str, Any]:
        return {
            "dtype": torch.get_default_dtype(),
            "device": torch.get_default_device(),
            "threads": torch.get_num_threads(),
            "interop threads": torch.get_num_interop_threads(),
            "grad": torch.is_grad_enabled(),
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "precision": torch.get_float32_matmul_precision(),
            "random": torch.get_rng_state().tolist(),
            "python's random": random.getstate(),
            "distributed": torch.distributed.is_initialized(),
            "environment": dict(os.environ),
            "signals": {number: signal.getsignal(number) for number in signal.valid_signals()},
            "path": list(sys.path),
            "directory": os.getcwd(),
            "excepthook": (sys.excepthook, threading.excepthook),
        }

    dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    torch.set_num_threads(3)
    try:
        before = state()
        with model.start() as llm:
            pairs = answers(llm)
            assert state() == before
        assert state() == before
    finally:
        torch.set_default_dtype(dtype)
        torch.set_default_device("cpu")
        torch.set_num_threads(threads)
    model.assert_right(pairs)


@pytest.mark.parametrize("is_chosen", [False, True])
def test_ranks_share_the_cores_unless_the_user_has_set_omp_num_threads(
    is_chosen: bool, model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    set_fault(monkeypatch, place="report", folder=str(tmp_path))
    cores = len(os.sched_getaffinity(0))
    with suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        cores = min(cores, max(1, int(quota) // int(period)))
    expected = cores if is_chosen else max(1, cores // 2)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if is_chosen:
        monkeypatch.setenv("OMP_NUM_THREADS", str(expected))
    environment = dict(os.environ)
    with caplog.at_level(logging.INFO), model.start():
        pass
    for rank in range(2):
        assert torch.load(tmp_path / f"rank{rank}.pt", weights_only=False)["threads"] == expected
    assert re.search(rf"\b{expected} thread", caplog.text)
    assert dict(os.environ) == environment


# --- Ctrl-C ------------------------------------------------------------------------------------------------------


@contextmanager
def ctrl_c_when(fact: Callable[[], bool]) -> Iterator[None]:
    """One SIGINT to this process, in the block, as soon as that is true. Expects the KeyboardInterrupt."""
    is_inside, is_done = False, threading.Event()

    def handler(number: int, frame: FrameType | None) -> None:
        if is_inside and not is_done.is_set():
            is_done.set()
            raise KeyboardInterrupt

    def send() -> None:
        while not is_done.wait(0.002):
            if fact():
                os.kill(os.getpid(), signal.SIGINT)

    previous = signal.signal(signal.SIGINT, handler)
    sender = threading.Thread(target=send)
    try:
        with pytest.raises(KeyboardInterrupt):
            is_inside = True
            sender.start()
            yield
    finally:
        is_inside = False
        is_done.set()
        sender.join()
        signal.signal(signal.SIGINT, previous)


ENDLESS = SamplingParams(temperature=0, max_tokens=100_000, ignore_eos=True)


def test_ctrl_c_at_any_moment_of_generate_is_raised_and_the_engine_answers_as_before(
    model: Model, engine: Engine
) -> None:
    llm, ranks = engine
    rng = random.Random(0)
    for _ in range(12):
        moment = time.monotonic() + rng.random() * 0.2
        with ctrl_c_when(lambda moment=moment: time.monotonic() >= moment):
            while True:
                llm.generate(PROMPTS * 3, ENDLESS, use_tqdm=False)
        assert not llm.engine.has_unfinished
        model.assert_answers(llm)
        llm.engine.scheduler.check()
    assert all(rank.is_alive for rank in ranks)


@pytest.mark.usefixtures("leaves_nothing")
def test_ctrl_c_while_a_rank_starts_is_raised_at_once(
    model: Model, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    set_fault(monkeypatch, place="load", rank=1, what="sleep", folder=str(tmp_path))
    with ctrl_c_when((tmp_path / "asleep").exists):
        model.start()
    asleep_since = (tmp_path / "asleep").stat().st_mtime
    assert time.time() - asleep_since < SECONDS


@pytest.mark.usefixtures("leaves_nothing")
def test_ctrl_c_gets_out_of_a_step_that_hangs_and_close_ends_its_ranks_all_the_same(
    model: Model, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    set_fault(monkeypatch, place="step", rank=1, step=3, what="sleep", folder=str(tmp_path))
    llm, ranks = model.start_ranks()
    with ctrl_c_when((tmp_path / "asleep").exists):
        llm.generate(PROMPTS, ENDLESS, use_tqdm=False)
    assert all(rank.is_alive for rank in ranks)
    begin = time.monotonic()
    llm.close()
    assert time.monotonic() - begin < SECONDS
    assert not any(rank.is_alive for rank in ranks)


@pytest.fixture(scope="module")
def echo(model: Model) -> Iterator[Echo]:
    """Ranks that answer a plan with its checksum."""
    with pytest.MonkeyPatch.context() as patch:
        set_fault(patch, place="echo")
        llm = model.start()
    yield Echo(llm.engine.executor)
    llm.close()


class Echo:
    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self.num_plans = 0

    def submit(self, plan: SchedulerOutput) -> Callable[[], StepResult]:
        """Both ranks must have got this plan, and each plan once. Returns how to wait for the answer."""
        self.num_plans += 1
        number, handle = self.num_plans, self.executor.submit(plan)

        def result() -> StepResult:
            answer = handle.result()
            expected = [faulty_worker.checksum(plan), number]
            assert [answer.token_ids[0], answer.token_ids[1]] == [expected, expected]
            return answer

        return result

    def submit_after_interruption(self, plan: SchedulerOutput) -> None:
        """The same, when it isn't known whether the ranks got the plan before."""
        answer = self.executor.submit(plan).result()
        assert answer.token_ids[0] == answer.token_ids[1]
        assert answer.token_ids[0][0] == faulty_worker.checksum(plan)
        assert answer.token_ids[0][1] - self.num_plans in (1, 2)
        self.num_plans = answer.token_ids[0][1]


def test_of_thousands_of_commands_in_a_row_none_is_lost_doubled_or_overtaken(echo: Echo) -> None:
    for number in range(2000):
        echo.submit(SchedulerOutput(dropped=[number]))()


def test_the_answer_to_a_step_is_its_own_when_earlier_answers_were_never_fetched(echo: Echo) -> None:
    rng = random.Random(0)
    for number in range(100):
        for i in range(rng.randrange(6)):
            echo.submit(SchedulerOutput(dropped=[number, i]))
        echo.submit(SchedulerOutput(dropped=[number]))()


def large_plan() -> SchedulerOutput:
    """More than 20 MB."""
    new = NewSequence(1, list(range(10**6, 5 * 10**6)), 4, 0, [1, 2], SamplingParams(), 2**64 - 1, (5,))
    plan = SchedulerOutput(new=[new])
    assert len(messages.encode(messages.Step(1, plan))) > 20_000_000
    return plan


def test_plans_and_answers_of_any_size_arrive_whole(echo: Echo) -> None:
    echo.submit(large_plan())()
    for number in range(3):
        answer = echo.submit(SchedulerOutput(dropped=[-1, number]))()
        assert answer.token_ids[-1] == list(range(100_000))


def test_a_large_plan_may_follow_a_step_whose_large_answer_nobody_has_taken(echo: Echo) -> None:
    """Neither side can take what the other sends while it sends itself."""
    first = echo.submit(SchedulerOutput(dropped=[-1, 5]))
    echo.num_plans += 1  # an empty one tells that the ranks are idle
    second = echo.submit(large_plan())
    third = echo.submit(SchedulerOutput(dropped=[6]))
    for result in (first, second, third):
        result()


@pytest.mark.parametrize("num_ahead", [0, 1])
def test_a_rank_launches_what_has_come_before_it_waits_for_a_step(
    num_ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: each step here is over when the next one has been launched, and the last one at once."""
    num_launched, last = 0, 5

    class Running:
        def __init__(self, index: int) -> None:
            self.index = index

        def is_over(self) -> bool:
            return num_ahead == 0 or self.index == last or num_launched > self.index

        def result(self) -> StepResult:
            assert self.is_over(), "the rank waits for a step though the next one is there"
            return StepResult(token_ids={self.index: [num_launched]})

    class Runner:
        def capacity(self) -> KVCacheCapacity:
            return KVCacheCapacity(1, 1, 1, 1, "cpu", "float32")

        def launch(self, plan: SchedulerOutput) -> Running:
            nonlocal num_launched
            num_launched += 1
            return Running(num_launched)

    groups = types.SimpleNamespace(tp=types.SimpleNamespace(seconds=0.0))
    monkeypatch.setattr(worker_main, "_load", lambda start: (Runner(), groups))
    monkeypatch.setattr(worker_main, "_exit_with_parent", lambda *_: None)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(10)
        config = EngineConfig("m")
        model_config = ModelConfig.from_dict({**tiny.Qwen3Config(**tiny.BASE).to_dict(), "model_type": "qwen3"})
        rank = threading.Thread(target=worker_main._serve, args=(theirs,), daemon=True)
        rank.start()
        ours.sendall(messages.encode(messages.Start(config, model_config, "m", 0, 0, "")))
        assert isinstance(messages.receive(ours), messages.Started)
        ours.sendall(messages.encode(messages.Step(1, SchedulerOutput())))
        for index in range(1, last + 1):
            if index < last:
                ours.sendall(messages.encode(messages.Step(index + 1, SchedulerOutput())))
            done = messages.receive(ours)
            assert isinstance(done, messages.StepDone) and done.index == index
            assert list(done.result.token_ids) == [index]
            if num_ahead:
                assert done.result.token_ids[index] == [min(index + 1, last)]
        ours.sendall(messages.encode(messages.Shutdown()))
        rank.join(10)
        assert not rank.is_alive()


def _interrupt_at_line(number: int, files: set[str], call: Callable[[], object]) -> bool:
    """SIGINT when the call reaches its `number`-th line within `files`. False if it ends before."""
    left = number

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal left
        if frame.f_code.co_filename not in files:
            return None
        if event == "line":
            left -= 1
            if left == 0:
                signal.raise_signal(signal.SIGINT)
        return trace

    before, handler = sys.gettrace(), signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        assert left <= 0
    finally:
        sys.settrace(before)
        signal.signal(signal.SIGINT, handler)
    return left <= 0


@pytest.mark.parametrize(("device", "has_gpu", "compiles"), [
    ("cpu", False, True), ("cpu", True, True), ("auto", False, True), ("auto", True, False), ("cuda", True, False),
])  # fmt: skip
def test_cpu_kernels_are_not_compiled_for_ranks_that_a_gpu_may_run(
    device: str, has_gpu: bool, compiles: bool, tmp_path: Path
) -> None:
    control = tmp_path / "nvidiactl"
    if has_gpu:
        control.touch()
    assert multiproc.may_run_on_cpu(device, control) is compiles


@pytest.mark.parametrize("size", ["small", "large"])
def test_ctrl_c_at_any_line_of_a_step_leaves_the_ranks_in_step(size: str, echo: Echo) -> None:
    import contextlib

    files = {module.__file__ or "" for module in (multiproc, messages, contextlib)}
    extra = [-1] if size == "large" else []
    for line in itertools.count(1):
        plan = SchedulerOutput(dropped=[line, *extra])
        was_interrupted = _interrupt_at_line(line, files, lambda plan=plan: echo.executor.submit(plan).result())
        echo.submit_after_interruption(SchedulerOutput(dropped=[-2, line]))
        if not was_interrupted:
            break
    assert line > 40, "the trace saw too little"


# --- Messages ----------------------------------------------------------------------------------------------------


def every_message(directory: Path) -> list[messages.Command | messages.Reply]:
    config = EngineConfig.create(directory, tensor_parallel_size=2, seed=7)
    params = SamplingParams(temperature=0.5, stop=["é\n"], stop_token_ids=[3, 4], logprobs=2, seed=-1)
    new = NewSequence(2**40, [1, 2, 319], 2, 1, [0, 63], params, 2**64 - 1, (2, 5))
    plan = SchedulerOutput(new=[new], num_scheduled_tokens={2**40: 2, 3: 1}, new_block_ids={3: [7]}, dropped=[1])
    logprobs = [TokenLogprobs([5, 6], [-0.5, float("-inf")], [1, 2])]
    result = StepResult(token_ids={3: [5]}, logprobs={3: logprobs})
    return [
        messages.Start(config, ModelConfig.from_directory(directory), str(directory), 2**63 - 1, 1, "/tmp/é"),
        messages.Allocate(SchedulerConfig(256, 1024, 4096, 100, 16)),
        messages.Step(2**40, plan),
        messages.Step(0, replace(plan, forget_all=True)),
        messages.Shutdown(),
        messages.Started(KVCacheCapacity(100, 16, 4096, 1024, "cpu", "float32")),
        messages.Allocated(),
        messages.StepDone(9, result, 0.25, 0.125),
        messages.Failed("Traceback ...\né", None, 1.5),
        messages.Failed("", "no", 0.0),
        messages.Step(1, large_plan()),
    ]


def test_every_message_arrives_as_it_was_sent(model: Model) -> None:
    sent = every_message(model.directory)
    assert {type(message) for message in sent} == {
        *typing.get_args(messages.Command),
        *typing.get_args(messages.Reply),
    }
    here, there = socket.socketpair()
    with here, there:
        sender = threading.Thread(target=lambda: [here.sendall(messages.encode(message)) for message in sent])
        sender.start()
        received = [messages.receive(there) for _ in sent]
        sender.join()
        assert received == sent
        here.close()
        with pytest.raises(EOFError):
            messages.receive(there)


def test_the_end_of_a_connection_within_a_message_is_an_error() -> None:
    frame = messages.encode(messages.Failed("Traceback", None, 1.5))
    for cut in range(len(frame)):
        here, there = socket.socketpair()
        with there:
            here.sendall(frame[:cut])
            here.close()
            with pytest.raises(EOFError):
                messages.receive(there)


def _num_waiting(sock: socket.socket) -> int:
    count = array.array("i", [0])
    fcntl.ioctl(sock, termios.FIONREAD, count)
    return count[0]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.one_of(st.integers(0, 40), st.integers(65_000, 66_000), st.just(80_000)), min_size=1, max_size=5),
    st.lists(st.one_of(st.integers(1, 20), st.integers(1, 40_000)), max_size=12),
)
def test_a_message_that_has_not_come_in_full_is_never_begun(sizes: list[int], pieces: list[int]) -> None:
    sent = [messages.Failed("x" * size, str(index), 0.0) for index, size in enumerate(sizes)]
    frames = [messages.encode(message) for message in sent]
    stream = b"".join(frames)
    received: list[object] = []
    here, there = socket.socketpair()
    with here, there:
        position = num_taken = 0
        for piece in itertools.chain(pieces, itertools.repeat(40_000)):
            here.sendall(stream[position : position + piece])
            position = min(position + piece, len(stream))
            while (num_waiting := _num_waiting(there)) > 0:
                message = messages.receive_at_once(there)
                frame = frames[len(received)]
                if message is None:
                    assert _num_waiting(there) == num_waiting, "something was taken"
                    if num_waiting < len(frame):
                        break
                    assert len(frame) > 60_000, "a small message that has come in full was left"
                    message = messages.receive(there)
                assert num_waiting - _num_waiting(there) == len(frame)
                received.append(message)
                num_taken += len(frame)
            assert position - num_taken == _num_waiting(there)
            if position == len(stream):
                break
        assert received == sent


# --- Collectives -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 3])
def test_collectives_over_gloo_are_sums_and_concatenations_for_any_dtype_and_layout(size: int, tmp_path: Path) -> None:
    program = str(TESTS / "collective_program.py")
    ranks = [
        subprocess.Popen(
            [sys.executable, program, str(rank), str(size), str(tmp_path / "rendezvous")],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        for rank in range(size)
    ]
    try:
        outputs = [rank.communicate(timeout=50)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert outputs == ["all right\n"] * size


# --- Programs ----------------------------------------------------------------------------------------------------


class Program:
    """parent_program.py, in a session of its own."""

    def __init__(self, model: Model, mode: str, folder: Path, prefix: tuple[str, ...] = (), **environment: str) -> None:
        self.model = model
        self.log = folder / "log"
        self.temporary = folder / "temporary"
        self.temporary.mkdir()
        self.stderr = folder / "stderr"
        with self.stderr.open("wb") as stderr:
            self.process = subprocess.Popen(
                [*prefix, sys.executable, str(TESTS / "parent_program.py"), str(model.directory), str(self.log), mode],
                stdout=subprocess.PIPE,
                stderr=stderr,
                stdin=subprocess.DEVNULL,
                text=True,
                cwd=folder,
                env={
                    **os.environ,
                    "PYTHONPATH": str(TESTS.parent),
                    "TMPDIR": str(self.temporary),
                    **environment,
                },
                start_new_session=True,
            )
        self.seen: set[Process] = set()
        self._lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    @property
    def pid(self) -> int:
        return self.process.pid

    def ranks(self) -> list[Process]:
        ranks = ranks_of(self.pid)
        assert len(ranks) == 2
        self.seen |= set(ranks)
        return ranks

    def expect(self, what: object = None) -> None:
        """The next line: `what`, or else answers, which must be right."""
        line = self._lines.get(timeout=50)
        assert line is not None, f"the program ended: {self.stderr.read_text()}"
        if what is not None:
            assert json.loads(line) == what
        else:
            self.model.assert_right(json.loads(line))

    def expect_end(self) -> int:
        assert self._lines.get(timeout=50) is None
        return self.process.wait(SECONDS)

    def num_runs(self) -> int:
        return len(self.log.read_text().splitlines())

    def clean_up(self) -> None:
        for process in [*children(self.pid), *self.seen]:
            if process.is_alive:
                os.kill(process.pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait()


@pytest.fixture
def run(model: Model, tmp_path: Path) -> Iterator[Callable[..., Program]]:
    programs = []

    def start(mode: str, prefix: tuple[str, ...] = (), **environment: str) -> Program:
        programs.append(Program(model, mode, tmp_path, prefix, **environment))
        return programs[-1]

    yield start
    for program in programs:
        program.clean_up()


def test_a_script_without_main_guard_and_without_close_runs_once_and_leaves_nothing(
    run: Callable[..., Program],
) -> None:
    program = run("leave")
    program.expect()
    assert program.expect_end() == 0
    assert program.num_runs() == 1
    assert list(program.temporary.iterdir()) == []
    assert "Traceback" not in program.stderr.read_text() and "leaked" not in program.stderr.read_text()
    # Ranks are in sessions of their own, but their environment tells whose they are.
    assert _programs_with(str(program.temporary)) == []


def _programs_with(text: str) -> list[int]:
    """Living processes that have this in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdigit() and text.encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
    return found


def test_a_file_in_the_working_directory_is_not_taken_for_a_module_of_python(
    run: Callable[..., Program], tmp_path: Path
) -> None:
    """The script lies elsewhere, so Python does not look here for it; nor may its ranks."""
    for name in ("selectors", "tokenize", "random", "torch"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the wrong module was imported')\n")
    program = run("leave")
    program.expect()
    assert program.expect_end() == 0


def test_a_child_of_the_program_that_ends_does_not_end_the_program_s_ranks(run: Callable[..., Program]) -> None:
    program = run("fork")
    program.expect()
    program.expect()
    assert program.expect_end() == 0
    assert list(program.temporary.iterdir()) == []


def test_ranks_are_gone_soon_after_their_program_is_killed_in_a_collective(
    run: Callable[..., Program], tmp_path: Path
) -> None:
    fault = {"place": "step", "rank": 1, "step": 3, "what": "sleep", "folder": str(tmp_path)}
    program = run("collective", **{faulty_worker.VARIABLE: json.dumps(fault)})
    # Rank 1 sleeps in the middle of a step, so rank 0 is in a collective, waiting for it, or about to be.
    wait_until((tmp_path / "asleep").exists, "asleep", 50)
    ranks = program.ranks()
    os.kill(program.pid, signal.SIGKILL)
    assert_gone(ranks)


def test_ranks_are_gone_soon_after_their_program_is_killed_whichever_thread_made_them_and_whoever_holds_their_sockets(
    run: Callable[..., Program],
) -> None:
    program = run("thread")
    program.expect()  # the thread has ended, and the ranks live
    program.expect("waiting")
    ranks = program.ranks()
    (fork,) = [process for process in children(program.pid) if process not in ranks]
    program.seen.add(fork)
    os.kill(program.pid, signal.SIGKILL)
    assert_gone(ranks)
    assert fork.is_alive, "the test should have shown that a fork does not keep the ranks"


def test_ranks_are_gone_soon_after_their_program_is_killed_in_generate(run: Callable[..., Program]) -> None:
    program = run("interrupt")
    program.expect()
    program.expect("for ever")
    ranks = program.ranks()
    os.kill(program.pid, signal.SIGKILL)
    assert_gone(ranks)


def test_ctrl_c_to_the_process_group_is_the_program_s_alone(run: Callable[..., Program]) -> None:
    program = run("interrupt")
    program.expect()
    program.expect("for ever")
    ranks = program.ranks()
    for rank in ranks:
        # A terminal does not send it to them, which counts before they can ignore it; a job manager may.
        assert os.getpgid(rank.pid) != os.getpgid(program.pid)
        os.kill(rank.pid, signal.SIGINT)
    os.killpg(program.pid, signal.SIGINT)
    program.expect()  # right answers from an engine that was interrupted
    program.expect("for ever")
    assert program.ranks() == ranks and all(rank.is_alive for rank in ranks)
    os.killpg(program.pid, signal.SIGINT)
    assert program.expect_end() == -signal.SIGINT
    assert_gone(ranks, 1)
    stderr = program.stderr.read_text()
    assert stderr.count("Traceback") == 1 and stderr.rstrip().endswith("KeyboardInterrupt"), stderr
    assert "leaked" not in stderr
    assert list(program.temporary.iterdir()) == []


def test_ctrl_c_to_the_process_group_while_ranks_start_is_one_traceback(run: Callable[..., Program]) -> None:
    program = run("leave")
    # A rank that has become the program it is to run, but has hardly begun.
    wait_until(lambda: len(ranks_of(program.pid)) > 0, "ranks started")
    ranks = ranks_of(program.pid)
    program.seen |= set(ranks)
    os.killpg(program.pid, signal.SIGINT)
    assert program.expect_end() == -signal.SIGINT
    assert_gone(ranks, 1)
    stderr = program.stderr.read_text()
    assert stderr.count("Traceback") == 1 and stderr.rstrip().endswith("KeyboardInterrupt"), stderr
    assert list(program.temporary.iterdir()) == []


_NO_NAMESPACES = subprocess.run(["unshare", "-mnu", "true"], capture_output=True).returncode != 0


@pytest.mark.skipif(_NO_NAMESPACES, reason="needs the right to make namespaces")
def test_64_kb_of_shared_memory_a_hostname_that_nobody_knows_and_no_network_are_enough(
    run: Callable[..., Program],
) -> None:
    confine = (
        "mount -t tmpfs -o size=64k tmpfs /dev/shm && hostname nobody-knows.invalid && "
        f"{sys.executable} -c 'import fcntl, socket, struct;"
        # SIOCSIFFLAGS: loopback up.
        'fcntl.ioctl(socket.socket(socket.AF_INET, socket.SOCK_DGRAM), 0x8914, struct.pack("16sH", b"lo", 0x49))\' && '
        'exec "$@"'
    )
    program = run("leave", prefix=("unshare", "-mnu", "sh", "-ec", confine, "sh"))
    program.expect()
    assert program.expect_end() == 0
    assert list(program.temporary.iterdir()) == []


# --- Many engines ------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("leaves_nothing")
def test_four_engines_that_start_together_all_answer(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a launcher of something else has left in the environment, and whoever has nano-vllm's port."""
    with socket.socket() as taken:
        with suppress(OSError):
            taken.bind(("127.0.0.1", 2333))
            taken.listen()
        for name, value in {
            "MASTER_ADDR": "nobody-knows.invalid",
            "MASTER_PORT": "2333",
            "RANK": "5",
            "WORLD_SIZE": "8",
            "LOCAL_RANK": "5",
        }.items():
            monkeypatch.setenv(name, value)
        together = threading.Barrier(4)
        outputs: dict[int, list[Any]] = {}

        def work(number: int) -> None:
            together.wait(SECONDS)
            with model.start() as llm:
                outputs[number] = answers(llm)

        threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(outputs) == 4
    for pairs in outputs.values():
        model.assert_right(pairs)


def _measure() -> dict[str, int]:
    gc.collect()
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "bytes": int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
        "children": len(children(os.getpid())),
    }


@pytest.mark.usefixtures("leaves_nothing")
@pytest.mark.parametrize(("size", "warm_up", "cycles"), [(1, 20, 200), (2, 1, 2)])
def test_engines_that_come_and_go_leave_descriptors_threads_and_memory_as_they_were(
    size: int, warm_up: int, cycles: int, model: Model
) -> None:
    outputs: set[tuple[int, ...]] = set()

    def cycle(number: int) -> None:
        llm = model.start(size, load_format="dummy")
        outputs.add(tuple(llm.generate([[1, 2]], GREEDY, use_tqdm=False)[0].token_ids))
        if number % 2:
            llm.close()  # or else it is dropped

    for number in range(warm_up):
        cycle(number)
    before = _measure()
    for number in range(cycles):
        cycle(number)
    after = _measure()
    assert len(outputs) == 1, "the same seed must give the same dummy weights"
    assert after["descriptors"] == before["descriptors"]
    assert after["threads"] == before["threads"]
    assert after["children"] == before["children"]
    # The weights and the pool of one engine are about 1 MB, which two ranks hold apart from this process.
    assert after["bytes"] - before["bytes"] < (20 if size == 1 else 8) * 2**20


@pytest.mark.usefixtures("leaves_nothing")
def test_close_ends_the_ranks_at_once_may_be_repeated_and_is_final(model: Model) -> None:
    before = open_files()
    llm, ranks = model.start_ranks()
    engine = llm.engine
    begin = time.monotonic()
    llm.close()
    assert not any(rank.is_alive for rank in ranks)
    assert sorted(open_files()) == sorted(before), "the engine still holds files"
    assert time.monotonic() - begin < SECONDS, "ranks that are well leave when they are asked to"
    llm.close()
    engine.close()
    with pytest.raises(RuntimeError, match="closed"):
        llm.generate(PROMPTS, GREEDY)
    with pytest.raises(EngineDeadError, match="closed"):
        engine.executor.submit(SchedulerOutput(dropped=[1]))
