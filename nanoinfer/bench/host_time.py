"""What a decode step costs beside the model: `python bench.py --host-only`.

The forward pass and the sampler are replaced by stand-ins that return at once; scheduling, the step's tensors, block
growth, stop checks and outputs are as in earnest. Steps overlap as they do on a GPU: each is planned and launched
before the result of the last one is taken.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nanoinfer.attention.base import ForwardBatch
from nanoinfer.bench.workload import QWEN3_0_6B
from nanoinfer.config import SchedulerConfig
from nanoinfer.executor.uniproc import UniprocExecutor
from nanoinfer.layers.sampler import SamplingBatch, VocabShard
from nanoinfer.llm import LLM
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.step import StepStats, TokenLogprobs
from nanoinfer.worker.cuda_graph import DecodeGraphs, graph_sizes
from nanoinfer.worker.device_runner import DeviceRunner
from nanoinfer.worker.input_batch import InputBatch, StepRows
from nanoinfer.worker.model_runner import ModelRunner

_SHAPE = {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2}
_SHAPE |= {"num_key_value_heads": 1, "head_dim": 32}
_PROMPT_TOKENS, _OUTPUT_TOKENS = 16, 100


def measure_host_time(batch_sizes: tuple[int, ...] = (1, 32, 256, 1024)) -> dict[str, Any]:
    """host_ms_per_step: running sequences (as a string, for JSON) to the median milliseconds of a decode step.

    host_ms_per_step_gpu: the same with a GPU's bookkeeping, rows and block tables on the device and graphs, whose
    device is this CPU here.
    """
    return {
        "benchmark": "host_only",
        "host_ms_per_step": host_milliseconds(batch_sizes, as_on_gpu=False),
        "host_ms_per_step_gpu": host_milliseconds(batch_sizes, as_on_gpu=True),
    }


def host_milliseconds(batch_sizes: tuple[int, ...], *, as_on_gpu: bool) -> dict[str, float]:
    """Running sequences (as a string, for JSON) to the median milliseconds of a decode step."""
    found = {}
    for num_seqs in batch_sizes:
        with tempfile.TemporaryDirectory() as directory:
            Path(directory, "config.json").write_text(json.dumps(QWEN3_0_6B | _SHAPE))
            # The stand-ins are for the CPU's path; on a GPU, --gpu-check measures the steps themselves.
            options: dict[str, Any] = {"device": "cpu", "load_format": "dummy", "max_model_len": 256, "seed": 0}
            options |= {"max_num_seqs": num_seqs, "max_num_batched_tokens": (_PROMPT_TOKENS + 1) * num_seqs}
            with LLM(directory, num_kvcache_blocks=8 * num_seqs, **options) as llm:
                found[str(num_seqs)] = 1e3 * statistics.median(_step_seconds(llm, num_seqs, as_on_gpu))
    return found


def _step_seconds(llm: LLM, num_seqs: int, as_on_gpu: bool) -> list[float]:
    """Seconds of each step in which all sequences decode."""
    executor = llm.engine.executor
    assert isinstance(executor, UniprocExecutor)
    runner = executor.runner

    def forward(batch: ForwardBatch) -> torch.Tensor:
        return torch.empty(0)

    def compute_logits(hidden: torch.Tensor, indices: torch.Tensor | None) -> torch.Tensor:
        assert indices is not None  # None comes from replayed steps alone
        return torch.empty(len(indices), 0)

    def sample(logits: torch.Tensor, sampling: SamplingBatch) -> tuple[list[int], dict[int, TokenLogprobs]]:
        return [7] * len(logits), {}

    runner.forward, runner.compute_logits, runner.sample = forward, compute_logits, sample  # type: ignore[method-assign]
    if (replay := runner._replay) is not None:
        # Their inputs are still made, by a kernel.
        replay.tokens = lambda: [7] * replay.num_seqs  # type: ignore[method-assign]
    llm.engine.async_scheduling = executor.runs_apart = True
    assert llm.engine.overlaps_steps
    if as_on_gpu:
        _use_instant_device(runner, llm.engine.scheduler.config)
    seconds: list[float] = []

    def observe(stats: StepStats) -> None:
        if stats.num_decode_tokens == num_seqs:
            seconds.append(stats.seconds)

    llm.engine.on_step = observe
    prompts = [[i % 1000 + 10, *range(_PROMPT_TOKENS - 1)] for i in range(num_seqs)]
    params = SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=_OUTPUT_TOKENS)
    llm.generate(prompts, params, use_tqdm=False)
    return seconds


class _InstantGraph:
    """Has what it captured at once."""

    def capture(self, function: Callable[[], None]) -> None:
        function()

    def replay(self) -> None:
        pass


class _InstantDevice(DeviceRunner):
    """The GPU's bookkeeping on the CPU, with no model behind it."""

    def decode(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.full((inputs.shape[1],), 7), torch.empty(inputs.shape[1], 0)

    def send(
        self, batch: ForwardBatch, where: np.ndarray | None = None, rows: np.ndarray | None = None
    ) -> ForwardBatch:
        return batch

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        return torch.empty(0)

    def compute_logits(self, hidden: torch.Tensor, indices: torch.Tensor | None) -> torch.Tensor:
        assert indices is not None  # None comes from `decode` alone
        return torch.empty(len(indices), 0)

    def _sample(self, step: StepRows, batch: InputBatch, logits: torch.Tensor, sampling: SamplingBatch) -> torch.Tensor:
        return torch.full((len(logits),), 7)


def _use_instant_device(runner: ModelRunner, limits: SchedulerConfig) -> None:
    device = torch.device("cpu")
    instant = _InstantDevice(runner.model, runner.backend, runner.kv_cache, limits, VocabShard(), device)
    with torch.inference_mode():
        instant.graphs = DecodeGraphs(instant.decode, graph_sizes(limits.max_num_seqs), device, _InstantGraph)
        instant.graphs.capture()
    runner._device_runner = instant
