"""Several ranks answer as one does and as transformers does, in processes over gloo: batches of any size, mixtures with
chunks, prefix hits and preemption, seeded sampling, log-probabilities. And who holds what: the parts of a checkpoint
that the ranks state and read, by one description for ranks in processes and for ranks side by side in one process.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import faulty_worker
import numpy as np
import pytest
import tiny
import torch
from kit import checkpoint, random_prompt, sampling_weights, torch_uniforms
from safetensors.torch import load_file

from nanoinfer import LLM, SamplingParams
from nanoinfer.attention.select import select_backend
from nanoinfer.config import ModelConfig
from nanoinfer.distributed.group import ParallelGroups, TensorParallelGroup
from nanoinfer.executor.multiproc import MultiprocExecutor
from nanoinfer.layers.shard import ShardSpec
from nanoinfer.models.qwen3 import Qwen3ForCausalLM
from nanoinfer.outputs import RequestOutput

BUDGET = 96
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "num_kvcache_blocks": 64,
    "kvcache_block_size": 8,
    "max_num_batched_tokens": BUDGET,
    "max_num_seqs": 64,
    "seed": 0,
    "step_timeout": 30.0,
}
# (variant, ranks). Four ranks share two KV heads, or one, and 323 ids.
CASES = [
    ("tied", 2),
    ("untied", 2),
    ("odd_vocab", 2),
    ("one_kv_head", 2),
    ("untied", 4),
    ("odd_vocab", 4),
    ("one_kv_head", 4),
]


class Engines:
    """The same checkpoint over several ranks, over one, and in transformers."""

    def __init__(self, variant: str, size: int) -> None:
        self.model = checkpoint(variant)
        self.one = LLM(self.model.directory, **OPTIONS)
        self.many = LLM(self.model.directory, tensor_parallel_size=size, **OPTIONS)
        assert isinstance(self.many.engine.executor, MultiprocExecutor)

    def generate(self, prompts: list[list[int]], params: SamplingParams | list[SamplingParams]) -> list[RequestOutput]:
        """What several ranks answer, which must be what one answers, log-probabilities included."""
        outputs = self.many.generate(prompts, params, use_tqdm=False)
        expected = self.one.generate(prompts, params, use_tqdm=False)
        assert [output.token_ids for output in outputs] == [output.token_ids for output in expected]
        for output, other in zip(outputs, expected, strict=True):
            assert_same_logprobs(output, other)
        self.many.engine.scheduler.check()
        assert not self.many.engine.has_unfinished
        return outputs

    def close(self) -> None:
        self.one.close()
        self.many.close()


def assert_same_logprobs(output: RequestOutput, other: RequestOutput) -> None:
    entries, others = output.outputs[0].logprobs, other.outputs[0].logprobs
    assert (entries is None) == (others is None)
    for mine, theirs in zip(entries or [], others or [], strict=True):
        assert len(mine) == len(theirs)
        values, expected = ([value.logprob for value in entry.values()] for entry in (mine, theirs))
        assert values == pytest.approx(expected, abs=1e-4)
        assert [value.rank for value in mine.values()] == [value.rank for value in theirs.values()]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]}-{case[1]}")
def engines(request: pytest.FixtureRequest) -> Iterator[Engines]:
    pair = Engines(*request.param)
    yield pair
    pair.close()


# --- Equality ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [1, 2, 5, 64])
def test_a_batch_of_any_size_equals_one_rank_and_transformers(engines: Engines, batch_size: int) -> None:
    rng = np.random.default_rng(batch_size)
    lengths = rng.integers(1, 6, batch_size)
    prompts = [random_prompt(rng, int(length), engines.model.vocab_size) for length in lengths]
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logprobs=3)
    for prompt, output in zip(prompts, engines.generate(prompts, params), strict=True):
        assert len(output.token_ids) == 3
        engines.model.reference.assert_greedy(prompt, output.token_ids, output.outputs[0].logprobs)


def test_chunks_prefix_hits_and_preemption_equal_one_rank_and_transformers(engines: Engines) -> None:
    rng = np.random.default_rng(1)
    vocab_size = engines.model.vocab_size
    shared = random_prompt(rng, 40, vocab_size)
    lengths = [BUDGET + 24, 1, 8, 9] + [23] * 12
    prompts = [random_prompt(rng, length, vocab_size) for length in lengths]
    prompts += [shared + random_prompt(rng, length, vocab_size) for length in (8, 1, 60)]
    scheduler = engines.many.engine.scheduler
    before = scheduler.num_preemptions
    outputs = engines.generate(prompts, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=2))
    assert scheduler.num_preemptions > before, "nothing was preempted"
    assert sum(output.num_cached_tokens for output in outputs) >= 40, "nothing was taken from the prefix cache"
    for prompt, output in zip(prompts, outputs, strict=True):
        assert len(output.token_ids) == 12
        engines.model.reference.assert_greedy(prompt, output.token_ids, output.outputs[0].logprobs)


MIN_TOKENS, MANY_STOPS = 5, tuple(range(60, 260))
SAMPLINGS: list[dict[str, Any]] = [
    {},
    {"top_k": 5},
    {"top_p": 0.8},
    {"min_p": 0.05},
    {"top_k": 40, "top_p": 0.9, "min_p": 0.01},
    {"repetition_penalty": 1.4, "presence_penalty": 0.7, "frequency_penalty": 0.4},
    {"repetition_penalty": 0.8, "top_k": 30, "temperature": 2.0},
    {"min_tokens": MIN_TOKENS, "stop_token_ids": MANY_STOPS, "temperature": 3.0},
    {"temperature": 0.0, "presence_penalty": 2.0, "repetition_penalty": 1.3},
]


def test_seeded_sampling_equals_one_rank_and_the_inverse_cdf_of_transformers(engines: Engines) -> None:
    rng = np.random.default_rng(2)
    prompts = [random_prompt(rng, 3 + i, engines.model.vocab_size) for i in range(len(SAMPLINGS))]
    params = [
        SamplingParams(
            **{"temperature": 1.5, "ignore_eos": True, "max_tokens": 8, "seed": 100 + i, "logprobs": 4, **how}
        )
        for i, how in enumerate(SAMPLINGS)
    ]
    for prompt, how, output in zip(prompts, params, engines.generate(prompts, params), strict=True):
        assert len(output.token_ids) == 8 or (how.min_tokens and len(output.token_ids) > MIN_TOKENS)
        assert_sampled(engines.model.reference, prompt, output, how)


def assert_sampled(reference: tiny.Reference, prompt: list[int], output: RequestOutput, params: SamplingParams) -> None:
    """Each token is where the cumulative weight passes the request's uniform number; log-probabilities are raw."""
    token_ids = output.token_ids
    logits = reference.logits(tuple(prompt + token_ids))[len(prompt) - 1 : -1]
    raw = logits.log_softmax(dim=-1)
    uniforms = torch_uniforms(params.seed or 0, len(token_ids))
    entries = output.outputs[0].logprobs
    assert entries is not None and params.logprobs is not None
    for i, token_id in enumerate(token_ids):
        row = logits[i].numpy().copy()
        if i < params.min_tokens:
            row[list(params.stop_token_ids)] = -np.inf
        weights = sampling_weights(row, params, prompt, token_ids[:i])
        weights /= weights.sum()
        assert weights[token_id] > 0, f"output {i}: token {token_id} is filtered out"
        above = weights.cumsum()[token_id]
        assert above - weights[token_id] - 1e-4 <= uniforms[i] <= above + 1e-4, f"output {i} is not the inverse CDF"
        best = raw[i].topk(params.logprobs).indices.tolist()
        assert set(entries[i]) == {token_id, *best}
        for other, value in entries[i].items():
            assert value.logprob == pytest.approx(raw[i, other].item(), abs=1e-4)
            assert value.rank == 1 + int((raw[i] > raw[i, other]).sum())


# --- Who holds what ----------------------------------------------------------------------------------------------


def shards_of(config: ModelConfig, rank: int, size: int) -> dict[str, ShardSpec]:
    """What a rank states, without any process."""
    backend = select_backend(config, "cpu")(config.num_attention_heads, config.num_key_value_heads, config.head_dim)
    groups = ParallelGroups(tp=TensorParallelGroup(rank, size))
    return {spec.name: spec for spec in Qwen3ForCausalLM(config, backend, groups, torch.float32, "cpu").shards()}


# (ranks, KV heads) of a model with twelve query heads.
SHARINGS = [
    (size, num_kv_heads)
    for size in (1, 2, 3, 4, 6, 12)
    for num_kv_heads in (1, 2, 3, 6, 12)
    if num_kv_heads % size == 0 or size % num_kv_heads == 0
]


def config_of(variant: str, **overrides: Any) -> ModelConfig:
    return replace(ModelConfig.from_directory(checkpoint(variant).directory), **overrides)


@pytest.mark.parametrize(("size", "num_kv_heads"), SHARINGS)
@pytest.mark.parametrize("variant", ["bias", "untied"])
def test_each_element_of_a_checkpoint_is_held_as_often_as_it_should(variant: str, size: int, num_kv_heads: int) -> None:
    config = config_of(variant, num_attention_heads=12, num_key_value_heads=num_kv_heads, vocab_size=325)
    ranks = [shards_of(config, rank, size) for rank in range(size)]
    assert all(set(rank) == set(ranks[0]) for rank in ranks), "ranks state different names"
    for name, spec in ranks[0].items():
        held = torch.zeros(spec.shape, dtype=torch.int64)
        for rank in ranks:
            assert rank[name].shape == spec.shape
            held[rank[name].index] += 1
        times = (
            size if "norm" in name else max(1, size // num_kv_heads) if ".k_proj" in name or ".v_proj" in name else 1
        )
        assert held.unique().tolist() == [times], name


@pytest.mark.parametrize(("size", "num_kv_heads"), SHARINGS)
def test_what_one_matrix_of_a_rank_puts_out_the_next_takes_in(size: int, num_kv_heads: int) -> None:
    config = config_of("untied", num_attention_heads=12, num_key_value_heads=num_kv_heads)
    for rank in range(size):
        specs = shards_of(config, rank, size)

        def held(matrix: str, dim: int, specs: dict[str, ShardSpec] = specs) -> list[int]:
            spec = specs[f"model.layers.1.{matrix}_proj.weight"]
            return list(range(spec.shape[dim]))[spec.index[dim]]

        assert held("mlp.gate", 0) == held("mlp.up", 0) == held("mlp.down", 1)
        assert held("self_attn.q", 0) == held("self_attn.o", 1)
        assert held("self_attn.k", 0) == held("self_attn.v", 0)
        query_heads = {row // config.head_dim for row in held("self_attn.q", 0)}
        kv_heads = {row // config.head_dim for row in held("self_attn.k", 0)}
        # A query head reads the KV head of its group.
        assert kv_heads == {head * num_kv_heads // 12 for head in query_heads}


def test_rank_processes_read_the_parts_that_ranks_in_one_process_state_and_answer_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three ranks, so that nothing is a power of two."""
    model = tiny.save(tmp_path, "odd_vocab", num_attention_heads=6, num_key_value_heads=3, num_hidden_layers=2)
    monkeypatch.setattr(MultiprocExecutor, "worker_module", "faulty_worker")
    options = json.dumps({"place": "report", "folder": str(tmp_path)})
    monkeypatch.setenv(faulty_worker.VARIABLE, options)
    prompts = [[5, 6, 7], [322, 0, 108, 107, 216, 215]]
    with LLM(tmp_path, tensor_parallel_size=3, **OPTIONS) as llm:
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=4, ignore_eos=True), use_tqdm=False)
    reference = tiny.Reference(model)
    for prompt, output in zip(prompts, outputs, strict=True):
        reference.assert_greedy(prompt, output.token_ids)

    stored = load_file(tmp_path / "model.safetensors")
    config = ModelConfig.from_directory(tmp_path)
    for rank in range(3):
        stated = shards_of(config, rank, 3)
        parts = torch.load(tmp_path / f"rank{rank}.pt", weights_only=False)["parts"]
        assert [part[0] for part in parts] == list(stated)
        assert {part[0] for part in parts} == set(stored) - {"lm_head.weight"}
        for name, shape, index, held in parts:
            assert (shape, index) == (stated[name].shape, stated[name].index)
            assert torch.equal(held, stored[name][index]), f"rank {rank} holds another part of {name}"


# --- Sizes -------------------------------------------------------------------------------------------------------


def write_config(directory: Path, **overrides: Any) -> Path:
    """A checkpoint for load_format="dummy"."""
    tiny.build(num_hidden_layers=1).config.save_pretrained(directory)
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "architectures": ["Qwen3ForCausalLM"], **overrides}))
    return directory


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "intermediate_size"),
    [(4, 2, 96), (4, 2, 98), (4, 4, 99), (12, 3, 96), (12, 3, 90), (12, 12, 100), (16, 8, 3072), (7, 7, 49)],
)
def test_a_size_that_does_not_divide_is_refused_before_any_process_starts_naming_those_that_do(
    num_heads: int, num_kv_heads: int, intermediate_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Started(Exception):
        """A process was started."""

    def refuse(*arguments: Any, **options: Any) -> None:
        raise Started

    monkeypatch.setattr(subprocess, "Popen", refuse)
    write_config(
        tmp_path,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        intermediate_size=intermediate_size,
    )

    def divides(size: int) -> bool:
        heads = num_heads % size == 0 and (num_kv_heads % size == 0 or size % num_kv_heads == 0)
        return heads and intermediate_size % size == 0

    valid = [size for size in range(1, num_heads + 1) if divides(size)]
    for size in range(2, num_heads + 3):
        if divides(size):
            with pytest.raises(Started):
                LLM(tmp_path, load_format="dummy", tensor_parallel_size=size)
            continue
        with pytest.raises(ValueError, match=f"tensor_parallel_size {size} ") as caught:
            LLM(tmp_path, load_format="dummy", tensor_parallel_size=size)
        assert str(valid) in str(caught.value), f"{valid} are possible, but: {caught.value}"


def test_the_least_of_what_the_ranks_offer_is_the_pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.save(tmp_path, num_hidden_layers=1)
    little = 4_000_000
    monkeypatch.setattr(MultiprocExecutor, "worker_module", "faulty_worker")
    monkeypatch.setenv(faulty_worker.VARIABLE, json.dumps({"place": "memory", "rank": 1, "bytes": little}))
    # Keys and values of one layer, one KV head per rank, 8 tokens, 32 dimensions, 4 bytes each.
    bytes_per_block = 2 * 1 * 1 * 8 * 32 * 4
    # Both ranks share what is left; without being asked, two fifths of it are taken.
    num_blocks = int(0.4 * (little // 2)) // bytes_per_block
    prompts = [[i, i + 1, i + 2] for i in range(20)]
    with LLM(tmp_path, tensor_parallel_size=2, kvcache_block_size=8, dtype="float32", seed=0) as llm:
        assert llm.capacity.bytes_per_block == bytes_per_block
        assert llm.capacity.num_blocks == num_blocks
        assert llm.engine.scheduler.config.num_blocks == num_blocks
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=4, ignore_eos=True), use_tqdm=False)
    reference = tiny.Reference(model)
    for prompt, output in zip(prompts, outputs, strict=True):
        reference.assert_greedy(prompt, output.token_ids)


def test_a_pool_that_no_rank_can_hold_is_a_value_error_with_the_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny.save(tmp_path, num_hidden_layers=1)
    monkeypatch.setattr(MultiprocExecutor, "worker_module", "faulty_worker")
    monkeypatch.setenv(faulty_worker.VARIABLE, json.dumps({"place": "memory", "rank": 1, "bytes": 100_000}))
    needed = 64 * 2 * 8 * 32 * 4
    with pytest.raises(ValueError, match=f"(?s){needed}.*50000"):
        LLM(tmp_path, tensor_parallel_size=2, **OPTIONS)
