"""Replayed decode steps answer as the same steps with Python between the kernels, bit by bit."""

from __future__ import annotations

import logging
import random
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from hypothesis import given
from hypothesis import strategies as st

from nanoinfer import LLM, SamplingParams
from nanoinfer.executor.uniproc import UniprocExecutor
from nanoinfer.kernels.cpu import ops
from nanoinfer.kernels.cpu.inputs import DecodeInputs
from nanoinfer.kernels.cpu.memory import Workspace
from nanoinfer.kernels.cpu.ops import CPUKernels
from nanoinfer.layers.sampler import inverse_temperatures
from nanoinfer.outputs import RequestOutput
from nanoinfer.step import NewSequence, SchedulerOutput
from nanoinfer.worker.input_batch import InputBatch
from nanoinfer.worker.model_runner import ModelRunner

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
    # Only a prompt's chunk of one token looks like a decode and is none. They have logprobs, so Python samples them.
    assert steps >= replays > 20 and none == 0
    for a, b in zip(ours, expected, strict=True):
        assert a.token_ids == b.token_ids and a.outputs[0].logprobs == b.outputs[0].logprobs


@pytest.mark.parametrize("options", [{"dtype": "float32"}, {"kvcache_block_size": 8}, {"enforce_eager": True}])
def test_where_steps_are_not_kernel_calls_alone_nothing_is_replayed(options: dict, tmp_path: Path) -> None:
    _, steps, replays = generate(save(tmp_path), 3, 2, **options)
    assert steps > 0 and replays == 0


def test_a_step_that_does_something_else_is_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A torch operator between the kernels would be left out: it is seen and named."""
    model = save(tmp_path)
    expected, *_ = generate(model, 5, 3, enforce_eager=True)
    plain = CPUKernels.linear
    monkeypatch.setattr(CPUKernels, "linear", lambda self, *args: plain(self, *args) + 0)
    with caplog.at_level(logging.WARNING):
        ours, *_ = generate(model, 5, 3)
    assert [o.token_ids for o in ours] == [o.token_ids for o in expected]
    assert sum("aten.add" in record.message for record in caplog.records) == 1


@pytest.mark.parametrize("variant", ["tied", "untied"])
def test_replayed_sampling_is_the_sampling(variant: str, tmp_path: Path) -> None:
    """Steps of plain rows, greedy ones among them, are replayed to the end; others beside them are not."""
    model, rng = save(tmp_path, variant), random.Random(7)
    prompts = [[rng.randrange(90) for _ in range(rng.choice([1, 5, 33]))] for _ in range(12)]
    params = [
        SamplingParams(
            temperature=[0.0, 0.3, 1.0, 1e-30][i % 4], seed=i, max_tokens=rng.randrange(20, 40), ignore_eos=True,
            top_k=5 if i == 11 else 0,
        )
        for i in range(12)
    ]  # fmt: skip
    whole: list[int] = []
    with LLM(model, **OPTIONS) as llm:
        executor = llm.engine.executor
        assert isinstance(executor, UniprocExecutor) and executor.runner._replay is not None
        replay = executor.runner._replay
        plain = replay.tokens
        replay.tokens = lambda: (whole.append(1), plain())[1]  # type: ignore[method-assign]
        ours = llm.generate(prompts, params, use_tqdm=False)
    with LLM(model, enforce_eager=True, **OPTIONS) as llm:
        expected = llm.generate(prompts, params, use_tqdm=False)
    assert len(whole) > 10 and [o.token_ids for o in ours] == [o.token_ids for o in expected]


def test_logits_do_not_lie_on_what_they_are_computed_from(tmp_path: Path) -> None:
    """Nor do those of a prompt's tokens, for which hidden states have to last when the step's own logits are done."""
    model = save(tmp_path, vocab_size=30011)
    prompts = [[i + 1, *range(3 + 2 * i)] for i in range(16)]
    params = SamplingParams(top_k=5, seed=1, max_tokens=12, ignore_eos=True, prompt_logprobs=1)
    found = []
    for options in ({}, {"max_num_batched_tokens": 17}, {"enforce_eager": True, "max_num_batched_tokens": 25}):
        with LLM(model, **OPTIONS | {"max_num_seqs": 16} | options) as llm:
            executor = llm.engine.executor
            assert isinstance(executor, UniprocExecutor)
            overlaps = _watch_logits(executor.runner)
            outputs = llm.generate(prompts, params, use_tqdm=False)
        assert len(overlaps) > 12 and not any(overlaps)
        found.append(
            [
                entry[token_id].logprob
                for prompt, output in zip(prompts, outputs, strict=True)
                for token_id, entry in zip(prompt[1:], (output.prompt_logprobs or [])[1:], strict=True)
                if entry is not None
            ]
        )
    assert len(found[0]) == sum(map(len, prompts)) - 16
    for other in found[1:]:
        assert other == pytest.approx(found[0], abs=0.1)


def _watch_logits(runner: ModelRunner) -> list[bool]:
    """Of all logits that are computed from now on, whether they share memory with the hidden states."""
    overlaps: list[bool] = []
    compute = runner.compute_logits

    def observed(hidden: torch.Tensor, indices: torch.Tensor | None) -> torch.Tensor:
        logits = compute(hidden, indices)
        starts, ends = zip(*((x.data_ptr(), x.data_ptr() + x.nbytes) for x in (hidden, logits)), strict=True)
        overlaps.append(max(starts) < min(ends))
        return logits

    runner.compute_logits = observed  # type: ignore[method-assign]
    return overlaps


@given(st.integers(1, 8), st.integers(0, 1000))
def test_inputs_of_a_decode_step_are_those_of_any_step(num_rows: int, seed: int) -> None:
    assert KERNELS is not None
    rng = random.Random(seed)
    batch, blocks = InputBatch(10, 200, 16, 1000), list(range(300))
    rng.shuffle(blocks)
    new = []
    for i in range(num_rows):
        ids = [rng.randrange(1000) for _ in range(rng.randrange(2, 190))]
        params = SamplingParams(temperature=rng.choice([0.0, 1e-40, 0.6, 3.0, 1e40]))
        mine = [blocks.pop() for _ in range(13)]
        prompt = rng.randrange(1, len(ids))
        new.append(NewSequence(i, ids, prompt, 0, mine, params, rng.getrandbits(64), ()))
    first = SchedulerOutput(new=new, num_scheduled_tokens={s.seq_id: len(s.token_ids) for s in new})
    batch.apply(first)
    batch.commit(batch.build(first)[0], [rng.randrange(1000) for _ in new])
    order = rng.sample(range(num_rows), num_rows)
    step = batch.decodes(SchedulerOutput(num_scheduled_tokens=dict.fromkeys(order, 1)))
    assert step is not None
    inputs = DecodeInputs.zeros(10, 13)
    KERNELS.decode_inputs(torch.from_numpy(step.rows), batch.decode_columns(), 16, inputs)
    ours = inputs.first(num_rows)
    rows = {seq_id: i for i, seq_id in enumerate(step.seq_ids)}
    for seq in new:
        # A sequence alone, computed from its numbers.
        i, length = rows[seq.seq_id], len(seq.token_ids)
        assert ours.positions[i] == length and ours.seq_lens[i] == length + 1 <= step.longest
        assert ours.slots[i] == seq.block_ids[length // 16] * 16 + length % 16
        used = length // 16 + 1
        assert ours.block_tables[i, :used].tolist() == seq.block_ids[:used]
    sampling = batch.sampling(step)
    assert ours.uniforms.tolist() == sampling.uniforms.tolist()
    assert ours.inverse_temperature.tolist() == inverse_temperatures(sampling.temperature).tolist()
    assert torch.equal(ours.input_ids, batch._decode_batch(step).input_ids)


@given(st.lists(st.integers(1, 400), min_size=1, max_size=40), st.integers(0, 2000), st.integers(1, 400))
def test_a_result_lives_until_the_promised_bytes_have_been_handed_out(
    sizes: list[int], num_bytes: int, largest: int
) -> None:
    workspace = Workspace(num_bytes, largest)
    pieces = [workspace.empty((size,), torch.uint8) for size in sizes]
    assert all(workspace.holds(piece) == (size <= largest) for piece, size in zip(pieces, sizes, strict=True))
    inside = [piece for piece in pieces if workspace.holds(piece)]
    for index, piece in enumerate(inside):
        assert piece.data_ptr() % 64 == workspace.memory.data_ptr() % 64
        piece.fill_(index % 256)
        # Whatever was handed out before and is promised to be there still holds what was written to it.
        total = 0
        for earlier in range(index, -1, -1):
            total += -(-len(inside[earlier]) // 64) * 64
            if total > num_bytes:
                break
            assert (inside[earlier] == earlier % 256).all()
