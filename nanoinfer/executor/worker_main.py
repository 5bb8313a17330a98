"""The main program of a rank process, started by `MultiprocExecutor` with two arguments: the file descriptors of its
socket and of the file for its stack.

Receives `Start`, joins the other ranks, loads its part of the model, then answers
commands until `Shutdown`. Whatever goes wrong is sent as a traceback before the process ends.
"""

from __future__ import annotations

import faulthandler
import gc
import logging
import os
import select
import signal
import socket
import sys
import threading
import traceback
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, perf_counter
from typing import TYPE_CHECKING

from nanoinfer.executor.messages import (
    Allocate,
    Allocated,
    Command,
    Failed,
    Reply,
    Start,
    Started,
    Step,
    StepDone,
    encode,
    has_message,
    receive,
    spin,
)

if TYPE_CHECKING:
    from nanoinfer.distributed.group import ParallelGroups
    from nanoinfer.worker.model_runner import LaunchedStep, ModelRunner


@dataclass(frozen=True)
class _Launched:
    """A step that the engine is still to be told of. Only rank 0 tells."""

    index: int
    step: LaunchedStep
    began: float
    collective_seconds: float


# About the time between two steps of a busy engine.
_SPIN_SECONDS = 0.001


def main() -> None:
    # Ctrl-C is the engine's business: it aborts requests and goes on using its ranks.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sock = socket.socket(fileno=int(sys.argv[1]))
    # Asked for by the engine when a step hangs.
    faulthandler.register(signal.SIGUSR1, file=int(sys.argv[2]), all_threads=False)
    threading.Thread(target=_exit_with_parent, args=(sock.fileno(), os.getppid()), daemon=True).start()
    try:
        _serve(sock)
    except EOFError:
        status = 1  # the engine's process is gone
    except BaseException as error:
        user_error = str(error) if isinstance(error, ValueError) else None
        sock.sendall(encode(Failed(traceback.format_exc(), user_error, monotonic())))
        status = 1
    else:
        status = 0
    # Not by way of interpreter shutdown: threads of a half-dead process group may never join.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _exit_with_parent(socket_fd: int, parent: int) -> None:
    """Ends this process when the engine's is gone, whatever the main thread is waiting for.

    The kernel's parent-death signal is no use here: it fires when the *thread* that started us ends. The hang-up is
    seen at once, unless a fork of the parent holds the socket open; then the parent's id tells.
    """
    poller = select.poll()
    poller.register(socket_fd, 0)
    while not poller.poll(1000) and os.getppid() == parent:
        pass
    os._exit(1)


def _serve(sock: socket.socket) -> None:
    start = receive(sock)
    assert isinstance(start, Start)
    # Importing torch makes half a million objects that stay: looking for garbage among them takes a fifth of the start.
    gc.disable()
    from nanoinfer.distributed import launch

    if start.rank > 0:
        # What all ranks find, rank 0 says.
        logging.getLogger("nanoinfer").setLevel(logging.ERROR)
    runner, groups = _load(start)
    gc.enable()
    _send(sock, Started(runner.capacity()))
    last_index = 0
    launched: deque[_Launched] = deque()
    while True:
        command = _next_command(sock, launched)
        if command is None:
            _tell(sock, launched.popleft())
        elif isinstance(command, Step):
            if command.index <= last_index:
                continue  # sent again after an interruption
            last_index = command.index
            began, before = perf_counter(), groups.tp.seconds
            step = runner.launch(command.plan)
            if start.rank == 0:
                launched.append(_Launched(command.index, step, began, groups.tp.seconds - before))
        elif isinstance(command, Allocate):
            runner.allocate(command.limits)
            _send(sock, Allocated())
        else:
            # NCCL waits for the CUDA graphs that hold its collectives, so these go first. They are part of a cycle.
            del runner
            gc.collect()
            launch.leave()
            return


def _next_command(sock: socket.socket, launched: deque[_Launched]) -> Command | Reply | None:
    """Waits for the next command, or for the oldest launched step; None if that is over, which is to be told first.

    On a GPU the next step is launched while the last one runs, so both are watched.
    """
    while launched:
        if launched[0].step.is_over():
            return None
        if has_message(sock):
            break
        os.sched_yield()
    else:
        spin(sock, _SPIN_SECONDS)
    return receive(sock)


def _tell(sock: socket.socket, launched: _Launched) -> None:
    result = launched.step.result()
    _send(sock, StepDone(launched.index, result, perf_counter() - launched.began, launched.collective_seconds))


def _load(start: Start) -> tuple[ModelRunner, ParallelGroups]:
    from nanoinfer.distributed import launch
    from nanoinfer.worker.model_runner import ModelRunner, resolve_device

    device = resolve_device(start.config.device, start.model_config)
    groups = launch.join(start.rank, start.config.tensor_parallel_size, start.rendezvous_file, device)
    return ModelRunner(start.config, start.model_config, Path(start.model_dir), start.seed, groups), groups


def _send(sock: socket.socket, reply: Reply) -> None:
    sock.sendall(encode(reply))


if __name__ == "__main__":
    main()
