"""What it costs to run a step in rank processes: `python bench.py --step-overhead`.

A 2-layer model decodes with one rank in this process and with two rank processes, in turn, several times. With rank
processes a step's time, as the engine sees it, falls into three parts: the channel (plan out, tokens back, and the two
wake-ups), the collectives as rank 0 sees them (waiting for the other rank included), and the rest of the ranks' work.
Steps don't overlap here, which would hide the channel.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from nanoinfer.bench.workload import QWEN3_0_6B
from nanoinfer.executor.multiproc import MultiprocExecutor
from nanoinfer.llm import LLM
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.step import StepStats

_SHAPE = {"num_hidden_layers": 2, "hidden_size": 256, "intermediate_size": 512, "vocab_size": 4096}
_ROUNDS, _NUM_STEPS = 5, 200


def measure_step_overhead(batch_size: int = 1) -> dict[str, Any]:
    """Medians over the decode steps of all rounds, in milliseconds."""
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "config.json").write_text(json.dumps(QWEN3_0_6B | _SHAPE))
        options: dict[str, Any] = {"load_format": "dummy", "dtype": "float32", "max_model_len": 512, "seed": 0}
        options["async_scheduling"] = False
        with LLM(directory, **options) as one, LLM(directory, tensor_parallel_size=2, **options) as two:
            executor = two.engine.executor
            assert isinstance(executor, MultiprocExecutor)
            alone: list[float] = []
            parts: list[tuple[float, float, float]] = []

            def observe_alone(stats: StepStats) -> None:
                if not stats.num_prefill_tokens:
                    alone.append(stats.execute_seconds)

            def observe_ranks(stats: StepStats) -> None:
                if not stats.num_prefill_tokens:
                    parts.append((stats.execute_seconds, executor.busy_seconds, executor.collective_seconds))

            one.engine.on_step, two.engine.on_step = observe_alone, observe_ranks
            params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=_NUM_STEPS)
            for _ in range(_ROUNDS):
                for llm in (one, two):
                    llm.generate([[1 + i, 2, 3] for i in range(batch_size)], params, use_tqdm=False)

    def median_ms(values: list[float]) -> float:
        return 1e3 * statistics.median(values)

    return {
        "benchmark": "step_overhead",
        "batch_size": batch_size,
        "steps": len(parts),
        "one_rank_ms": median_ms(alone),
        "two_ranks_ms": median_ms([total for total, _, _ in parts]),
        "channel_ms": median_ms([total - busy for total, busy, _ in parts]),
        "collectives_ms": median_ms([collective for _, _, collective in parts]),
        "rank_work_ms": median_ms([busy - collective for _, busy, collective in parts]),
    }
