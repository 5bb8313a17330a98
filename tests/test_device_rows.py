"""What a GPU's steps keep on the device, over a model that anybody can compute: keys are hashes of all tokens so far.
A wrong block, row, position, last token or number of the sampler changes every token after it.

Everything but the model is as on a GPU: rows, graphs and their padding, steps in flight, and a host that sees no token
before it asks. What a step costs to wait for is in test_device_step.py, the kernels are in triton_engine_cases.py.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import kit
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kit import assert_idle, checkpoint, random_prompt
from test_cuda_graph import StandInGraph

from nanoinfer import LLM, SamplingParams
from nanoinfer.attention.base import ForwardBatch
from nanoinfer.engine.output_processor import Request
from nanoinfer.engine.sequence import Sequence
from nanoinfer.kernels import reference
from nanoinfer.layers.sampler import SamplingBatch, VocabShard
from nanoinfer.worker import device_runner
from nanoinfer.worker.cuda_graph import DecodeGraphs, graph_sizes
from nanoinfer.worker.device_runner import DeviceRunner
from nanoinfer.worker.download import Download
from nanoinfer.worker.input_batch import InputBatch, StepRows

DIRECTORY = checkpoint("tied", tokenizer=True).directory
B, VOCAB = 8, 320
_PRIME = 1_000_003


def link(before: int, token_id: int) -> int:
    """The key of a token, from that of the token before it."""
    return (before * 31 + token_id + 7) % _PRIME


def next_token(key: int, uniform: float) -> int:
    return (key + int(uniform * 1000)) % VOCAB


class HashingDevice(DeviceRunner):
    """pool: the key in each slot; -1 where nothing was written."""

    pool: torch.Tensor
    num_sampled_again = 0

    def decode(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        kept = self.rows
        columns = (kept.last_token, kept.num_prompt, kept.seeds, *kept.settings, kept.block_tables)
        ids, positions, slots, _, uniforms, table_rows, *_ = reference.prepare_decode(
            inputs[0], inputs[1], *columns, kept.block_size
        )
        tables = kept.block_tables.index_select(0, table_rows)
        keys = torch.tensor([self._write(*one) for one in zip(ids, positions, slots, tables, strict=True)])
        tokens = torch.tensor([next_token(int(key), float(u)) for key, u in zip(keys, uniforms, strict=True)])
        live = inputs[0] >= 0
        kept.last_token[inputs[0][live].long()] = tokens[live]
        return tokens, keys.unsqueeze(1)

    def _write(self, token_id: torch.Tensor, position: torch.Tensor, slot: torch.Tensor, table: torch.Tensor) -> int:
        if slot < 0:
            return 0
        before = 0
        if position > 0:
            block, offset = divmod(int(position) - 1, B)
            before = int(self.pool[int(table[block]) * B + offset])
            assert before >= 0, "a slot is read that nobody has written"
        self.pool[slot] = link(before, int(token_id))
        return int(self.pool[slot])

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        owner = torch.repeat_interleave(batch.query_start_loc.diff())
        tables = batch.block_tables[owner]
        each = zip(batch.input_ids, batch.positions, batch.slot_mapping, tables, strict=True)
        return torch.tensor([self._write(*one) for one in each])

    def compute_logits(self, hidden: torch.Tensor, indices: torch.Tensor | None) -> torch.Tensor:
        return (hidden if indices is None else hidden[indices]).unsqueeze(1)

    def _sample(self, step: StepRows, batch: InputBatch, logits: torch.Tensor, sampling: SamplingBatch) -> torch.Tensor:
        self.num_sampled_again += 1
        pairs = zip(logits[:, 0].tolist(), sampling.uniforms.tolist(), strict=True)
        tokens = torch.tensor([next_token(key, uniform) for key, uniform in pairs])
        self.rows.last_token[torch.from_numpy(step.rows[step.sampled])] = tokens
        return tokens


def hashing_llm(graphs: bool, **options: Any) -> tuple[LLM, HashingDevice]:
    """An engine that believes in its GPU, and the device."""
    llm = kit.make_llm(DIRECTORY, shuffle=1, async_scheduling=True, kvcache_block_size=B, **options)
    executor, limits, device = llm.engine.executor, llm.engine.scheduler.config, torch.device("cpu")
    runner: Any = executor.runner  # type: ignore[attr-defined]
    backend: Any = SimpleNamespace(plan=lambda batch, block_size: None)
    hashing = HashingDevice(runner.model, backend, runner.kv_cache, limits, VocabShard(), device)
    hashing.pool = torch.full((limits.num_blocks * B,), -1)
    if graphs:
        hashing.graphs = DecodeGraphs(hashing.decode, graph_sizes(limits.max_num_seqs), device, StandInGraph)
        hashing.graphs.capture()
        assert int(hashing.pool.max()) == -1, "padding was written"
    runner._device_runner, executor.runs_apart = hashing, True
    assert llm.engine.overlaps_steps
    return llm, hashing


def expected(seq: Sequence, prompt: list[int]) -> list[int]:
    """Its output if nothing but max_tokens ends it."""
    key, output = 0, []
    for token_id in prompt:
        key = link(key, token_id)
    for uniform in kit.torch_uniforms(seq.seed, seq.max_tokens).tolist():
        output.append(next_token(key, uniform))
        key = link(key, output[-1])
    return output


def random_params(rng: np.random.Generator) -> SamplingParams:
    special: list[dict[str, Any]] = [
        {}, {}, {"top_k": 5}, {"min_tokens": 3}, {"repetition_penalty": 1.2}, {"logit_bias": {3: 1.0}},
    ]  # fmt: skip
    return SamplingParams(
        max_tokens=int(rng.integers(3, 20)),
        n=int(rng.integers(1, 4)) if rng.random() < 0.3 else 1,
        ignore_eos=True,
        stop_token_ids=rng.integers(0, VOCAB, 15).tolist() if rng.random() < 0.4 else [],
        **special[int(rng.integers(len(special)))],
    )


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32), st.integers(6, 40), st.sampled_from([3, 7, 24, 200]), st.booleans())
def test_every_token_is_the_one_that_all_before_it_call_for(
    seed: int, num_blocks: int, budget: int, graphs: bool
) -> None:
    """Chunks, prefix hits, preemptions, late arrivals, stops, aborts and failing steps, with a step in flight."""
    rng = np.random.default_rng(seed)
    llm, device = hashing_llm(graphs, num_kvcache_blocks=num_blocks, max_num_batched_tokens=budget, max_num_seqs=5)
    engine = llm.engine
    stems = [random_prompt(rng, 3 * B) for _ in range(2)]
    left = [stems[i % 2][: rng.integers(0, 3 * B)] + random_prompt(rng, int(rng.integers(1, 6))) for i in range(9)]
    requests: list[tuple[list[int], Request]] = []
    aborted: set[Request] = set()
    launch = device.launch

    def failing_launch(*arguments: Any) -> Any:
        if rng.random() < 0.03:
            raise RuntimeError("a step fails")
        return launch(*arguments)

    device.launch = failing_launch  # type: ignore[method-assign]
    while left or engine.has_unfinished:
        if left and rng.random() < 0.4:
            prompt = left.pop()
            requests += [(prompt, request) for request in engine.add_requests([prompt], random_params(rng))]
        if requests and rng.random() < 0.03:
            victim = requests[int(rng.integers(len(requests)))][1]
            if not victim.is_done:
                engine.abort([victim])
                aborted.add(victim)
        try:
            engine.step()
        except RuntimeError as error:
            assert "a step fails" in str(error)
        engine.scheduler.check()
    device.launch = launch  # type: ignore[method-assign]
    assert_idle(engine)
    for prompt, request in requests:
        for completion in request.completions:
            seq = completion.seq
            whole = expected(seq, prompt)
            assert seq.output_token_ids == whole[: seq.num_output_tokens]
            if request not in aborted and seq.finish_reason == "length":
                pool_is_full = len(prompt) + seq.num_output_tokens == num_blocks * B
                assert seq.num_output_tokens == seq.max_tokens or pool_is_full


@pytest.mark.parametrize("graphs", [False, True])
def test_what_the_property_is_about_does_happen(graphs: bool) -> None:
    """Preemption, prefix hits, plain steps and steps whose rows are sampled again."""
    llm, device = hashing_llm(graphs, num_kvcache_blocks=9, max_num_seqs=5)
    rng = np.random.default_rng(2)
    stem = random_prompt(rng, 2 * B)
    prompts = [[*stem, i] for i in range(4)]
    for kinds in ({}, {"logit_bias": {3: 1.0}}):
        params = SamplingParams(max_tokens=14, ignore_eos=True, **kinds)  # type: ignore[arg-type]
        before = device.num_sampled_again
        requests = llm.engine.add_requests(prompts, params)
        while llm.engine.has_unfinished:
            llm.engine.step()
        for prompt, request in zip(prompts, requests, strict=True):
            assert request.output().token_ids == expected(request.seq, prompt)
        # Prompts are always sampled by the host's settings, decodes only where something asks for it.
        assert (device.num_sampled_again - before > 14) == bool(kinds)
    assert llm.engine.scheduler.num_preemptions and llm.engine.scheduler.block_manager.hit_tokens


def test_a_chunk_that_samples_nothing_is_waited_for_as_any_step_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """With all chunks of a long prompt on their way at once, whoever comes next would wait for them all."""
    unread: list[int] = []

    class Counted(Download):
        def __init__(self, source: torch.Tensor) -> None:
            super().__init__(source)
            unread.append(len(source))

        def tolist(self) -> list[int]:
            unread.pop(0)
            return super().tolist()

    monkeypatch.setattr(device_runner, "Download", Counted)
    llm, _ = hashing_llm(True, max_num_batched_tokens=4)
    (request,) = llm.engine.add_requests([list(range(30))], SamplingParams(max_tokens=3, ignore_eos=True))
    seen = []
    while llm.engine.has_unfinished:
        llm.engine.step()
        seen.append(list(unread))
    assert seen == [[0]] * 7 + [[1]] * 3 + [[]]
    assert request.output().token_ids == expected(request.seq, list(range(30)))
