"""What the engine's process and its rank processes say to each other, and how it travels.

Frames over a socket pair that the rank inherits: a length, then a pickled message. The pair is unnamed and private to
the two processes, so nobody else can send a pickle to it; nothing listens. There is no limit on a frame's size, and no
shared memory is used.
"""

from __future__ import annotations

import os
import pickle
import socket
import struct
from dataclasses import dataclass
from time import perf_counter

from nanoinfer.config import EngineConfig, ModelConfig, SchedulerConfig
from nanoinfer.step import KVCacheCapacity, SchedulerOutput, StepResult

_LENGTH = struct.Struct("<Q")
_SMALL = 1 << 16


# To a rank.
@dataclass(frozen=True)
class Start:
    config: EngineConfig
    model_config: ModelConfig
    model_dir: str
    seed: int
    rank: int
    rendezvous_file: str


@dataclass(frozen=True)
class Allocate:
    limits: SchedulerConfig


@dataclass(frozen=True)
class Step:
    index: int
    plan: SchedulerOutput


@dataclass(frozen=True)
class Shutdown:
    pass


# From a rank. Steps are answered by rank 0 alone; the others speak only when they fail.
@dataclass(frozen=True)
class Started:
    capacity: KVCacheCapacity


@dataclass(frozen=True)
class Allocated:
    pass


@dataclass(frozen=True)
class StepDone:
    """busy_seconds: from the plan's arrival to this answer; collective_seconds: the part of it spent in collectives."""

    index: int
    result: StepResult
    busy_seconds: float
    collective_seconds: float


@dataclass(frozen=True)
class Failed:
    """user_error: the message of a ValueError, which is the user's to mend; None for anything else.

    when: by the machine's monotonic clock, since a rank that fails makes others fail.
    """

    traceback: str
    user_error: str | None
    when: float


Command = Start | Allocate | Step | Shutdown
Reply = Started | Allocated | StepDone | Failed


def encode(message: Command | Reply) -> bytes:
    payload = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(payload)) + payload


def has_message(sock: socket.socket) -> bool:
    """Whether the beginning of a message, or the end of the connection, is there."""
    try:
        sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    return True


def spin(sock: socket.socket, seconds: float) -> None:
    """Waits for the beginning of a message, or for that time, without sleeping but giving way to others.

    Waking a sleeping process costs more than a step's whole message otherwise does.
    """
    deadline = perf_counter() + seconds
    while perf_counter() < deadline and not has_message(sock):
        os.sched_yield()


def receive_at_once(sock: socket.socket) -> Command | Reply | None:
    """The next message if it is small and has come in full, else None and nothing is taken.

    A message is taken in one system call: an exception before or after it (Ctrl-C) cannot leave half a message behind.
    """
    frame = sock.recv(_SMALL, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    if len(frame) < _LENGTH.size:
        return None
    stop = _LENGTH.size + _LENGTH.unpack_from(frame)[0]
    if len(frame) < stop:
        return None
    sock.recv(stop)
    return pickle.loads(memoryview(frame)[_LENGTH.size : stop])


def receive(sock: socket.socket) -> Command | Reply:
    """Waits for one message. Raises EOFError if the other side is gone."""
    (length,) = _LENGTH.unpack(_receive_exactly(sock, _LENGTH.size))
    return pickle.loads(_receive_exactly(sock, length))


def _receive_exactly(sock: socket.socket, length: int) -> bytes:
    buffer = bytearray(length)
    view = memoryview(buffer)
    while view:
        count = sock.recv_into(view)
        if count == 0:
            raise EOFError("the other side closed the connection")
        view = view[count:]
    return bytes(buffer)
