"""Layers and attention: the parts of a sharded layer, merged by hand, are the unsharded layer; small modules equal
transformers'; the CPU's attention equals the oracle on random mixtures over poisoned memory.
"""

from __future__ import annotations

import math
from typing import Any

import kit
import numpy as np
import pytest
import tiny
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from kit import assert_idle, checkpoint, greedy, hand_merged, random_prompt
from transformers.models.qwen3 import modeling_qwen3

from nanoinfer.attention.base import ForwardBatch
from nanoinfer.attention.cpu import CPUAttention
from nanoinfer.attention.select import select_backend
from nanoinfer.config import ModelConfig
from nanoinfer.distributed.group import ParallelGroups, TensorParallelGroup
from nanoinfer.kernels import reference
from nanoinfer.kernels.reference import apply_rotary
from nanoinfer.layers.activation import silu_and_mul
from nanoinfer.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from nanoinfer.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from nanoinfer.layers.norm import RMSNorm
from nanoinfer.layers.rotary import RotaryEmbedding
from nanoinfer.layers.shard import ShardSpec
from nanoinfer.models.loader import load_dummy_weights, load_weights, open_checkpoint
from nanoinfer.models.qwen3 import Qwen3ForCausalLM

OPTIONS: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
SIZES = [1, 2, 4]


def fill(specs: Any, tensors: dict[str, torch.Tensor]) -> None:
    """What the loader does: each part from the checkpoint's tensor."""
    for spec in specs:
        assert isinstance(spec, ShardSpec)
        assert tuple(tensors[spec.name].shape) == spec.shape
        spec.dest.copy_(tensors[spec.name][spec.index])


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# --- Sharded layers, merged by hand ------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("vocab_size", [320, 321, 323, 5, 3])
def test_embedding_partials_sum_to_the_table_s_rows(size: int, vocab_size: int) -> None:
    table = rand(vocab_size, 16)
    ids = torch.arange(vocab_size).repeat(2)
    total = torch.zeros(len(ids), 16)
    num_rows = set()
    for groups in hand_merged(size):
        layer = VocabParallelEmbedding(vocab_size, 16, groups=groups, options=OPTIONS)
        layer.weight.data[: layer.num_owned] = float("nan")
        fill(layer.shards("embed"), {"embed.weight": table})
        part = layer(ids)
        owner = ((ids >= layer.first_id) & (ids < layer.first_id + layer.num_owned)).unsqueeze(1)
        assert not part[~owner.squeeze(1)].any(), "a rank adds to ids that it does not own"
        total += part
        num_rows.add(layer.num_rows)
    assert torch.equal(total, table[ids])
    assert num_rows == {-(-vocab_size // size)}


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("vocab_size", [320, 321, 323, 5, 3])
def test_head_slices_concatenate_and_padded_ids_never_win(size: int, vocab_size: int) -> None:
    table, hidden = rand(vocab_size, 16), rand(6, 16, seed=1)
    # All true logits of one row are below zero, where a padding logit of zero would win.
    hidden[0] = -table.sum(0) * 100
    table += 0.1 * torch.sign(hidden[0]) * -1
    parts = []
    for groups in hand_merged(size):
        layer = ParallelLMHead(vocab_size, 16, groups=groups, options=OPTIONS)
        fill(layer.shards("head"), {"head.weight": table})
        parts.append(layer(hidden))
    merged = torch.cat(parts, dim=1)
    assert merged.shape[1] == size * -(-vocab_size // size)
    torch.testing.assert_close(merged[:, :vocab_size], hidden @ table.T, rtol=1e-5, atol=1e-4)
    assert (merged[:, vocab_size:] == -math.inf).all()
    assert (merged.argmax(dim=1) < vocab_size).all()


def test_a_tied_head_is_the_embedding_s_table() -> None:
    for groups in hand_merged(2):
        embedding = VocabParallelEmbedding(321, 16, groups=groups, options=OPTIONS)
        head = ParallelLMHead(321, 16, groups=groups, options={**OPTIONS, "device": "meta"})
        head.tie_weights(embedding)
        assert head.weight is embedding.weight
        assert (head.first_id, head.num_owned) == (embedding.first_id, embedding.num_owned)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("bias", [False, True])
def test_column_parallel_outputs_concatenate(size: int, bias: bool) -> None:
    tensors = {"p.weight": rand(24, 16), "p.bias": rand(24, seed=1)}
    x = rand(5, 16, seed=2)
    outputs = []
    for groups in hand_merged(size):
        layer = ColumnParallelLinear(16, 24, bias=bias, groups=groups, options=OPTIONS)
        specs = list(layer.shards(["p"]))
        assert [spec.name for spec in specs] == ["p.weight", "p.bias"][: 1 + bias]
        fill(specs, tensors)
        outputs.append(layer(x))
        assert outputs[-1].shape == (5, 24 // size)
    expected = F.linear(x, tensors["p.weight"], tensors["p.bias"] if bias else None)
    torch.testing.assert_close(torch.cat(outputs, dim=1), expected)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("bias", [False, True])
def test_merged_column_parallel_gives_each_matrix_s_part_in_turn(size: int, bias: bool) -> None:
    sizes = {"gate": 24, "up": 8}
    tensors = {f"{n}.weight": rand(out, 16, seed=out) for n, out in sizes.items()}
    tensors |= {f"{n}.bias": rand(out, seed=out + 1) for n, out in sizes.items()}
    x = rand(5, 16, seed=2)
    parts: dict[str, list[torch.Tensor]] = {"gate": [], "up": []}
    for groups in hand_merged(size):
        layer = MergedColumnParallelLinear(16, [24, 8], bias=bias, groups=groups, options=OPTIONS)
        fill(layer.shards(["gate", "up"]), tensors)
        gate, up = layer(x).split([24 // size, 8 // size], dim=1)
        parts["gate"].append(gate)
        parts["up"].append(up)
    for name, pieces in parts.items():
        expected = F.linear(x, tensors[f"{name}.weight"], tensors[f"{name}.bias"] if bias else None)
        torch.testing.assert_close(torch.cat(pieces, dim=1), expected)


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 8), (8, 4), (8, 2), (8, 1), (16, 8)])
@pytest.mark.parametrize("bias", [False, True])
def test_qkv_is_split_by_head_and_each_rank_has_the_kv_heads_of_its_queries(
    size: int, heads: int, kv_heads: int, bias: bool
) -> None:
    dim, hidden = 6, 16
    counts = {"q": heads, "k": kv_heads, "v": kv_heads}
    tensors = {f"{n}.weight": rand(count * dim, hidden, seed=ord(n)) for n, count in counts.items()}
    tensors |= {f"{n}.bias": rand(count * dim, seed=ord(n) + 1) for n, count in counts.items()}
    x = rand(5, hidden, seed=9)
    whole = {
        n: F.linear(x, tensors[f"{n}.weight"], tensors[f"{n}.bias"] if bias else None).view(5, count, dim)
        for n, count in counts.items()
    }
    queries = []
    for groups in hand_merged(size):
        layer = QKVParallelLinear(hidden, dim, heads, kv_heads, bias=bias, groups=groups, options=OPTIONS)
        fill(layer.shards(["q", "k", "v"]), tensors)
        assert layer.num_heads == heads // size and layer.num_kv_heads == max(1, kv_heads // size)
        split = layer(x).view(5, -1, dim).split([layer.num_heads, layer.num_kv_heads, layer.num_kv_heads], dim=1)
        queries.append(split[0])
        first_head = groups.tp.rank * layer.num_heads
        for own in range(layer.num_heads):
            # Query head h of the whole model uses KV head h // (heads / kv_heads); locally the same rule holds.
            global_kv = (first_head + own) // (heads // kv_heads)
            local_kv = own // (layer.num_heads // layer.num_kv_heads)
            torch.testing.assert_close(split[1][:, local_kv], whole["k"][:, global_kv])
            torch.testing.assert_close(split[2][:, local_kv], whole["v"][:, global_kv])
    torch.testing.assert_close(torch.cat(queries, dim=1), whole["q"])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("bias", [False, True])
def test_row_parallel_partials_sum_with_the_bias_once(size: int, bias: bool) -> None:
    tensors = {"o.weight": rand(12, 24), "o.bias": 100 + rand(12, seed=1)}
    x = rand(5, 24, seed=2)
    total = torch.zeros(5, 12)
    for groups in hand_merged(size):
        layer = RowParallelLinear(24, 12, bias=bias, groups=groups, options=OPTIONS)
        for spec in layer.shards("o"):
            assert tuple(tensors[spec.name].shape) == spec.shape
            if spec.dest.numel():
                spec.dest.copy_(tensors[spec.name][spec.index])
        total += layer(x.chunk(size, dim=1)[groups.tp.rank])
    torch.testing.assert_close(total, F.linear(x, tensors["o.weight"], tensors["o.bias"] if bias else None))


@pytest.mark.parametrize("rank", [0, 1])
def test_numbers_of_qwen3_0_6b_at_two_ranks(rank: int) -> None:
    """The numbers of the issue. On the meta device: nothing is allocated."""
    config = ModelConfig.from_dict(
        {
            "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": False, "head_dim": 128,
            "hidden_act": "silu", "hidden_size": 1024, "intermediate_size": 3072, "max_position_embeddings": 40960,
            "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8, "rms_norm_eps": 1e-6,
            "rope_scaling": None, "rope_theta": 1000000, "tie_word_embeddings": True, "vocab_size": 151936,
        }
    )  # fmt: skip
    groups = ParallelGroups(tp=kit.HandMerged(rank, 2))
    options = {"dtype": torch.bfloat16, "device": "meta"}
    embedding = VocabParallelEmbedding(config.vocab_size, config.hidden_size, groups=groups, options=options)
    assert tuple(embedding.weight.shape) == (75968, 1024) and embedding.first_id == rank * 75968
    qkv = QKVParallelLinear(1024, 128, 16, 8, groups=groups, options=options)
    assert (qkv.num_heads, qkv.num_kv_heads) == (8, 4) and tuple(qkv.weight.shape) == (2048, 1024)
    assert tuple(RowParallelLinear(2048, 1024, groups=groups, options=options).weight.shape) == (1024, 1024)
    mlp = MergedColumnParallelLinear(1024, [3072, 3072], groups=groups, options=options)
    assert tuple(mlp.weight.shape) == (3072, 1024)
    backend = CPUAttention(qkv.num_heads, qkv.num_kv_heads, 128)
    cache = backend.allocate(28, 5, 32, torch.bfloat16, "meta")
    assert sorted(cache.data.shape) == sorted((2, 28, 5, 32, 4, 128))
    assert cache.data.numel() * 2 == 5 * backend.bytes_per_block(28, 32, torch.bfloat16)
    keys, values = cache.layer(3)
    assert keys.numel() == values.numel() == 5 * 32 * 4 * 128


@pytest.mark.parametrize(("size", "heads", "kv_heads", "inner"), [(3, 8, 4, 24), (4, 12, 6, 24), (2, 8, 2, 25)])
def test_sizes_that_do_not_divide_are_refused_with_the_numbers(
    size: int, heads: int, kv_heads: int, inner: int
) -> None:
    groups = ParallelGroups(tp=kit.HandMerged(0, size))
    with pytest.raises(ValueError, match=str(size)):
        QKVParallelLinear(16, 8, heads, kv_heads, groups=groups, options=OPTIONS)
        RowParallelLinear(inner, 16, groups=groups, options=OPTIONS)


def test_the_group_of_one_is_the_identity_and_larger_ones_need_processes() -> None:
    group, x = TensorParallelGroup.single(), rand(2, 3)
    assert (group.rank, group.size) == (0, 1)
    assert torch.equal(group.all_reduce(x), x) and torch.equal(group.all_gather(x), x)
    with pytest.raises(NotImplementedError):
        TensorParallelGroup(0, 2).all_reduce(x)
    with pytest.raises(ValueError, match="rank is 2"):
        TensorParallelGroup(2, 2)


# --- The whole model, several ranks in lockstep ------------------------------------------------------------------


def mixed_batch(rng: np.random.Generator, block_size: int, vocab_size: int) -> ForwardBatch:
    """Three sequences: a whole prompt, one that continues after 0 stored tokens is not special, all fresh."""
    lens = [7, 1, 12]
    tables = torch.arange(9, dtype=torch.int32).view(3, 3)
    positions = torch.cat([torch.arange(n) for n in lens])
    owner = torch.repeat_interleave(torch.arange(3), torch.tensor(lens))
    slots = tables[owner, positions // block_size].long() * block_size + positions % block_size
    return ForwardBatch(
        input_ids=torch.from_numpy(rng.integers(0, vocab_size, sum(lens))),
        positions=positions,
        query_start_loc=torch.tensor([0, 7, 8, 20], dtype=torch.int32),
        seq_lens=torch.tensor(lens, dtype=torch.int32),
        block_tables=tables,
        slot_mapping=slots,
        logits_indices=torch.tensor([0, 6, 7, 19]),
        max_query_len=12,
        max_seq_len=12,
    )


@pytest.mark.parametrize("variant", tiny.VARIANTS)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_model_over_n_ranks_gives_transformers_logits(variant: str, size: int) -> None:
    model = checkpoint(variant)
    config = ModelConfig.from_directory(model.directory)
    stored = open_checkpoint(model.directory)
    ranks = kit.Ranks(size)

    @torch.inference_mode()
    def forward(rank: int) -> torch.Tensor:
        groups = ranks.groups[rank]
        heads, kv_heads = config.num_attention_heads // size, max(1, config.num_key_value_heads // size)
        backend = CPUAttention(heads, kv_heads, config.head_dim)
        part = Qwen3ForCausalLM(config, backend, groups, torch.float32, "cpu")
        load_weights(part, stored)
        part.pack()
        cache = backend.allocate(config.num_hidden_layers, 9, 4, torch.float32, "cpu")
        cache.data.fill_(float("nan"))
        batch = mixed_batch(np.random.default_rng(0), 4, config.vocab_size)
        batch.plan = backend.plan(batch, 4)
        hidden = part(batch, cache)
        logits = part.compute_logits(hidden, batch.logits_indices)
        return groups.tp.all_gather(logits)[:, : config.vocab_size]

    results = ranks.run(forward)
    ids = mixed_batch(np.random.default_rng(0), 4, config.vocab_size).input_ids
    expected = torch.cat([model.reference.logits(tuple(part.tolist())) for part in ids.split([7, 1, 12])])
    for logits in results:
        torch.testing.assert_close(logits, expected[[0, 6, 7, 19]], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("variant", "size"),
    [*((variant, 2) for variant in tiny.VARIANTS), ("tied", 4), ("odd_vocab", 4), ("one_kv_head", 4)],
)
def test_an_engine_over_n_ranks_equals_transformers(variant: str, size: int) -> None:
    """With preemption, prefix hits and chunks; and all ranks end each step with the same tokens."""
    model = checkpoint(variant)
    rng = np.random.default_rng(size)
    stem = random_prompt(rng, 16, model.vocab_size)
    prompts = [stem[: int(n)] + random_prompt(rng, int(n), model.vocab_size) for n in rng.integers(1, 17, 6)]
    llm = kit.lockstep_llm(model.directory, size, num_kvcache_blocks=11, max_num_batched_tokens=20, shuffle=1)
    params = [greedy(20, logprobs=3)] * 3 + [
        kit.SamplingParams(
            temperature=0.9, top_k=30, top_p=0.95, min_p=0.01, seed=i, max_tokens=20, ignore_eos=True, logprobs=2,
            repetition_penalty=1.2, frequency_penalty=0.3,
        )
        for i in range(3)
    ]  # fmt: skip
    with kit.checked_steps(llm.engine):
        outputs = llm.generate(prompts, params)
    for prompt, output, one in zip(prompts, outputs, params, strict=True):
        if one.is_greedy:
            model.reference.assert_greedy(prompt, output.token_ids, output.outputs[0].logprobs)
        else:
            model.assert_sampled(prompt, output.token_ids, one, kit.torch_uniforms(one.seed, 20))
    assert llm.engine.scheduler.num_preemptions > 0
    assert_idle(llm.engine)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_dummy_weights_are_the_same_for_every_number_of_ranks(size: int) -> None:
    """The parts of n ranks, put where they belong, are the tensors of one rank."""
    config = ModelConfig.from_directory(checkpoint("odd_vocab").directory)

    def build(groups: ParallelGroups, seed: int = 5) -> list[ShardSpec]:
        backend = CPUAttention(4 // groups.tp.size, max(1, 2 // groups.tp.size), 32)
        model = Qwen3ForCausalLM(config, backend, groups, torch.float32, "cpu")
        with torch.no_grad():
            load_dummy_weights(model, seed)
        return list(model.shards())

    whole = {spec.name: spec.dest for spec in build(ParallelGroups.single())}
    for groups in hand_merged(size):
        for spec in build(groups):
            assert torch.equal(spec.dest, whole[spec.name][spec.index]), spec.name
    other = {spec.name: spec.dest for spec in build(ParallelGroups.single(), seed=6)}
    name = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(other[name], whole[name])
    assert all(0.015 < tensor.std() < 0.025 for key, tensor in whole.items() if "norm" not in key)


# --- Small modules against transformers --------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_is_transformers_and_fusing_the_residual_changes_nothing(dtype: torch.dtype) -> None:
    tolerance = 1e-6 if dtype == torch.float32 else 2**-7
    theirs = modeling_qwen3.Qwen3RMSNorm(48, eps=1e-6).to(dtype)
    theirs.weight.data = rand(48).to(dtype)
    ours = RMSNorm(48, 1e-6, {"dtype": dtype, "device": "cpu"})
    fill(ours.shards("norm"), {"norm.weight": theirs.weight.data})
    for x in (rand(7, 48, seed=1), rand(7, 3, 48, seed=2) * 1e3, torch.zeros(2, 48), rand(2, 48) * 1e-4):
        x = x.to(dtype)
        # The twin equals transformers to the bit; a compiled kernel sums in another order, so one rounding may differ.
        assert torch.equal(reference.rms_norm(x, theirs.weight, 1e-6), theirs(x))
        torch.testing.assert_close(ours(x), theirs(x), rtol=tolerance, atol=tolerance * 1e-2)
        residual = rand(*x.shape, seed=3).to(dtype)
        normed, total = ours.add(x.clone(), residual.clone())
        assert torch.equal(total, x + residual)
        torch.testing.assert_close(normed, theirs(x + residual), rtol=tolerance, atol=tolerance * 1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_silu_and_mul_is_transformers(dtype: torch.dtype) -> None:
    x = (3 * rand(7, 64)).to(dtype)
    gate, up = x[:, :32], x[:, 32:]
    assert torch.equal(silu_and_mul(x), modeling_qwen3.ACT2FN["silu"](gate) * up)


@pytest.mark.parametrize("variant", ["tied", "yarn"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotary_is_transformers(variant: str, dtype: torch.dtype) -> None:
    model = checkpoint(variant)
    config = ModelConfig.from_directory(model.directory)
    positions = torch.tensor([0, 1, 2, 63, 64, 65, 200, 255, 17])
    q, k = rand(9, 4, 32).to(dtype), rand(9, 2, 32, seed=1).to(dtype)
    cos, sin = modeling_qwen3.Qwen3RotaryEmbedding(model.model.config)(q, positions.unsqueeze(0))
    expected = modeling_qwen3.apply_rotary_pos_emb(q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos, sin)
    rotation = RotaryEmbedding(config, {"dtype": dtype, "device": "cpu"})(positions)
    for ours, theirs in zip((apply_rotary(q, *rotation), apply_rotary(k, *rotation)), expected, strict=True):
        torch.testing.assert_close(
            ours, theirs[0].transpose(0, 1), rtol=1e-5, atol=1e-5 if dtype.itemsize > 2 else 2e-2
        )


# --- Attention ---------------------------------------------------------------------------------------------------


@st.composite
def mixtures(draw: st.DrawFn) -> dict[str, Any]:
    """Lengths with any cached part, heads in any grouping, block ids shuffled."""
    num_seqs = draw(st.integers(1, 9))
    seqs = []
    for _ in range(num_seqs):
        seq_len = draw(st.integers(1, 70))
        query_len = draw(st.one_of(st.just(1), st.just(seq_len), st.integers(1, seq_len)))
        seqs.append((seq_len, query_len))
    return {
        "seqs": seqs,
        "block_size": draw(st.sampled_from([1, 3, 4, 16, 32])),
        "num_kv_heads": draw(st.integers(1, 3)),
        "group": draw(st.integers(1, 4)),
        "head_dim": draw(st.sampled_from([8, 10, 32])),
        "seed": draw(st.integers(0, 2**31)),
    }


def run_attention(mixture: dict[str, Any], dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """(what the backend gives, what the oracle gives). Every slot that was not written is NaN."""
    rng = np.random.default_rng(mixture["seed"])
    block_size, kv_heads, dim = mixture["block_size"], mixture["num_kv_heads"], mixture["head_dim"]
    heads = kv_heads * mixture["group"]
    seq_lens = [seq_len for seq_len, _ in mixture["seqs"]]
    query_lens = [query_len for _, query_len in mixture["seqs"]]
    columns = -(-max(seq_lens) // block_size)
    num_blocks = sum(-(-n // block_size) for n in seq_lens) + 3
    free = list(rng.permutation(num_blocks))
    # Columns beyond a sequence's blocks are meaningless: any number may stand there.
    tables = rng.integers(0, num_blocks, (len(seq_lens), columns))
    for i, n in enumerate(seq_lens):
        used = -(-n // block_size)
        tables[i, :used] = [free.pop() for _ in range(used)]
    generator = torch.Generator().manual_seed(mixture["seed"])
    backend = CPUAttention(heads, kv_heads, dim)
    cache = backend.allocate(2, num_blocks, block_size, dtype, "cpu")
    cache.data.fill_(float("nan"))
    slots, positions, stored = [], [], []
    for i, (n, q) in enumerate(mixture["seqs"]):
        where = [int(tables[i, p // block_size]) * block_size + p % block_size for p in range(n)]
        slots += where[n - q :]
        stored += where[: n - q]
        positions += range(n - q, n)
    # The oracle's keys and values lie in the plain order, the tiled kernels' in their own.
    plain = torch.full((2, num_blocks, kv_heads, block_size, dim), float("nan"), dtype=dtype)
    orders = (reference.tile_keys, reference.tile_values)

    def ordered() -> torch.Tensor:
        return torch.stack([order(x) for order, x in zip(orders, plain, strict=True)]) if backend.can_replay else plain

    def at(slots: list[int]) -> tuple[torch.Tensor, slice, torch.Tensor]:
        return torch.tensor(slots) // block_size, slice(None), torch.tensor(slots) % block_size

    for part in plain:
        if stored:
            part[at(stored)] = torch.randn((len(stored), kv_heads, dim), generator=generator).to(dtype)
    cache.data[:, 1] = ordered()
    total = sum(query_lens)
    q = torch.randn((total, heads, dim), generator=generator).to(dtype)
    k = torch.randn((total, kv_heads, dim), generator=generator).to(dtype)
    v = torch.randn((total, kv_heads, dim), generator=generator).to(dtype)
    batch = ForwardBatch(
        input_ids=torch.zeros(total, dtype=torch.int64),
        positions=torch.tensor(positions),
        query_start_loc=torch.tensor(np.concatenate(([0], np.cumsum(query_lens))), dtype=torch.int32),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        block_tables=torch.from_numpy(tables.astype(np.int32)),
        slot_mapping=torch.tensor(slots),
        logits_indices=torch.tensor([0]),
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
    )
    batch.plan = backend.plan(batch, block_size)
    backend.store(k, v, cache.layer(1), batch)
    # store: exactly the given slots of exactly this layer.
    plain[0][at(slots)], plain[1][at(slots)] = k, v
    assert torch.equal(cache.data[:, 1].nan_to_num(123.0), ordered().nan_to_num(123.0))
    assert cache.data[:, 0].isnan().all()
    out = backend.attend(q, cache.layer(1), batch)
    expected = reference.paged_attention(
        q, *plain, batch.block_tables, batch.query_start_loc, batch.seq_lens, dim**-0.5
    )
    return out, expected


@settings(max_examples=150, deadline=None)
@given(mixtures())
def test_cpu_attention_equals_the_oracle_on_random_mixtures(mixture: dict[str, Any]) -> None:
    out, expected = run_attention(mixture)
    assert not out.isnan().any(), "an unwritten slot was read"
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


@settings(max_examples=25, deadline=None)
@given(mixtures())
def test_cpu_attention_in_bfloat16_is_within_a_percent_of_the_oracle(mixture: dict[str, Any]) -> None:
    out, expected = run_attention(mixture, torch.bfloat16)
    assert not out.isnan().any()
    assert (out - expected).float().norm() <= 1e-2 * expected.float().norm()


def test_decodes_of_very_different_lengths_and_more_tokens_than_one_gather_takes() -> None:
    """Beyond the bounds of one gather of decodes: lengths from 1 to 5000 in one batch."""
    lengths = [1, 5000, 4999, 3, 2500, 2400, 2300, 17, 16, 4000, 1, 640]
    mixture = {
        "seqs": [(n, 1) for n in lengths], "block_size": 16, "num_kv_heads": 2, "group": 2, "head_dim": 8, "seed": 0,
    }  # fmt: skip
    out, expected = run_attention(mixture)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


def test_the_oracle_is_plain_causal_attention() -> None:
    """The oracle itself, against torch: one whole sequence, and its last rows alone."""
    q, k, v = (rand(9, 4, 8, seed=s) for s in range(3))
    k, v = k[:, :2], v[:, :2]
    cache_k, cache_v = (torch.cat((x, torch.zeros(3, 2, 8))).view(3, 4, 2, 8).transpose(1, 2) for x in (k, v))
    expected = F.scaled_dot_product_attention(
        *(x.transpose(0, 1) for x in (q, k.repeat_interleave(2, dim=1), v.repeat_interleave(2, dim=1))), is_causal=True
    ).transpose(0, 1)
    table = torch.tensor([[0, 1, 2]])
    for num_queries in (9, 4, 1):
        out = reference.paged_attention(
            q[9 - num_queries :], cache_k, cache_v, table, torch.tensor([0, num_queries]), torch.tensor([9]), 8**-0.5
        )
        torch.testing.assert_close(out, expected[9 - num_queries :], rtol=1e-5, atol=1e-5)


def test_selection_names_every_rejection() -> None:
    config = ModelConfig.from_directory(checkpoint("tied").directory)
    assert select_backend(config, "cpu") is CPUAttention
    with pytest.raises(ValueError, match=r"'tpu'.*cpu: "):
        select_backend(config, "tpu")
