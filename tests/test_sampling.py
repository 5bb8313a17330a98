"""From logits to a token: the draw is an inverse CDF of the distribution that the parameters mean, a seeded request is
alone with its seed, log-probabilities are those of the raw distribution, and bad values are refused.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import kit
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kit import checkpoint, make_llm, random_prompt, sampling_weights
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from nanoinfer import LLM, SamplingParams
from nanoinfer.layers.sampler import Penalty, SamplingBatch, TokenCounts, VocabShard, row_logprobs, sample, uniforms

V = 320


def make_batch(
    params: list[SamplingParams],
    numbers: list[float],
    prompts: list[list[int]] | None = None,
    outputs: list[list[int]] | None = None,
    vocab_size: int = V,
) -> SamplingBatch:
    """What the worker would build for these rows."""
    batch = SamplingBatch(
        temperature=np.array([0.0 if p.is_greedy else p.temperature for p in params]),
        top_k=np.array([max(p.top_k, 0) for p in params]),
        top_p=np.array([p.top_p for p in params]),
        min_p=np.array([p.min_p for p in params]),
        uniforms=np.array(numbers),
    )
    for i, p in enumerate(params):
        if p.has_penalties:
            prompt = np.array(prompts[i] if prompts else [], np.int64)
            output = np.array(outputs[i] if outputs else [], np.int64)
            counts = TokenCounts.of(vocab_size, prompt, output)
            batch.penalties[i] = Penalty(counts, p.repetition_penalty, p.presence_penalty, p.frequency_penalty)
        if p.logprobs is not None:
            batch.logprobs[i] = p.logprobs
    return batch


def assert_is_the_draw(token_id: int, weights: np.ndarray, number: float, context: object = "") -> None:
    """`token_id` is where the CDF in vocabulary order passes `number`, but for rounding at the very edge."""
    probs = weights / weights.sum()
    assert 0 <= token_id < len(probs), context
    assert probs[token_id] > 0, f"token {token_id} is filtered out; {context}"
    end = probs[: token_id + 1].sum()
    assert end - probs[token_id] - 1e-6 <= number <= end + 1e-6, context


@st.composite
def rows(draw: st.DrawFn) -> tuple[SamplingParams, float, list[int], list[int]]:
    def maybe(strategy: st.SearchStrategy[Any], default: Any) -> Any:
        return draw(st.one_of(st.just(default), strategy))

    params = SamplingParams(
        temperature=draw(st.one_of(st.just(0.0), st.floats(0.05, 5.0))),
        top_k=maybe(st.integers(-1, V + 50), 0),
        top_p=maybe(st.floats(0.01, 1.0), 1.0),
        min_p=maybe(st.floats(0.0, 1.0), 0.0),
        repetition_penalty=maybe(st.floats(0.3, 3.0), 1.0),
        presence_penalty=maybe(st.floats(-2.0, 2.0), 0.0),
        frequency_penalty=maybe(st.floats(-2.0, 2.0), 0.0),
    )
    ids = st.lists(st.integers(0, V - 1), max_size=12)
    return params, draw(st.floats(0.0, 1.0, exclude_max=True)), draw(ids), draw(ids)


def is_edgy(logits: np.ndarray, params: SamplingParams, prompt: list[int], output: list[int]) -> bool:
    """Whether a filter's threshold is so close to a token that float32 may see it on the other side."""
    exact = sampling_weights(logits, params, prompt, output) > 0
    for nudge in (1e-6, -1e-6):
        near = dataclasses.replace(
            params,
            top_p=min(1.0, max(1e-3, params.top_p + nudge)) if params.top_p < 1 else 1.0,
            min_p=min(1.0, max(0.0, params.min_p * (1 + nudge))),
        )
        if ((sampling_weights(logits, near, prompt, output) > 0) != exact).any():
            return True
    x = np.sort(logits)
    return bool((np.diff(x) < 1e-6).any())


@settings(max_examples=400, deadline=None)
@given(st.lists(rows(), min_size=1, max_size=5), st.integers(0, 2**31), st.floats(0.5, 8.0))
def test_a_draw_is_the_inverse_cdf_of_what_the_parameters_mean(
    drawn: list[tuple[SamplingParams, float, list[int], list[int]]], seed: int, spread: float
) -> None:
    """Against an independent form: penalties, temperature, min_p, top_k, top_p, by sorting and loops in float64."""
    logits = np.random.default_rng(seed).normal(0, spread, (len(drawn), V)).astype(np.float32)
    params, numbers, prompts, outputs = (list(column) for column in zip(*drawn, strict=True))
    given_logits = torch.from_numpy(logits.copy())
    token_ids, _ = sample(given_logits, make_batch(params, numbers, prompts, outputs))
    assert torch.equal(given_logits, torch.from_numpy(logits)), "the logits were modified"
    for i, token_id in enumerate(token_ids):
        if is_edgy(logits[i], params[i], prompts[i], outputs[i]):
            continue
        weights = sampling_weights(logits[i], params[i], prompts[i], outputs[i])
        assert_is_the_draw(token_id, weights, numbers[i], (params[i], numbers[i]))


@pytest.mark.parametrize("vocab_size", [1, 2, 511, 512, 513, 1500, 151_936])
def test_every_number_gives_its_token_at_every_size_of_vocabulary(vocab_size: int) -> None:
    """Including 0, the largest number below 1, and weights that underflow to zero."""
    rng = np.random.default_rng(vocab_size)
    for scale in (0.01, 3.0, 60.0):
        logits = rng.normal(0, scale, (1, vocab_size)).astype(np.float32)
        weights = sampling_weights(logits[0], SamplingParams(), [], [])
        numbers = [0.0, 1 - 2.0**-32, 2.0**-32, *rng.random(20)]
        token_ids, _ = sample(
            torch.from_numpy(logits).repeat(len(numbers), 1), make_batch([SamplingParams()] * len(numbers), numbers)
        )
        for token_id, number in zip(token_ids, numbers, strict=True):
            assert_is_the_draw(token_id, weights, number, (scale, number))


@pytest.mark.parametrize("options", [{}, {"top_k": 7}, {"top_p": 0.7}, {"min_p": 0.1}, {"top_k": 9, "top_p": 0.8}])
def test_frequencies_are_the_probabilities(options: dict[str, Any]) -> None:
    """Chi-square over 40000 output indices of one seed, against exact probabilities."""
    params = SamplingParams(temperature=1.3, **options)
    logits = np.random.default_rng(3).normal(0, 1.5, 24).astype(np.float32)
    probs = sampling_weights(logits, params, [], [])
    probs /= probs.sum()
    n = 40_000
    counts = np.zeros(24)
    numbers = kit.torch_uniforms(1234, n)
    for start in range(0, n, 4000):
        chunk = numbers[start : start + 4000].tolist()
        token_ids, _ = sample(torch.from_numpy(logits).repeat(len(chunk), 1), make_batch([params] * len(chunk), chunk))
        counts += np.bincount(token_ids, minlength=24)
    assert not counts[probs == 0].any()
    kept = probs > 0
    chi2 = (((counts - n * probs) ** 2)[kept] / (n * probs)[kept]).sum()
    freedom = kept.sum() - 1
    assert chi2 < freedom + 5 * math.sqrt(2 * freedom), "the draws do not follow the distribution"


def test_uniform_numbers_are_uniform_and_independent_between_seeds_and_indices() -> None:
    by_index = kit.torch_uniforms(7, 50_000)
    by_seed = uniforms(np.arange(50_000, dtype=np.uint64), np.zeros(50_000, np.uint64))
    by_both = uniforms(np.arange(50_000, dtype=np.uint64), np.arange(50_000, dtype=np.uint64))
    for numbers in (by_index, by_seed, by_both):
        assert numbers.min() >= 0 and numbers.max() < 1
        counts, _ = np.histogram(numbers, bins=100, range=(0, 1))
        assert ((counts - 500) ** 2 / 500).sum() < 99 + 5 * math.sqrt(2 * 99)
        assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.02
    assert abs(np.corrcoef(by_index, by_seed)[0, 1]) < 0.02
    assert np.array_equal(kit.torch_uniforms(7, 10), by_index[:10])
    extremes = np.array([0, 2**64 - 1, 2**63], np.uint64)
    assert len(set(uniforms(extremes, np.zeros(3, np.uint64)).tolist())) == 3


# --- Single parameters against transformers ----------------------------------------------------------------------


@pytest.mark.parametrize("penalty", [0.5, 1.1, 1.7])
def test_repetition_penalty_is_transformers(penalty: float) -> None:
    rng = np.random.default_rng(1)
    logits = torch.from_numpy(rng.normal(0, 3, (40, V)).astype(np.float32))
    best = logits.topk(3, dim=1).indices.tolist()
    prompts = [random_prompt(rng, 30) + best[i][: i % 3] for i in range(40)]
    outputs = [random_prompt(rng, 20) + best[i][: i % 4] for i in range(40)]
    params = SamplingParams(temperature=0, repetition_penalty=penalty)
    token_ids, _ = sample(logits, make_batch([params] * 40, [0.0] * 40, prompts, outputs))
    theirs = RepetitionPenaltyLogitsProcessor(penalty)
    expected = [
        int(theirs(torch.tensor([p + o]), row[None].clone()).argmax())
        for p, o, row in zip(prompts, outputs, logits, strict=True)
    ]
    assert token_ids == expected
    assert token_ids != logits.argmax(dim=1).tolist(), "the penalty made no difference: a weak test"


@pytest.mark.parametrize(
    ("options", "warper"),
    [
        ({"top_k": 5}, TopKLogitsWarper(5)),
        ({"top_p": 0.6}, TopPLogitsWarper(0.6)),
        ({"min_p": 0.2}, MinPLogitsWarper(0.2)),
    ],
)
def test_what_a_filter_keeps_is_what_transformers_keeps(options: dict[str, Any], warper: Any) -> None:
    rng = np.random.default_rng(2)
    for _ in range(20):
        logits = torch.from_numpy(rng.normal(0, 1.5, 60).astype(np.float32))
        numbers = np.linspace(0, 1, 3000, endpoint=False).tolist()
        params = SamplingParams(temperature=1.0, **options)
        token_ids, _ = sample(logits.repeat(3000, 1), make_batch([params] * 3000, numbers, vocab_size=60))
        kept = warper(None, logits[None].clone())[0]
        probs = kept.softmax(dim=-1)
        for token_id in range(60):
            share = token_ids.count(token_id) / 3000
            assert abs(share - probs[token_id].item()) < 2e-3


def test_tied_tokens_are_kept_or_dropped_together() -> None:
    """top_k, top_p and min_p are thresholds: what ties with the last one kept is kept."""
    logits = torch.tensor([[3.0, 1.0, 1.0, 1.0, 0.0, -1.0]])
    numbers = np.linspace(0, 1, 500, endpoint=False).tolist()
    top = math.exp(3.0) / (math.exp(3.0) + 3 * math.exp(1.0) + 1 + math.exp(-1.0))
    for options in ({"top_k": 2}, {"top_k": 3}, {"top_p": top + 0.02}, {"min_p": math.exp(-2.0) * 0.999}):
        params = [SamplingParams(**options)] * 500
        token_ids, _ = sample(logits.repeat(500, 1), make_batch(params, numbers, vocab_size=6))
        assert set(token_ids) == {0, 1, 2, 3}, options


def test_frequency_counts_and_presence_does_not_and_neither_looks_at_the_prompt() -> None:
    logits = torch.zeros(1, V)
    logits[0, [10, 11, 12]] = torch.tensor([5.0, 4.0, 3.2])
    cases: list[tuple[dict[str, float], list[int], int]] = [
        ({"presence_penalty": 1.5}, [10], 11),
        ({"presence_penalty": 0.9}, [10, 10, 10], 10),
        ({"frequency_penalty": 0.9}, [10], 10),
        ({"frequency_penalty": 0.9}, [10, 10], 11),
        ({"frequency_penalty": 0.9}, [10, 10, 10, 11], 12),
        ({"presence_penalty": -1.5}, [11], 11),
    ]
    for options, output, expected in cases:
        params = SamplingParams(temperature=0, **options)
        assert sample(logits, make_batch([params], [0.0], [[10] * 9], [output]))[0] == [expected]
        assert sample(logits, make_batch([params], [0.0], [output], [[]]))[0] == [10]


# --- Rows are alone ----------------------------------------------------------------------------------------------


def test_a_row_is_unaffected_by_its_neighbours_and_its_place() -> None:
    """Greedy and random rows, filters, penalties and bans, in batches beyond any internal chunk."""
    rng = np.random.default_rng(5)
    n = 150
    logits = torch.from_numpy(rng.normal(0, 2, (n, V)).astype(np.float32))
    params, numbers = [], rng.random(n).tolist()
    for i in range(n):
        options: dict[str, Any] = {"temperature": [0.0, 0.7, 1.5][i % 3]}
        if i % 4 == 1:
            options |= {"top_k": int(rng.integers(1, 40)), "top_p": 0.9}
        if i % 5 == 2:
            options |= {"min_p": 0.05, "repetition_penalty": 1.5}
        if i % 7 == 3:
            options |= {"logprobs": int(rng.integers(0, 6))}
        params.append(SamplingParams(**options))
    prompts = [random_prompt(rng, 10) for _ in range(n)]
    batch = make_batch(params, numbers, prompts, prompts)
    for i in range(0, n, 11):
        batch.banned[i] = random_prompt(rng, 30)
    token_ids, logprobs = sample(logits, batch)
    for i in range(n):
        alone = make_batch([params[i]], [numbers[i]], [prompts[i]], [prompts[i]])
        if i in batch.banned:
            alone.banned[0] = batch.banned[i]
        one, one_logprobs = sample(logits[i : i + 1], alone)
        assert one == [token_ids[i]], i
        assert one_logprobs.get(0) == logprobs.get(i)
        assert token_ids[i] not in batch.banned.get(i, [])
        if params[i].is_greedy and not params[i].has_penalties and i not in batch.banned:
            assert token_ids[i] == int(logits[i].argmax())


@pytest.mark.parametrize("size", [2, 3, 4])
def test_ranks_with_slices_of_the_vocabulary_draw_what_one_rank_draws(size: int) -> None:
    rng = np.random.default_rng(size)
    vocab_size, n = 1501, 60
    columns = -(-vocab_size // size)
    logits = torch.from_numpy(rng.normal(0, 2, (n, vocab_size)).astype(np.float32))
    logits[0, [3, 1400]] = 50.0  # a tie between ranks goes to the lower id
    params = []
    for i in range(n):
        options: dict[str, Any] = {"temperature": [0.0, 0.8, 2.0][i % 3], "logprobs": [None, 0, 5, 20][i % 4]}
        if i % 5 == 1:
            options |= {"top_k": 40, "top_p": 0.9, "min_p": 0.02}
        if i % 7 == 2:
            options |= {"repetition_penalty": 1.4, "frequency_penalty": 0.5, "presence_penalty": 0.2}
        params.append(SamplingParams(**options))
    numbers = rng.random(n).tolist()
    history = [random_prompt(rng, 200, vocab_size) for _ in range(n)]
    batch = make_batch(params, numbers, history, history, vocab_size)
    batch.banned = {i: random_prompt(rng, 300, vocab_size) for i in range(0, n, 6)}
    expected, expected_logprobs = sample(logits, batch)
    assert expected[0] == 3 or 3 in batch.banned[0]
    padded = torch.full((n, size * columns), -math.inf)
    padded[:, :vocab_size] = logits
    ranks = kit.Ranks(size)

    def one_rank(rank: int) -> Any:
        mine = padded[:, rank * columns : (rank + 1) * columns].contiguous()
        return sample(mine, batch, VocabShard(ranks.groups[rank].tp, rank * columns))

    for token_ids, logprobs in ranks.run(one_rank):
        assert token_ids == expected
        assert logprobs.keys() == expected_logprobs.keys()
        for row, entry in logprobs.items():
            assert entry.token_ids == expected_logprobs[row].token_ids and entry.ranks == expected_logprobs[row].ranks
            np.testing.assert_allclose(entry.logprobs, expected_logprobs[row].logprobs, atol=1e-5)


def test_logprobs_of_more_rows_than_are_worked_on_at_once() -> None:
    raw = torch.randn(70, 50, generator=torch.Generator().manual_seed(0)).bfloat16()
    chosen, rows = torch.arange(70) % 50, [3 * i for i in range(70)]
    found = row_logprobs(raw, chosen, rows, {row: row % 4 for row in rows}, VocabShard())
    exact = raw.double().log_softmax(dim=-1)
    assert list(found) == rows
    for i, row in enumerate(rows):
        assert found[row].token_ids[0] == int(chosen[i]) and len(found[row].token_ids) == 1 + row % 4
        np.testing.assert_allclose(found[row].logprobs, exact[i, found[row].token_ids].numpy(), atol=1e-5)


def test_logprobs_are_of_the_raw_distribution() -> None:
    """Before penalties, temperature and filters; the chosen one's first, then the best, best first; ranks from 1."""
    rng = np.random.default_rng(6)
    logits = torch.from_numpy(rng.normal(0, 2, (30, V)).astype(np.float32))
    params = SamplingParams(temperature=2.0, top_k=50, repetition_penalty=1.5, logprobs=4)
    prompts = [random_prompt(rng, 40) for _ in range(30)]
    numbers = rng.random(30).tolist()
    token_ids, logprobs = sample(logits, make_batch([params] * 30, numbers, prompts, prompts))
    exact = logits.double().log_softmax(dim=-1)
    assert set(logprobs) == set(range(30))
    for i, entry in logprobs.items():
        order = exact[i].argsort(descending=True)
        assert entry.token_ids == [token_ids[i], *order[:4].tolist()]
        assert entry.ranks == [int((exact[i] > exact[i, token_ids[i]]).sum()) + 1, 1, 2, 3, 4]
        np.testing.assert_allclose(entry.logprobs, exact[i, entry.token_ids].numpy(), atol=1e-5)
    assert any(entry.ranks[0] > 4 for entry in logprobs.values()), "all draws were among the best: a weak test"


def test_logprobs_zero_gives_the_chosen_token_s_alone() -> None:
    logits = torch.randn(1, V, generator=torch.Generator().manual_seed(0))
    (token_id,), logprobs = sample(logits, make_batch([SamplingParams(logprobs=0)], [0.3]))
    assert logprobs[0].token_ids == [token_id] and len(logprobs[0].logprobs) == len(logprobs[0].ranks) == 1
    assert sample(logits, make_batch([SamplingParams()], [0.3]))[1] == {}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_nan_logits_raise_wherever_they_are(temperature: float, dtype: torch.dtype) -> None:
    for column in (0, 5, V - 1):
        for row in (0, 40):
            logits = torch.zeros(41, V, dtype=dtype)
            logits[row, column] = float("nan")
            with pytest.raises(FloatingPointError, match="NaN"):
                sample(logits, make_batch([SamplingParams(temperature=temperature)] * 41, [0.5] * 41))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("options", [{}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.5}])
def test_an_infinite_logit_raises_or_wins_and_never_becomes_noise(temperature: float, options: dict[str, Any]) -> None:
    """float16 overflows to infinity before it becomes NaN."""
    logits = torch.zeros(1, V)
    logits[0, 100] = float("inf")
    try:
        token_ids, _ = sample(logits, make_batch([SamplingParams(temperature=temperature, **options)], [0.5]))
    except FloatingPointError:
        return
    assert token_ids == [100]


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_minus_infinity_is_never_drawn(temperature: float) -> None:
    logits = torch.full((50, V), -math.inf)
    logits[:, 7], logits[:, 300] = 1.0, 0.5
    numbers = np.linspace(0, 1, 50, endpoint=False).tolist()
    token_ids, _ = sample(logits, make_batch([SamplingParams(temperature=temperature)] * 50, numbers))
    assert set(token_ids) == ({7} if temperature == 0 else {7, 300})


@pytest.mark.parametrize("temperature", [1e-5, 2e-5, 1e-3, 50.0, 1e6, 1e30, 1e38, 1e300])
def test_extreme_temperatures_stay_in_the_vocabulary(temperature: float) -> None:
    """From all but greedy to all but uniform; also with banned tokens."""
    rng = np.random.default_rng(9)
    logits = torch.from_numpy(rng.normal(0, 5, (200, V)).astype(np.float32))
    batch = make_batch([SamplingParams(temperature=temperature)] * 200, rng.random(200).tolist())
    batch.banned = {i: [0, 1, 2, int(logits[i].argmax())] for i in range(0, 200, 2)}
    token_ids, _ = sample(logits, batch)
    assert all(0 <= token_id < V for token_id in token_ids)
    assert not any(token_ids[i] in banned for i, banned in batch.banned.items())
    if temperature <= 1e-3:
        for i in range(1, 200, 2):
            assert token_ids[i] == int(logits[i].argmax())
    if temperature >= 1e6:
        assert len(set(token_ids)) > 100


# --- Seeds, end to end -------------------------------------------------------------------------------------------

SEEDED = SamplingParams(temperature=1.5, top_p=0.95, seed=42, max_tokens=24, ignore_eos=True, presence_penalty=0.3)


@pytest.fixture(scope="module")
def alone() -> list[int]:
    """What the seeded request gives by itself, confirmed by transformers' probabilities."""
    model = checkpoint("tied")
    output = make_llm(model.directory).generate([5, 6, 7, 8], SEEDED)[0].token_ids
    model.assert_sampled([5, 6, 7, 8], output, SEEDED, kit.torch_uniforms(42, 24))
    return output


@pytest.mark.parametrize(
    "mates",
    [
        [SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)] * 3,
        [SamplingParams(temperature=1.0, max_tokens=30, ignore_eos=True)] * 3,
        [SamplingParams(temperature=2.0, seed=42, max_tokens=3, ignore_eos=True)] * 5,
        [SamplingParams(seed=s, top_k=5, max_tokens=9, ignore_eos=True) for s in range(40)],
    ],
)
def test_a_seeded_request_does_not_depend_on_batch_mates_or_its_position(
    alone: list[int], mates: list[SamplingParams]
) -> None:
    llm = make_llm(checkpoint("tied").directory, num_kvcache_blocks=300)
    for position in (0, 1, len(mates)):
        prompts = [[i, 9] for i in range(len(mates))]
        params = list(mates)
        prompts.insert(position, [5, 6, 7, 8])
        params.insert(position, SEEDED)
        assert llm.generate(prompts, params)[position].token_ids == alone


@pytest.mark.parametrize(
    "options",
    [{"max_num_batched_tokens": 1}, {"max_num_batched_tokens": 3}, {"kvcache_block_size": 4}, {"seed": 99},
     {"enable_prefix_caching": False}, {"max_num_seqs": 1}],
)  # fmt: skip
def test_a_seeded_request_does_not_depend_on_the_engine_s_options(alone: list[int], options: dict[str, Any]) -> None:
    llm = make_llm(checkpoint("tied").directory, **options)
    for _ in range(2):
        assert llm.generate([[5, 6, 7, 8], [1]], SEEDED)[0].token_ids == alone


def test_a_seeded_request_does_not_depend_on_preemption(alone: list[int]) -> None:
    llm = make_llm(checkpoint("tied").directory, max_num_batched_tokens=5)
    request = llm.engine.add_requests([[5, 6, 7, 8]], SEEDED)[0]
    step = 0
    while llm.engine.has_unfinished:
        llm.engine.step()
        step += 1
        if step % 4 == 0 and llm.engine.scheduler.running:
            llm.engine.scheduler.preempt(request.seq)
    assert request.seq.num_preemptions > 3
    assert request.output().token_ids == alone


def test_unseeded_requests_differ_and_repeat_with_the_engine_s_seed() -> None:
    params = SamplingParams(temperature=2.0, max_tokens=12, ignore_eos=True)

    def run(seed: int | None) -> list[list[int]]:
        llm = make_llm(checkpoint("tied").directory, seed=seed)
        first = llm.generate([[1, 2]] * 3, params)
        return [output.token_ids for output in first + llm.generate([[1, 2]], params)]

    first = run(7)
    assert len(set(map(tuple, first))) == 4, "equal prompts without a seed gave equal outputs"
    assert run(7) == first
    assert run(8) != first
    assert run(None) != run(None)


def test_seeds_of_any_kind_are_told_apart() -> None:
    llm = make_llm(checkpoint("tied").directory)
    seeds = [0, 1, -1, 2**63, -(2**63) + 1, 2**64 - 2, 12345678901234567890]
    params = [SamplingParams(temperature=2.0, seed=seed, max_tokens=12, ignore_eos=True) for seed in seeds]
    outputs = [tuple(output.token_ids) for output in llm.generate([[1, 2]] * len(seeds), params)]
    assert len(set(outputs)) == len(seeds)
    assert outputs == [tuple(output.token_ids) for output in llm.generate([[1, 2]] * len(seeds), params)]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return make_llm(checkpoint("odd_vocab").directory)


def test_logprobs_end_to_end_are_transformers(llm: LLM) -> None:
    model = checkpoint("odd_vocab")
    params = SamplingParams(temperature=1.7, top_k=60, seed=1, max_tokens=20, ignore_eos=True, logprobs=20)
    output = llm.generate([3, 4, 5], params)[0]
    expected = model.reference.logits((3, 4, 5, *output.token_ids))[2:-1].log_softmax(dim=-1)
    logprobs = output.outputs[0].logprobs
    assert logprobs is not None and len(logprobs) == 20
    for row, token_id, entry in zip(expected, output.token_ids, logprobs, strict=True):
        best = row.topk(20)
        assert next(iter(entry)) == token_id and set(entry) == {token_id, *best.indices.tolist()}
        for other, value in entry.items():
            assert abs(value.logprob - row[other].item()) < 1e-4
            assert value.rank == int((row > row[other]).sum()) + 1


def test_penalties_end_to_end_see_prompt_and_output(llm: LLM) -> None:
    """Also after preemption, when a rank learns prompt and output anew."""
    model = checkpoint("odd_vocab")
    params = [
        SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, **options)
        for options in (
            {"repetition_penalty": 1.8}, {"presence_penalty": 2.0}, {"frequency_penalty": 1.5},
            {"repetition_penalty": 0.7, "presence_penalty": -1.0, "frequency_penalty": -0.5},
        )
    ]  # fmt: skip
    prompt = [3, 4, 5, 3, 4, 5, 250]
    requests = llm.engine.add_requests([prompt] * 4, params)
    step = 0
    while llm.engine.has_unfinished:
        llm.engine.step()
        step += 1
        running = list(llm.engine.scheduler.running.values())
        if step % 5 == 0:
            for seq in reversed(running):
                llm.engine.scheduler.preempt(seq)
    for request, one in zip(requests, params, strict=True):
        assert request.seq.num_preemptions > 2
        ids = request.output().token_ids
        for i, token_id in enumerate(ids):
            logits = model.reference.logits(tuple(prompt + ids[:i]))[-1].numpy()
            shifted = dataclasses.replace(one, temperature=1.0)
            weights = sampling_weights(logits, shifted, prompt, ids[:i])
            assert weights[token_id] > weights.max() * (1 - 1e-3), f"output {i} under {one}"


def test_min_tokens_bans_every_stop_id_and_then_allows_it(llm: LLM) -> None:
    """With all ids but a few as stops, the first min_tokens outputs are among those few."""
    model = checkpoint("odd_vocab")
    allowed = [10, 20, 30, 40]
    stops = [i for i in range(323) if i not in allowed]
    params = SamplingParams(temperature=0, max_tokens=20, min_tokens=6, stop_token_ids=stops)
    ids = llm.generate([3, 4, 5], params)[0].token_ids
    assert len(ids) >= 7 and set(ids[:6]) <= set(allowed)
    for i, token_id in enumerate(ids[:6]):
        logits = model.reference.logits((3, 4, 5, *ids[:i]))[-1]
        assert token_id == allowed[int(logits[allowed].argmax())]
    if len(ids) < 20:
        assert ids[-1] in stops and not set(ids[:-1]) & set(stops)


def test_model_that_overflows_raises_instead_of_answering(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make_llm(checkpoint("tied").directory)
    with torch.inference_mode():
        llm.engine.executor.runner.model.model.norm.weight.fill_(float("nan"))
    with pytest.raises(FloatingPointError, match="NaN"):
        llm.generate([1, 2, 3], SamplingParams(max_tokens=3))
    kit.assert_idle(llm.engine)


# --- Values ------------------------------------------------------------------------------------------------------

GOOD: list[dict[str, Any]] = [
    {}, {"temperature": 0}, {"temperature": 0.0}, {"temperature": 1e-9}, {"temperature": 5}, {"top_k": -1},
    {"top_k": 0}, {"top_k": 10**9}, {"top_p": 1}, {"top_p": 1e-9}, {"min_p": 0}, {"min_p": 1},
    {"repetition_penalty": 0.01}, {"presence_penalty": -2}, {"frequency_penalty": 2}, {"seed": 0},
    {"seed": -5}, {"seed": None}, {"max_tokens": 1},
    {"min_tokens": 64}, {"stop": "x"}, {"stop": ["x", "yy"]}, {"stop": []}, {"stop": None}, {"stop_token_ids": []},
    {"stop_token_ids": None}, {"stop_token_ids": [0, 5]}, {"stop_token_ids": (np.int64(3),)}, {"logprobs": 0},
    {"logprobs": 20}, {"logprobs": None}, {"ignore_eos": True}, {"detokenize": False}, {"skip_special_tokens": False},
]  # fmt: skip
BAD: list[dict[str, Any]] = [
    {"temperature": -0.1}, {"temperature": math.nan}, {"temperature": math.inf}, {"temperature": "1"},
    {"temperature": None}, {"temperature": True}, {"top_k": -2}, {"top_k": 1.5}, {"top_k": True}, {"top_p": 0},
    {"top_p": 1.01}, {"top_p": -0.5}, {"top_p": math.nan}, {"min_p": -0.1}, {"min_p": 1.1}, {"min_p": math.nan},
    {"repetition_penalty": 0}, {"repetition_penalty": -1}, {"repetition_penalty": math.inf},
    {"repetition_penalty": math.nan}, {"presence_penalty": 2.1}, {"presence_penalty": -2.1},
    {"presence_penalty": math.nan}, {"frequency_penalty": 2.1}, {"frequency_penalty": math.inf}, {"seed": 1.0},
    {"seed": "a"}, {"seed": True}, {"seed": 2**65}, {"max_tokens": 0}, {"max_tokens": -1}, {"max_tokens": None},
    {"max_tokens": 1.5}, {"max_tokens": True}, {"min_tokens": -1}, {"min_tokens": 65}, {"min_tokens": 1.0},
    {"stop": ""}, {"stop": ["a", ""]}, {"stop": [3]}, {"stop_token_ids": [-1]}, {"stop_token_ids": [1.5]},
    {"stop_token_ids": ["1"]}, {"stop_token_ids": [True]}, {"logprobs": -1}, {"logprobs": 21}, {"logprobs": True},
    {"logprobs": 1.0}, {"ignore_eos": 1}, {"ignore_eos": None}, {"detokenize": "no"}, {"skip_special_tokens": 0},
    {"include_stop_str_in_output": "yes"}, {"stop": "x", "detokenize": False},
]  # fmt: skip


@pytest.mark.parametrize("options", GOOD, ids=str)
def test_values_in_range_are_taken_as_they_are(options: dict[str, Any]) -> None:
    params = SamplingParams(**options)
    for name, value in options.items():
        if name not in ("stop", "stop_token_ids"):
            assert getattr(params, name) == value
    assert hash(params) == hash(SamplingParams(**options))


@pytest.mark.parametrize("options", BAD, ids=str)
def test_values_out_of_range_are_refused_at_construction_by_name_and_value(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError) as caught:
        SamplingParams(**options)
    name = next(iter(options))
    assert name in str(caught.value)
    value = options[name]
    shown = value[-1] if isinstance(value, list) else value
    assert repr(shown) in str(caught.value) or options.get("detokenize") is False


def test_defaults_are_the_issue_s_and_fields_cannot_be_changed() -> None:
    params = SamplingParams()
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (1.0, 0, 1.0, 0.0)
    assert (params.max_tokens, params.min_tokens, params.seed, params.logprobs) == (64, 0, None, None)
    assert (params.stop, params.stop_token_ids, params.ignore_eos) == ((), (), False)
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.temperature = 0.5  # type: ignore[misc]
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=0.5)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ({}, {}),
        ({"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": [1, 2]},
         {"temperature": 0.6, "top_k": 20, "top_p": 0.95}),
        ({"do_sample": True}, {}),
        ({"do_sample": False, "temperature": 0.6}, {"temperature": 0.0}),
        ({"eos_token_id": 3}, {"temperature": 0.0}),
        ({"do_sample": True, "temperature": None, "min_p": 0.1, "repetition_penalty": 1.05, "max_new_tokens": 9},
         {"min_p": 0.1, "repetition_penalty": 1.05, "max_tokens": 9}),
    ],
)  # fmt: skip
def test_a_checkpoint_s_generation_config_gives_the_default_params(
    raw: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert SamplingParams.from_generation_config(raw) == SamplingParams(**expected)


def test_generate_without_params_samples_as_the_checkpoint_says(tmp_path_factory: pytest.TempPathFactory) -> None:
    import json
    import shutil

    directory = tmp_path_factory.mktemp("sampling") / "model"
    shutil.copytree(checkpoint("tied").directory, directory)
    raw = {"do_sample": True, "temperature": 0.8, "top_k": 3, "max_new_tokens": 15, "eos_token_id": [2, 5]}
    (directory / "generation_config.json").write_text(json.dumps(raw))
    llm = make_llm(directory)
    ids = llm.generate([3, 4])[0].token_ids
    assert len(ids) <= 15
    for i, token_id in enumerate(ids):
        logits = checkpoint("tied").reference.logits((3, 4, *ids[:i]))[-1]
        assert token_id in logits.topk(3).indices
    assert llm.engine.input_processor.eos_token_ids == {2, 5}
