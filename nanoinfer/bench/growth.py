"""How a decode step grows with sequences and contexts, next to its floor: `python bench.py --growth`.

Plans go straight to the worker, which runs them as the engine would: rows, tensors, forward pass, head and sampler
(temperature 0.6). Only the scheduler and the texts are left out (`--host-only` measures those). Nothing is prefilled:
every slot of the pool first gets finite random keys and values, each layer its own memory, and sequences start as if
their contexts had been computed. Their blocks are scattered over the pool, as they are once an engine has served for a
while; in a pool of many gigabytes that alone costs up to a third of attention's speed, since page translations miss.
All points are visited several times in turn, so that a machine which slows down for a while slows none of them alone.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from nanoinfer.attention.base import ForwardBatch
from nanoinfer.bench.floor import Floor
from nanoinfer.bench.machine import Machine
from nanoinfer.bench.svg import line_chart
from nanoinfer.bench.workload import MAX_TOKEN_ID, QWEN3_0_6B, open_llm
from nanoinfer.config import EngineConfig, ModelConfig
from nanoinfer.executor.uniproc import UniprocExecutor
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.step import NewSequence, SchedulerOutput, StepStats
from nanoinfer.worker.kv_cache import GIB, available_memory
from nanoinfer.worker.model_runner import ModelRunner

NUM_SEQS = (8, 32, 64, 128)
CONTEXTS = (256, 1024, 4096, 16384)
MAX_TOKENS = 131_072
_ROUNDS, _WARM_UP, _STEPS = 3, 1, 5
_FILLED_AT_ONCE = 4096
# For what else the process and the machine need while this runs.
_SPARE_BYTES = int(1.5 * GIB)


@dataclass(frozen=True)
class GrowthPoint:
    """Medians over the decode steps of `num_seqs` sequences that end with `context` tokens each."""

    num_seqs: int
    context: int
    step_ms: float
    tok_s: float
    floor_ms: float
    fraction_of_floor: float


def grid() -> list[tuple[int, int]]:
    """(sequences, context) of all points."""
    return [(seqs, context) for seqs in NUM_SEQS for context in CONTEXTS if seqs * context <= MAX_TOKENS]


def measure_growth(config: EngineConfig, machine: Machine) -> dict[str, Any]:
    """Of Qwen3-0.6B's shape with random weights, under the options in `config` that are not about sizes."""
    options = {"max_num_seqs": max(NUM_SEQS), "max_model_len": max(CONTEXTS)} | _pool(config)
    with open_llm(config, **options) as llm:
        executor = llm.engine.executor
        assert isinstance(executor, UniprocExecutor)
        num_blocks, block_size = llm.capacity.num_blocks, llm.capacity.block_size
        itemsize = getattr(torch, llm.capacity.dtype).itemsize
        floor = Floor.of_model(llm.model_config, itemsize, config.quantization, config.kv_cache_dtype)
        fits = {point: point[0] * -(-point[1] // block_size) <= num_blocks for point in grid()}
        why = f"the KV pool has {num_blocks * block_size} tokens; more did not fit into the memory that is available"
        points = measure_points(executor.runner, [p for p in grid() if fits[p]], num_blocks, floor, machine)
        capacity = llm.capacity
    report: dict[str, Any] = {"benchmark": "growth", "points": [asdict(point) for point in points]}
    report["left_out"] = [{"num_seqs": s, "context": c, "why": why} for (s, c) in grid() if not fits[s, c]]
    if (worst := largest_fall(points)) is not None:
        fall, before, after = worst
        report["largest_fall"] = fall
        report["largest_fall_from"] = [before.num_seqs, before.context]
        report["largest_fall_to"] = [after.num_seqs, after.context]
    return report | asdict(machine) | {"kv_cache": asdict(capacity)}


def _pool(config: EngineConfig) -> dict[str, Any]:
    """A pool for the largest point, or for what memory has left beside the weights; unless a pool was asked for."""
    if config.device != "cpu" or config.num_kvcache_blocks is not None or config.cpu_kvcache_gib is not None:
        return {}
    itemsize = 4 if config.dtype == "float32" else 2
    floor = Floor.of_model(ModelConfig.from_dict(QWEN3_0_6B), itemsize, config.quantization, config.kv_cache_dtype)
    weights = floor.linear_bytes + floor.head_bytes + itemsize * floor.head_weights
    room = available_memory() - weights - _SPARE_BYTES
    if room <= 0:
        raise SystemExit(f"bench.py --growth: no memory is left for keys and values; free {1 - room} bytes or more")
    return {"cpu_kvcache_gib": min(MAX_TOKENS * floor.kv_bytes, room) / GIB}


def measure_points(
    runner: ModelRunner, points: Sequence[tuple[int, int]], num_blocks: int, floor: Floor, machine: Machine
) -> list[GrowthPoint]:
    fill_kv_cache(runner, num_blocks)
    seconds: dict[tuple[int, int], list[float]] = {point: [] for point in points}
    floors: dict[tuple[int, int], list[float]] = {point: [] for point in points}
    for _ in range(_ROUNDS):
        for num_seqs, context in points:
            plans = decode_plans(num_seqs, context, _WARM_UP + _STEPS, num_blocks, runner.block_size)
            for index, plan in enumerate(plans):
                start = time.perf_counter()
                runner.step(plan)
                elapsed = time.perf_counter() - start
                if index >= _WARM_UP:
                    length = context - (_WARM_UP + _STEPS - 1) + index
                    seconds[num_seqs, context].append(elapsed)
                    floors[num_seqs, context].append(floor.seconds(decode_step(num_seqs, length), machine))
    found = []
    for num_seqs, context in points:
        took, least = (statistics.median(values[num_seqs, context]) for values in (seconds, floors))
        found.append(GrowthPoint(num_seqs, context, 1e3 * took, num_seqs / took, 1e3 * least, least / took))
    return found


def fill_kv_cache(runner: ModelRunner, num_blocks: int) -> None:
    """Random keys and values in every slot, through the backend's own `store`: right for any layout."""
    backend, generator = runner.backend, torch.Generator().manual_seed(0)
    shape = (_FILLED_AT_ONCE, backend.num_kv_heads, backend.head_dim)
    k, v = (torch.randn(shape, generator=generator).to(runner.dtype).to(runner.device) for _ in range(2))
    none = torch.empty(0, dtype=torch.int64)
    for start in range(0, num_blocks * runner.block_size, _FILLED_AT_ONCE):
        slots = torch.arange(start, min(start + _FILLED_AT_ONCE, num_blocks * runner.block_size), device=runner.device)
        batch = ForwardBatch(none, none, none, none, none, slots, none, max_query_len=1, max_seq_len=1)
        for layer in range(runner.model_config.num_hidden_layers):
            backend.store(k[: len(slots)], v[: len(slots)], runner.kv_cache.layer(layer), batch)


def decode_plans(
    num_seqs: int, context: int, num_steps: int, num_blocks: int, block_size: int
) -> Iterator[SchedulerOutput]:
    """Steps in which all sequences decode one token; after the last one, each has `context` of them in the cache."""
    rng = random.Random(f"{num_seqs} x {context}")
    columns = -(-context // block_size)
    blocks = rng.sample(range(num_blocks), num_seqs * columns)
    length = context - num_steps + 1  # with the token that the first step computes
    new = [
        NewSequence(
            seq_id=i,
            token_ids=[rng.randint(0, MAX_TOKEN_ID)] * length,
            num_prompt_tokens=length,
            num_computed_tokens=length - 1,
            block_ids=blocks[i * columns : (i + 1) * columns],
            params=SamplingParams(temperature=0.6, ignore_eos=True),
            seed=rng.getrandbits(64),
            stop_token_ids=(),
        )
        for i in range(num_seqs)
    ]
    scheduled = dict.fromkeys(range(num_seqs), 1)
    for step in range(num_steps):
        first = step == 0
        yield SchedulerOutput(new=new if first else [], num_scheduled_tokens=scheduled, forget_all=first)


def decode_step(num_seqs: int, context: int) -> StepStats:
    return StepStats(
        num_prefill_tokens=0,
        num_decode_tokens=num_seqs,
        num_sampled=num_seqs,
        num_context_tokens=num_seqs * context,
        num_attention_pairs=0,
        num_running=num_seqs,
        num_waiting=0,
        num_preemptions=0,
        seconds=0.0,
        execute_seconds=0.0,
    )


def largest_fall(points: Sequence[GrowthPoint]) -> tuple[float, GrowthPoint, GrowthPoint] | None:
    """By how much the fraction of the floor falls at most, as a share of itself, from a point to the next one.

    Next is one step up in sequences or in context. Negative if it rises everywhere; None without neighbours.
    """
    at = {(point.num_seqs, point.context): point for point in points}
    falls = []
    for (num_seqs, context), here in at.items():
        for there in (at.get((_next(NUM_SEQS, num_seqs), context)), at.get((num_seqs, _next(CONTEXTS, context)))):
            if there is not None:
                falls.append((1 - there.fraction_of_floor / here.fraction_of_floor, here, there))
    return max(falls, key=lambda fall: fall[0], default=None)


def _next(axis: tuple[int, ...], value: int) -> int:
    """The value after that one; 0, which no point has, after the last."""
    return (*axis, 0)[axis.index(value) + 1]


def markdown(report: dict[str, Any]) -> str:
    lines = ["| sequences | context | step ms | tok/s | floor ms | fraction of floor |", "|--:|--:|--:|--:|--:|--:|"]
    for point in (GrowthPoint(**values) for values in report["points"]):
        lines.append(
            f"| {point.num_seqs} | {point.context} | {point.step_ms:.1f} | {point.tok_s:.1f} "
            f"| {point.floor_ms:.1f} | {point.fraction_of_floor:.2f} |"
        )
    lines.append("")
    lines.append(f"Floor: {report['read_gb_s']:.1f} GB/s read, {report['gemm_tflop_s']:.2f} TFLOP/s.")
    if "largest_fall" in report:
        (seqs, context), (next_seqs, next_context) = report["largest_fall_from"], report["largest_fall_to"]
        where = f"from {seqs} x {context} to {next_seqs} x {next_context}"
        lines.append(f"Largest fall of the fraction between neighbours: {report['largest_fall']:.1%}, {where}.")
    for point in report["left_out"]:
        lines.append(f"Left out: {point['num_seqs']} x {point['context']}: {point['why']}.")
    return "\n".join(lines)


def plot(report: dict[str, Any]) -> str:
    """The report's fractions as an SVG document."""
    points = [GrowthPoint(**values) for values in report["points"]]
    series = {
        f"{seqs} sequences": [(p.context, p.fraction_of_floor) for p in points if p.num_seqs == seqs]
        for seqs in NUM_SEQS
        if any(p.num_seqs == seqs for p in points)
    }
    return line_chart("Decode: fraction of the floor", "context, tokens per sequence", "fraction of the floor", series)
