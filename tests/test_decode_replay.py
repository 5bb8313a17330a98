"""Replayed decode steps answer as the same steps with Python between the kernels, bit by bit."""

from __future__ import annotations

import logging
import random
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

from nanoinfer import LLM, SamplingParams
from nanoinfer.executor.uniproc import UniprocExecutor
from nanoinfer.kernels.cpu import ops
from nanoinfer.kernels.cpu.ops import CPUKernels, Recording
from nanoinfer.outputs import RequestOutput

KERNELS = ops.load()
pytestmark = pytest.mark.skipif(KERNELS is None or not KERNELS.has_amx_int8, reason="there is no AMX here")
OPTIONS: dict[str, Any] = {"dtype": "bfloat16", "num_kvcache_blocks": 40, "max_num_seqs": 7, "seed": 0}


def save(path: Path, variant: str = "tied", **overrides: Any) -> Path:
    tiny.build(variant, head_dim=64, **overrides).save_pretrained(path)
    return path


def generate(model: Path, num_requests: int, seed: int, **options: Any) -> tuple[list[RequestOutput], int, int]:
    """(outputs, decode-only steps, replays) of requests of random lengths."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(90) for _ in range(rng.choice([1, 5, 33, 90]))] for _ in range(num_requests)]
    params = [
        SamplingParams(
            temperature=rng.choice([0.0, 1.0]), seed=i, max_tokens=rng.randrange(2, 40), ignore_eos=True, logprobs=3
        )
        for i in range(num_requests)
    ]
    with LLM(model, **OPTIONS | options) as llm:
        decodes: list[int] = []
        llm.engine.on_step = lambda step: decodes.append(int(not step.num_prefill_tokens))
        executor = llm.engine.executor
        assert isinstance(executor, UniprocExecutor)
        replays: list[int] = []
        if (replay := executor.runner._replay) is not None:
            run = replay._kernels.run
            replay._kernels = _Counting(replay._kernels, lambda calls: replays.append(len(calls)) or run(calls))
        outputs = llm.generate(prompts, params, use_tqdm=False)
    return outputs, sum(decodes), len(replays)


class _Counting:
    """Kernels whose `run` is another."""

    def __init__(self, kernels: CPUKernels, run: Any) -> None:
        self._kernels, self.run = kernels, run

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernels, name)


@pytest.mark.parametrize("variant", ["tied", "untied", "bias", "one_kv_head"])
@pytest.mark.parametrize("options", [{}, {"quantization": "int8", "kv_cache_dtype": "int8"}, {"num_kvcache_blocks": 9}])
def test_replayed_steps_are_the_steps(variant: str, options: dict, tmp_path: Path) -> None:
    model = save(tmp_path, variant)
    ours, steps, replays = generate(model, 12, 1, **options)
    expected, _, none = generate(model, 12, 1, enforce_eager=True, **options)
    # A step of a batch size that has not been seen is recorded, not replayed.
    assert 2 * replays > steps > 20 and none == 0
    for a, b in zip(ours, expected, strict=True):
        assert a.token_ids == b.token_ids and a.outputs[0].logprobs == b.outputs[0].logprobs


@pytest.mark.parametrize("options", [{"dtype": "float32"}, {"kvcache_block_size": 8}, {"enforce_eager": True}])
def test_where_steps_are_not_kernel_calls_alone_nothing_is_replayed(options: dict, tmp_path: Path) -> None:
    _, steps, replays = generate(save(tmp_path), 3, 2, **options)
    assert steps > 0 and replays == 0


def test_a_step_that_does_something_else_is_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A torch operator between the kernels would run once, when the step is recorded: the check sees it and says so."""
    model = save(tmp_path)
    expected, *_ = generate(model, 5, 3, enforce_eager=True)
    plain = CPUKernels.linear
    monkeypatch.setattr(CPUKernels, "linear", lambda self, *args: plain(self, *args) + 0)
    with caplog.at_level(logging.WARNING):
        ours, *_ = generate(model, 5, 3)
    assert [o.token_ids for o in ours] == [o.token_ids for o in expected]
    assert sum("cannot be replayed" in record.message for record in caplog.records) == 1


def test_results_lie_in_a_ring_of_aligned_pieces() -> None:
    recording = Recording(torch.zeros(1024, dtype=torch.uint8))
    pieces = [recording.empty((3, 33), torch.bfloat16) for _ in range(9)]  # 198 bytes, so 256 with alignment
    starts = [piece.data_ptr() - recording.memory.data_ptr() for piece in pieces]
    assert starts == [0, 256, 512, 768] * 2 + [0]
    assert recording.num_bytes == 9 * 256
