"""One rank, in the engine's own process. A step on the CPU runs when it is submitted; one on a GPU is only launched."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from nanoinfer.config import EngineConfig, ModelConfig, SchedulerConfig
from nanoinfer.executor.base import Executor, StepHandle
from nanoinfer.step import KVCacheCapacity, SchedulerOutput, StepResult

if TYPE_CHECKING:
    from nanoinfer.worker.model_runner import LaunchedStep, ModelRunner


@dataclass(frozen=True)
class _Launched(StepHandle):
    step: LaunchedStep

    def result(self) -> StepResult:
        return self.step.result()


class UniprocExecutor(Executor):
    def __init__(self, config: EngineConfig, model_config: ModelConfig, model_dir: Path, seed: int) -> None:
        # Here and not above: the engine's room must load without torch.
        from nanoinfer.distributed.group import ParallelGroups
        from nanoinfer.worker.model_runner import ModelRunner

        self._runner: ModelRunner | None = ModelRunner(config, model_config, model_dir, seed, ParallelGroups.single())

    @property
    def runner(self) -> ModelRunner:
        if self._runner is None:
            raise RuntimeError("the engine is closed")
        return self._runner

    def capacity(self) -> KVCacheCapacity:
        return self.runner.capacity()

    def allocate(self, limits: SchedulerConfig) -> None:
        self.runner.allocate(limits)
        self.runs_apart = self.runner.runs_ahead

    def submit(self, plan: SchedulerOutput) -> StepHandle:
        return _Launched(self.runner.launch(plan))

    def close(self) -> None:
        has_graphs = self._runner is not None and self._runner.runs_ahead
        self._runner = None
        if has_graphs:
            # They are part of a cycle that holds the pool and the weights.
            gc.collect()
