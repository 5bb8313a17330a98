"""A rank's process, seen from the engine: its start, its end, and what it says or shows when something goes wrong."""

from __future__ import annotations

import json
import logging
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import IO

from nanoinfer.executor.messages import Failed, Reply, Shutdown, encode, receive

logger = logging.getLogger(__name__)

_SHUTDOWN_SECONDS = 5.0
_STACKS_SECONDS = 2.0
# The outermost frame is in the program _BOOT; after 100 frames faulthandler stops with dots. It writes piece by piece.
_STACK_END = re.compile(r'(  File "<string>", .*|  \.\.\.)\n\Z')

_BOOT = """
import json, runpy, sys
module, sys.path[:] = sys.argv.pop(1), json.loads(sys.argv.pop(1))
runpy.run_module(module, run_name="__main__")
"""


@dataclass(frozen=True)
class RankProcess:
    """A rank's process, our end of its socket, and the file to which it dumps its stack when asked.

    inbox: what it has said and nobody has waited for yet.
    """

    index: int
    process: subprocess.Popen[bytes]
    sock: socket.socket
    stacks: IO[bytes]
    inbox: deque[Reply] = field(default_factory=deque)


def spawn(index: int, size: int, module: str) -> RankProcess:
    """A fresh interpreter, not a fork: torch's threads survive none, and the user's main script isn't run again."""
    ours, theirs = socket.socketpair()
    stacks = tempfile.TemporaryFile()  # noqa: SIM115
    environment = dict(os.environ)
    num_threads = environment.setdefault("OMP_NUM_THREADS", str(max(1, num_cores() // size)))
    if index == 0:
        logger.info("%d ranks with OMP_NUM_THREADS=%s each (set it to change it)", size, num_threads)
    with theirs:
        process = subprocess.Popen(
            # Isolated, with our own sys.path: `-m` would put the working directory in front of the standard library.
            [
                sys.executable,
                "-I",
                "-c",
                _BOOT,
                module,
                json.dumps(list(map(str, sys.path))),
                str(theirs.fileno()),
                str(stacks.fileno()),
            ],
            env=environment,
            stdin=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(), stacks.fileno()),
            # Out of the terminal's process group: Ctrl-C must not reach a rank before it ignores the signal.
            start_new_session=True,
        )
    return RankProcess(index, process, ours, stacks)


def num_cores() -> int:
    """Cores that this process may use: its affinity mask, less what the cgroup's CPU quota takes away."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota_file = Path("/sys/fs/cgroup/cpu.max")
    if quota_file.is_file():
        quota, period = quota_file.read_text().split()
        if quota != "max":
            cores = min(cores, max(1, int(quota) // int(period)))
    return cores


def hear(rank: RankProcess) -> Failed | str:
    """What a rank says of its failure; "gone" if it is dead without a word, "well" if there is nothing to hear."""
    poller = select.poll()
    poller.register(rank.sock.fileno(), select.POLLIN)
    try:
        while poller.poll(0):
            message = receive(rank.sock)
            if isinstance(message, Failed):
                return message
    except (EOFError, OSError):
        return "gone"
    return "well"


def how_it_ended(rank: RankProcess) -> str:
    try:
        code = rank.process.wait(_SHUTDOWN_SECONDS)
    except subprocess.TimeoutExpired:
        return f"rank {rank.index} (process {rank.process.pid}) closed its connection"
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"
    return f"rank {rank.index} (process {rank.process.pid}) {how}"


def stacks_of(ranks: list[RankProcess]) -> str:
    """What each rank's main thread is doing, from the ranks that still can tell."""
    for rank in ranks:
        if rank.process.poll() is None:
            rank.process.send_signal(signal.SIGUSR1)
    texts = []
    deadline = monotonic() + _STACKS_SECONDS
    for rank in ranks:
        text = _read_stack(rank)
        while not _STACK_END.search(text) and rank.process.poll() is None and monotonic() < deadline:
            select.select([], [], [], 0.02)
            text = _read_stack(rank)
        texts.append(f"rank {rank.index}: {text.strip() or 'does not tell where it is'}")
    return "\n".join(texts)


def _read_stack(rank: RankProcess) -> str:
    # Not by seek and read: the rank writes at an offset that it shares with us.
    return os.pread(rank.stacks.fileno(), 1 << 20, 0).decode(errors="replace")


def kill(ranks: list[RankProcess]) -> None:
    for rank in ranks:
        if rank.process.poll() is None:
            rank.process.kill()


def stop(ranks: list[RankProcess], directory: str, owner: int) -> None:
    """Asks the ranks to leave, kills those that don't, and frees all that the executor holds.

    Not in a fork of the process that `owner` is the id of: the ranks are not the fork's.
    """
    if os.getpid() != owner:
        return
    for rank in ranks:
        try:
            rank.sock.settimeout(_SHUTDOWN_SECONDS)
            rank.sock.sendall(encode(Shutdown()))
        except OSError:
            pass  # it is dead already
    deadline = monotonic() + _SHUTDOWN_SECONDS
    for rank in ranks:
        try:
            rank.process.wait(max(0.0, deadline - monotonic()))
        except subprocess.TimeoutExpired:
            rank.process.kill()
            rank.process.wait()
        rank.sock.close()
        rank.stacks.close()
    ranks.clear()
    shutil.rmtree(directory, ignore_errors=True)
