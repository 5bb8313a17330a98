"""`Executor`: the engine's view of its ranks, however many there are and wherever they run.

executor = Executor(...)             ranks load their weights
capacity = executor.capacity()       what they can all offer
executor.allocate(limits)            the pool, in the size that was decided on
handle = executor.submit(plan)       per step; handle.result() waits for it
executor.close()
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from nanoinfer.config import SchedulerConfig
from nanoinfer.step import KVCacheCapacity, SchedulerOutput, StepResult


class EngineDeadError(RuntimeError):
    """A rank raised, died or hung. Its engine is torn down and cannot be used any more."""


class StepHandle(ABC):
    @abstractmethod
    def result(self) -> StepResult:
        """Waits for the step and returns what it sampled; raises what went wrong in it."""


class Executor(ABC):
    # Whether a step runs apart from its caller, between `submit` and `result`; then the next one may be submitted
    # before the last one's result is taken. Known once `allocate` has run.
    runs_apart = False

    def check_health(self) -> None:  # noqa: B027
        """Raises EngineDeadError if a rank is dead. Between steps; within one, the step tells."""

    @abstractmethod
    def capacity(self) -> KVCacheCapacity:
        """The least of what the ranks report."""

    @abstractmethod
    def allocate(self, limits: SchedulerConfig) -> None:
        """Allocates KV pools and rows on all ranks."""

    @abstractmethod
    def submit(self, plan: SchedulerOutput) -> StepHandle:
        """Starts a step. Steps run in the order of submission, whether or not anybody asks for their results."""

    @abstractmethod
    def close(self) -> None:
        """Frees what the ranks hold. Idempotent."""
