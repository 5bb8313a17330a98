"""A rank's program that does, at one place, something other than its duty. Run by `MultiprocExecutor` in the place of
`nanoinfer.executor.worker_main`; the environment variable `VARIABLE` holds the options, as JSON:

    place   join, load, allocate, step (inside one, after the layers), memory, card, report, echo
    rank    the rank that misbehaves (card, report and echo: all do)
    what    ValueError, RuntimeError, exit, sleep (join, load, allocate, step)
    step    which one (step)
    bytes   what the rank reads as available memory (memory)
    folder  where it leaves a file when it goes to sleep, or what a report writes
"""

from __future__ import annotations

import json
import os
import random
import time
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from nanoinfer.distributed import launch
from nanoinfer.executor import worker_main
from nanoinfer.models.qwen3 import Qwen3ForCausalLM
from nanoinfer.step import SchedulerOutput, StepResult
from nanoinfer.worker import model_runner
from nanoinfer.worker.model_runner import LaunchedStep, ModelRunner

VARIABLE = "NANOINFER_TEST_FAULT"
MESSAGE = "the disk is on fire"
STATUS = 7


def fail(options: dict[str, Any]) -> None:
    what = options["what"]
    if what == "exit":
        os._exit(STATUS)
    if what == "sleep":
        Path(options["folder"], "asleep").touch()
        while True:
            time.sleep(3600)
    raise {"ValueError": ValueError, "RuntimeError": RuntimeError}[what](MESSAGE)


def at_join(options: dict[str, Any]) -> None:
    join = launch.join

    def faulty_join(rank: int, *rest: Any) -> Any:
        if rank == options["rank"]:
            fail(options)
        return join(rank, *rest)

    launch.join = faulty_join


def at_load(options: dict[str, Any]) -> None:
    def faulty_load(model: Qwen3ForCausalLM, checkpoint: Any, **more: Any) -> None:
        if model.lm_head.tp.rank == options["rank"]:
            fail(options)
        load_weights(model, checkpoint, **more)

    load_weights, model_runner.load_weights = model_runner.load_weights, faulty_load


def at_allocate(options: dict[str, Any]) -> None:
    allocate = ModelRunner.allocate

    def faulty_allocate(self: ModelRunner, *arguments: Any) -> None:
        if self.model.lm_head.tp.rank == options["rank"]:
            fail(options)
        allocate(self, *arguments)

    ModelRunner.allocate = faulty_allocate  # type: ignore[method-assign]


def at_card(options: dict[str, Any]) -> None:
    """Ranks say that they run on GPUs."""
    capacity = ModelRunner.capacity
    ModelRunner.capacity = lambda self: replace(capacity(self), device="cuda")  # type: ignore[method-assign]


def at_step(options: dict[str, Any]) -> None:
    compute_logits = Qwen3ForCausalLM.compute_logits
    num_steps = 0

    def faulty_logits(self: Qwen3ForCausalLM, *arguments: Any) -> torch.Tensor:
        nonlocal num_steps
        num_steps += 1
        if self.lm_head.tp.rank == options["rank"] and num_steps == options["step"]:
            fail(options)
        return compute_logits(self, *arguments)

    Qwen3ForCausalLM.compute_logits = faulty_logits  # type: ignore[method-assign]


def at_memory(options: dict[str, Any]) -> None:
    capacity = ModelRunner.capacity

    def poor_capacity(self: ModelRunner) -> Any:
        if self.model.lm_head.tp.rank == options["rank"]:
            model_runner.available_memory = lambda: options["bytes"]
        return capacity(self)

    ModelRunner.capacity = poor_capacity  # type: ignore[method-assign]


def at_report(options: dict[str, Any]) -> None:
    """Each rank writes down its number of threads, and which part of which tensor it has read into what."""

    def load_and_report(model: Qwen3ForCausalLM, checkpoint: Any, **more: Any) -> None:
        load_weights(model, checkpoint, **more)
        parts = [(spec.name, spec.shape, spec.index, spec.dest.clone()) for spec in model.shards()]
        report = {"threads": torch.get_num_threads(), "parts": parts}
        torch.save(report, Path(options["folder"], f"rank{model.lm_head.tp.rank}.pt"))

    load_weights, model_runner.load_weights = model_runner.load_weights, load_and_report


def checksum(plan: SchedulerOutput) -> int:
    return zlib.crc32(repr(plan).encode())


def at_echo(options: dict[str, Any]) -> None:
    """A step returns, by rank, the checksum of the plan and how many plans there have been, by a collective.
    One row of 100,000 is added if the plan drops the sequence -1. Each rank dawdles now and then."""
    num_steps = 0

    def echo(self: ModelRunner, plan: SchedulerOutput) -> LaunchedStep:
        nonlocal num_steps
        num_steps += 1
        tp = self.model.lm_head.tp
        if (num_steps + 3 * tp.rank) % 11 == 0:
            time.sleep(random.Random(num_steps).random() * 1e-3)
        both = tp.all_gather(torch.tensor([[checksum(plan), num_steps]])).view(-1, 2).tolist()
        rows = dict(enumerate(both))
        if -1 in plan.dropped:
            rows[-1] = list(range(100_000))
        return LaunchedStep(StepResult(token_ids=rows))

    ModelRunner.launch = echo  # type: ignore[method-assign]


PLACES: dict[str, Callable[[dict[str, Any]], None]] = {
    "join": at_join,
    "load": at_load,
    "allocate": at_allocate,
    "step": at_step,
    "memory": at_memory,
    "card": at_card,
    "report": at_report,
    "echo": at_echo,
}


if __name__ == "__main__":
    chosen = json.loads(os.environ[VARIABLE])
    PLACES[chosen["place"]](chosen)
    worker_main.main()
