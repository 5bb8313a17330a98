"""A whole engine over the Triton kernels, in the interpreter: what a GPU does, on CPU tensors, equals transformers.

Run by test_triton.py in a process of its own. The graphs are stand-ins that call what they captured.
"""

# ruff: noqa: I001

from __future__ import annotations

import triton_interpreter  # noqa: F401  (first: it sets the switch)

import math
import sys
import threading
from collections.abc import Callable
from typing import Any

import kit
import numpy as np
import pytest
import torch
from test_choice import Cycle
from test_completions import assert_prompt_logprobs
from triton.runtime.interpreter import GridExecutor

from nanoinfer import LLM, SamplingParams
from nanoinfer.attention.base import AttentionBackend, ForwardBatch
from nanoinfer.attention.flash_attn import FlashAttention
from nanoinfer.attention.triton import TritonAttention
from nanoinfer.kernels import reference
from nanoinfer.layers.device_sampler import DeviceSampling, adjusted, sample_on_device
from nanoinfer.layers.sampler import Bias, Penalty, SamplingBatch, TokenCounts, VocabShard, sample
from nanoinfer.step import token_bitmask
from nanoinfer.worker import gpu_memory, model_runner
from nanoinfer.worker.device_runner import DeviceRunner
from nanoinfer.worker.download import Download


class StandInGraph:
    def __init__(self) -> None:
        self.num_replays = 0

    def capture(self, function: Callable[[], None]) -> None:
        self.function = function
        function()

    def replay(self) -> None:
        """What a graph does: the same launches over the same memory, whatever lies in it now. Outputs keep their
        place."""
        self.num_replays += 1
        self.function()


def engine(
    monkeypatch: pytest.MonkeyPatch, graphs: bool, variant: str = "tied", **options: Any
) -> tuple[LLM, kit.Tiny]:
    if graphs:
        monkeypatch.setattr(model_runner, "graph_factory", lambda device, enforce_eager: StandInGraph)
    checkpoint = kit.checkpoint(variant, num_hidden_layers=2)  # the interpreter takes its time for each
    options = {"max_model_len": 64, "max_num_seqs": 5, "async_scheduling": True, **options}  # as on a GPU
    llm = kit.make_llm(checkpoint.directory, shuffle=1, **options)
    return llm, checkpoint


def test_greedy_equals_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefix hits, chunks, batches of 1 to 3; all that is not written is NaN."""
    llm, checkpoint = engine(monkeypatch, True, "one_kv_head", max_num_batched_tokens=16)
    rng = np.random.default_rng(0)
    shared = kit.random_prompt(rng, 9)
    prompts = [shared + kit.random_prompt(rng, n) for n in (1, 4)] + [kit.random_prompt(rng, 3)]
    with kit.poisoned_on_allocation(llm), kit.checked_steps(llm.engine):
        for batch in (prompts, prompts[:1]):
            params = [kit.greedy(n) for n in (3, 5, 4)][: len(batch)]
            for prompt, output in zip(batch, llm.generate(batch, params, use_tqdm=False), strict=True):
                checkpoint.reference.assert_greedy(prompt, output.outputs[0].token_ids)
    assert llm.engine.executor.runner.backend.name == "triton"
    runner = llm.engine.executor.runner._device_runner
    assert runner is not None and runner.graphs is not None
    assert sum(graph.num_replays for graph in runner.graphs._graphs.values()) > 4
    kit.assert_idle(llm.engine)


def test_the_next_step_is_launched_before_the_last_one_s_tokens_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts, one beside a decode, and decodes. Only penalties make the host read before it goes on. The graphs'
    outputs are overwritten by the next step, and all that is not written is NaN."""
    llm, checkpoint = engine(monkeypatch, True, max_num_batched_tokens=9)
    assert llm.engine.overlaps_steps
    log: list[str] = []
    launch, read = DeviceRunner.launch, Download.tolist

    def noted_launch(self: DeviceRunner, *arguments: Any) -> Any:
        log.append("launch")
        return launch(self, *arguments)

    def noted_read(self: Download) -> list[int]:
        log.append("read")
        return read(self)

    monkeypatch.setattr(DeviceRunner, "launch", noted_launch)
    monkeypatch.setattr(Download, "tolist", noted_read)
    prompts = [[7, 8, 9], [30, 2, 5, 11, 4, 1, 6, 3]]
    with kit.poisoned_on_allocation(llm), kit.checked_steps(llm.engine):
        outputs = llm.generate(prompts, [kit.greedy(6), kit.greedy(3)], use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        checkpoint.reference.assert_greedy(prompt, output.token_ids)
    assert log == ["launch", *["launch", "read"] * 5, "read"]
    kit.assert_idle(llm.engine)
    log.clear()
    params = SamplingParams(temperature=0.9, seed=3, repetition_penalty=1.3, max_tokens=3, ignore_eos=True)
    ids = llm.generate([prompts[0]], params, use_tqdm=False)[0].token_ids
    checkpoint.assert_sampled(prompts[0], ids, params, kit.torch_uniforms(3, 3))
    assert log == ["launch", "read"] * 3


def test_sampling_spends_the_same_numbers_as_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each token is the inverse CDF of its uniform number, with filters, penalties and logprobs side by side, every
    step eager."""
    llm, checkpoint = engine(monkeypatch, False)
    rng = np.random.default_rng(1)
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.8}, {"temperature": 1.2, "top_k": 5, "top_p": 0.9}, {"temperature": 0.7, "min_p": 0.1},
        {"temperature": 1.0, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2},
        {"temperature": 0.0, "logprobs": 2},
    ]  # fmt: skip
    params = [SamplingParams(seed=7 + i, max_tokens=3, ignore_eos=True, **kind) for i, kind in enumerate(kinds)]
    prompts = [kit.random_prompt(rng, 4 + i) for i in range(len(params))]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    for i, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        token_ids = output.outputs[0].token_ids
        if params[i].temperature == 0:
            checkpoint.reference.assert_greedy(prompt, token_ids, output.outputs[0].logprobs)
        else:
            checkpoint.assert_sampled(prompt, token_ids, params[i], kit.torch_uniforms(7 + i, len(token_ids)))
    # Alone: the same tokens.
    alone = llm.generate([prompts[1]], params[1], use_tqdm=False)[0]
    assert alone.outputs[0].token_ids == outputs[1].outputs[0].token_ids


def test_banned_tokens_stay_out(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, checkpoint = engine(monkeypatch, True)
    prompt = [5, 6, 7]
    first = checkpoint.greedy(prompt, 1)[0]
    params = SamplingParams(temperature=0.0, max_tokens=4, min_tokens=3, stop_token_ids=[first])
    assert first not in llm.generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids[:3]


@pytest.mark.parametrize("size", [1, 2])
def test_logits_are_adjusted_by_masks_bans_biases_and_penalties(size: int) -> None:
    """In that order, by plain arithmetic; every third row has all four; the last columns are padding."""
    rng = np.random.default_rng(size)
    rows, vocab_size, columns = 9, 323, 360 // size
    logits = torch.from_numpy(rng.standard_normal((rows, 360)).astype(np.float32) * 3)
    logits[:, vocab_size:] = -math.inf
    batch, expected = SamplingBatch(*(np.zeros(rows) for _ in range(5))), logits.clone()
    for row in range(rows):
        allowed, banned, biased, seen = (rng.choice(vocab_size, n, replace=False) for n in (200, 20, 90, 60))
        values = torch.from_numpy(rng.standard_normal(90).astype(np.float32) * 5)
        x = expected[row]
        if row % 3 in (0, 1):
            batch.masks[row] = token_bitmask(allowed.tolist(), vocab_size)
            batch.banned[row] = banned.tolist()
            x[np.setdiff1d(np.arange(vocab_size), allowed)] = -math.inf
            x[banned] = -math.inf
        if row % 3 in (0, 2):
            batch.biases[row] = Bias(torch.from_numpy(biased), values)
            counts = TokenCounts.of(vocab_size, seen[:30], seen[20:].repeat(2))
            batch.penalties[row] = Penalty(counts, 1.4, 0.5, 0.25)
            x[biased] += values
            x[seen] = torch.where(x[seen] > 0, x[seen] / 1.4, x[seen] * 1.4)
            x[seen[20:]] -= 0.5 + 0.25 * 2
    before = logits.clone()
    for rank in range(size):
        mine = slice(rank * columns, (rank + 1) * columns)
        found = adjusted(logits[:, mine].contiguous(), batch, VocabShard(first_id=rank * columns))
        torch.testing.assert_close(found, expected[:, mine])
    assert torch.equal(logits, before)


def test_what_limits_the_choice_does_so_in_captured_steps_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bias, allowed ids, a grammar and prompt_logprobs, beside a row with none of them, all from replayed graphs;
    at last the grammar is alone."""
    llm, checkpoint = engine(monkeypatch, True, "odd_vocab", max_num_batched_tokens=16)
    rng = np.random.default_rng(5)
    prompts = [kit.random_prompt(rng, n, 323) for n in (3, 9, 4, 6, 5)]
    grammar = Cycle([[1, 2, 3], [322, 100], [31], [32, 64]], 7)
    bias = {17: 50.0, 322: 50.0, 40: -50.0}
    params = [
        kit.greedy(4, logit_bias=bias), kit.greedy(4, prompt_logprobs=2), kit.greedy(4),
        kit.greedy(4, allowed_token_ids=[5, 31, 32, 322]),
    ]  # fmt: skip
    requests = [llm.engine.prepare([prompt], one)[0] for prompt, one in zip(prompts, params, strict=False)]
    requests += llm.engine.prepare([prompts[4]], kit.greedy(9), grammar=grammar)
    llm.engine.add(requests)
    with kit.checked_steps(llm.engine):
        while llm.engine.has_unfinished:
            llm.engine.step()
    kit.assert_idle(llm.engine)
    outputs = [request.output() for request in requests]
    assert [len(output.outputs[0].token_ids) for output in outputs] == [4, 4, 4, 4, 7]
    assert_prompt_logprobs(checkpoint, outputs[1], 2)
    for i, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        token_ids = output.outputs[0].token_ids
        logits = checkpoint.reference.logits(tuple(prompt + token_ids))[len(prompt) - 1 : -1].clone()
        if i == 0:
            logits[:, list(bias)] += torch.tensor(list(bias.values()))
        for position, token_id in enumerate(token_ids):
            allowed = list(range(323))
            if i == 3:
                allowed = [5, 31, 32, 322]
            elif i == 4:
                allowed = grammar.sets[position % 4]
            assert token_id in allowed and logits[position, allowed].max() - logits[position, token_id] < 1e-4, i
    runner = llm.engine.executor.runner._device_runner
    assert sum(graph.num_replays for graph in runner.graphs._graphs.values()) >= 3


def test_logits_that_are_not_finite_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, _ = engine(monkeypatch, False)
    with torch.inference_mode():
        llm.engine.executor.runner.model.model.norm.weight.fill_(math.nan)
    with pytest.raises(FloatingPointError, match="NaN or infinity"):
        llm.generate([[1, 2, 3]], kit.greedy(2), use_tqdm=False)


def test_slices_of_the_vocabulary_give_the_same_tokens(in_turns: None) -> None:
    """The ranks' result, whole rows on one rank, and the CPU's sampler."""
    size = 3
    rng = np.random.default_rng(size)
    rows, columns = 8, 1200 * size
    logits = torch.from_numpy(rng.standard_normal((rows, columns)).astype(np.float32) * 3)
    logits[:, -5:] = -math.inf
    temperature = rng.choice([0.0, 0.5, 1.0, 2.0], rows)
    top_k, top_p = rng.choice([0, 3, 50], rows), rng.choice([1.0, 0.7], rows)
    min_p, numbers = rng.choice([0.0, 0.02], rows), rng.random(rows)
    inverse = np.where(temperature > 0, 1 / np.where(temperature > 0, temperature, 1.0), 0.0)
    sampling = DeviceSampling(
        *(torch.from_numpy(x) for x in (inverse.astype(np.float32), min_p.astype(np.float32), top_k.astype(np.int32),
        top_p.astype(np.float32), numbers)),
    )  # fmt: skip
    whole = sample_on_device(logits, sampling, VocabShard()).tolist()
    ranks = kit.Ranks(size)

    def one(rank: int) -> list[int]:
        mine = logits[:, rank * 1200 : (rank + 1) * 1200].contiguous()
        return sample_on_device(mine, sampling, VocabShard(ranks.groups[rank].tp, rank * 1200)).tolist()

    assert all(result == whole for result in ranks.run(one))
    assert whole == sample(logits, SamplingBatch(temperature, top_k, top_p, min_p, numbers))[0]
    # Rows that are not finite, greedy or random, have no token, whichever rank has the culprit; others keep theirs.
    logits[1, 1500], logits[2, 0], logits[5] = math.nan, math.inf, -math.inf
    expected = [-1 if row in (1, 2, 5) else token for row, token in enumerate(whole)]
    assert sample_on_device(logits, sampling, VocabShard()).tolist() == expected
    assert all(result == expected for result in ranks.run(one))


@pytest.fixture
def in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """One launch at a time: the interpreter patches triton while a kernel runs, so two threads must not run any."""
    lock, launch = threading.Lock(), GridExecutor.__call__

    def locked(self: Any, *arguments: Any, **options: Any) -> Any:
        with lock:
            return launch(self, *arguments, **options)

    monkeypatch.setattr(GridExecutor, "__call__", locked)


def test_two_ranks_equal_transformers(in_turns: None) -> None:
    """Both ranks end every step with the same tokens, which the executor checks; a filter looks at whole rows."""
    checkpoint = kit.checkpoint("tied", num_hidden_layers=2)
    llm = kit.lockstep_llm(checkpoint.directory, 2, max_model_len=64, max_num_seqs=2)
    assert llm.engine.executor.runner.backend.name == "triton"
    prompts = [[7, 8, 9], [30, 2, 5, 11]]
    params = [kit.greedy(3), SamplingParams(temperature=0.9, top_k=9, seed=5, max_tokens=3, ignore_eos=True)]
    first, second = (output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False))
    checkpoint.reference.assert_greedy(prompts[0], first)
    checkpoint.assert_sampled(prompts[1], second, params[1], kit.torch_uniforms(5, 3))


@torch.inference_mode()
def test_padding_writes_into_no_block_whatever_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five sizes are captured and replayed with fewer rows; blocks of nobody keep what they held, bit for bit."""
    llm, _ = engine(monkeypatch, True)
    runner = llm.engine.executor.runner
    data = runner._kv_cache.data
    before = data.fill_(3.0).clone()
    graphs = runner._device_runner.graphs
    graphs.run(np.array([], np.int64), np.array([], np.int64))
    graphs.capture_size(4)
    assert torch.equal(data, before), "a batch of padding alone wrote"
    tokens = runner._device_runner.rows.last_token.clone()
    runner._device_runner.rows.block_tables[2] = 9
    graphs.run(np.array([2, 2, 2]), np.array([0, 1, 2]))
    changed = (data != before).flatten(3).any(-1).any(0).any(0)
    assert changed.nonzero().flatten().tolist() == [9]
    after = runner._device_runner.rows.last_token
    assert torch.equal(after[[0, 1, 3, 4]], tokens[[0, 1, 3, 4]])


def test_the_largest_step_runs_over_one_block_and_writes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, _ = engine(monkeypatch, False, max_num_batched_tokens=11)
    runner = llm.engine.executor.runner
    limits = llm.engine.scheduler.config
    kv_cache = runner.backend.allocate(2, 1, limits.block_size, torch.float32, "cpu")
    before = kv_cache.data.fill_(3.0).clone()
    probe = runner._make_device_runner(limits, kv_cache)
    gpu_memory.run_largest_step(probe)
    assert torch.equal(kv_cache.data, before)


@pytest.fixture
def flash_attn(monkeypatch: pytest.MonkeyPatch) -> Any:
    import flash_attn_stand_in

    monkeypatch.setitem(sys.modules, "flash_attn", flash_attn_stand_in)
    flash_attn_stand_in.calls.clear()
    return flash_attn_stand_in


@pytest.mark.parametrize("lengths", [[(1, 300), (1, 0), (1, 255)], [(5, 300), (1, 10), (257, 0), (1, 256)]])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", [FlashAttention, TritonAttention])
def test_a_backend_stores_and_attends(
    flash_attn: Any, kind: type[AttentionBackend], lengths: list[tuple[int, int]], dtype: torch.dtype
) -> None:
    """lengths: of the queries, and of what is cached; decodes alone, and between prefills. flash-attn's stand-in
    refuses what the package's documentation does."""
    generator = torch.Generator().manual_seed(0)
    backend, block_size = kind(4, 2, 16), FlashAttention.default_block_size
    kv_cache = backend.allocate(2, 9, block_size, dtype, "cpu")
    kv_cache.data.copy_(torch.randn(kv_cache.data.shape, generator=generator))
    kv = kv_cache.layer(1)
    query_lens, seq_lens = [q for q, _ in lengths], [sum(pair) for pair in lengths]
    starts = torch.tensor([0, *query_lens]).cumsum(0).int()
    tables = torch.randperm(9, generator=generator)[:8].int().view(4, 2)[: len(lengths)]
    positions = torch.cat([torch.arange(cached, cached + count) for count, cached in lengths])
    owner = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(query_lens))
    slots = tables[owner, positions // block_size].long() * block_size + positions % block_size
    batch = ForwardBatch(
        input_ids=positions, positions=positions, query_start_loc=starts, seq_lens=torch.tensor(seq_lens).int(),
        block_tables=tables, slot_mapping=slots, logits_indices=starts[1:].long() - 1, max_query_len=max(query_lens),
        max_seq_len=4096,  # a bound, as the runner gives it
    )  # fmt: skip
    batch.plan = backend.plan(batch, block_size)
    k, v = (torch.randn(len(positions), 2, 16, generator=generator).to(dtype) for _ in range(2))
    q = torch.randn(len(positions), 4, 16, generator=generator).to(dtype)
    backend.store(k, v, kv, batch)
    out = backend.attend(q, kv, batch)
    expected = reference.paged_attention(q, *kv, tables, starts, batch.seq_lens, 16**-0.5)
    assert float((out.double() - expected.double()).norm() / expected.double().norm()) < 1e-2
    if kind is TritonAttention:
        return
    is_decode = max(query_lens) == 1
    assert flash_attn.calls == ["flash_attn_with_kvcache" if is_decode else "flash_attn_varlen_func"]


def test_an_engine_over_flash_attn_with_graphs(flash_attn: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float16, forced to agree with float32 where that is sure of its token."""
    llm, checkpoint = engine(monkeypatch, True, attention_backend="flash_attn", dtype="float16", kvcache_block_size=256)
    assert llm.engine.executor.runner.backend.name == "flash_attn"
    prompt = kit.random_prompt(np.random.default_rng(3), 9)
    output = llm.generate([prompt], kit.greedy(4), use_tqdm=False)[0].outputs[0].token_ids
    logits = checkpoint.reference.logits(tuple(prompt + output))[len(prompt) - 1 : -1]
    behind = logits.max(dim=-1).values - logits.gather(1, torch.tensor(output).unsqueeze(1)).squeeze(1)
    assert float(behind.max()) < 0.05 * float(logits.std())
    assert set(flash_attn.calls) == {"flash_attn_with_kvcache", "flash_attn_varlen_func"}
