"""What limits the choice of a token: logit_bias, allowed_token_ids, bad_words and grammars. Against transformers'
processors where it has them, and against the arithmetic of the distribution.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import kit
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kit import assert_idle, checkpoint, greedy, lockstep_llm, make_llm, random_prompt, sampling_weights
from test_sampling import assert_is_the_draw, make_batch
from transformers import NoBadWordsLogitsProcessor, SequenceBiasLogitsProcessor

from nanoinfer import LLM, SamplingParams
from nanoinfer.layers.sampler import Bias, VocabShard, sample
from nanoinfer.step import token_bitmask

B = 8
RANKS = {size: kit.Ranks(size) for size in (2, 3)}


# --- The sampler -------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), size=st.sampled_from([1, 2, 3]), vocab_size=st.sampled_from([31, 64, 323, 1500]))
def test_a_draw_is_the_inverse_cdf_of_what_is_left(seed: int, size: int, vocab_size: int) -> None:
    rng = np.random.default_rng(seed)
    n = 40
    logits = rng.normal(0, 2, (n, vocab_size)).astype(np.float32)
    params = [
        SamplingParams(
            temperature=[0.0, 0.7, 1.5][i % 3],
            repetition_penalty=[1.0, 1.4][i % 2],
            frequency_penalty=[0.0, 0.0, 0.5][i % 3],
        )
        for i in range(n)
    ]
    numbers = rng.random(n).tolist()
    history = [random_prompt(rng, 20, vocab_size) for _ in range(n)]
    batch = make_batch(params, numbers, history, history, vocab_size)
    left = logits.copy()
    for i in range(n):
        if rng.random() < 0.4:
            allowed = rng.choice(vocab_size, int(rng.integers(1, vocab_size)), replace=False)
            batch.masks[i] = token_bitmask(allowed.tolist(), vocab_size)
            left[i, np.setdiff1d(np.arange(vocab_size), allowed)] = -math.inf
        if rng.random() < 0.4:
            banned = rng.choice(vocab_size, int(rng.integers(1, 10)), replace=False)
            if np.isfinite(np.delete(left[i], banned)).any():
                batch.banned[i] = banned.tolist()
                left[i, banned] = -math.inf
        if rng.random() < 0.4:
            biased = rng.choice(vocab_size, int(rng.integers(1, 12)), replace=False)
            biases = rng.uniform(-5, 5, len(biased)).astype(np.float32)
            batch.biases[i] = Bias.of(dict(zip(biased.tolist(), biases.tolist(), strict=True)))
            left[i, biased] += biases
    columns = -(-vocab_size // size)
    padded = np.full((n, size * columns), -math.inf, np.float32)
    padded[:, :vocab_size] = logits

    def one_rank(rank: int) -> list[int]:
        mine = torch.from_numpy(padded[:, rank * columns : (rank + 1) * columns].copy())
        shard = VocabShard(RANKS[size].groups[rank].tp, rank * columns) if size > 1 else VocabShard()
        return sample(mine, batch, shard)[0]

    for token_ids in RANKS[size].run(one_rank) if size > 1 else [one_rank(0)]:
        for i, token_id in enumerate(token_ids):
            weights = sampling_weights(left[i], params[i], history[i], history[i])
            if params[i].is_greedy:
                best = sampling_weights(
                    left[i], dataclasses.replace(params[i], temperature=1.0), history[i], history[i]
                )
                assert best[token_id] >= best.max() * (1 - 1e-4)
            else:
                assert_is_the_draw(token_id, weights, numbers[i], (seed, i))


# --- Parameters, in an engine ------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=[1, 2], ids=lambda size: f"{size} rank(s)")
def llm(request: pytest.FixtureRequest) -> LLM:
    directory = checkpoint("odd_vocab", tokenizer=True).directory
    options: dict[str, Any] = {"max_num_batched_tokens": 20}
    return make_llm(directory, **options) if request.param == 1 else lockstep_llm(directory, request.param, **options)


def run_with_preemptions(llm: LLM, prompts: list[Any], params: Any) -> list[Any]:
    """Everything that runs is preempted every few steps: what a rank keeps of a row has to be made anew."""
    requests = llm.engine.add_requests(prompts, params)
    num_steps = 0
    while llm.engine.has_unfinished:
        llm.engine.step()
        num_steps += 1
        if num_steps % 5 == 0:
            for seq in reversed(list(llm.engine.scheduler.running.values())):
                llm.engine.scheduler.preempt(seq)
    assert_idle(llm.engine)
    return [request.output() for request in requests]


def assert_best_after(processor: Any, prompt: list[int], output: list[int], allowed: list[int] | None = None) -> None:
    """Each token is the best of transformers' logits after its processor, which looks at the output alone."""
    model = checkpoint("odd_vocab", tokenizer=True)
    logits = model.reference.logits(tuple(prompt + output))[len(prompt) - 1 : -1]
    for i, token_id in enumerate(output):
        # transformers ignores words that are longer than the text so far; a text of other tokens stands before.
        ids = torch.tensor([[-1] * 8 + output[:i]])
        row = processor(ids, logits[i : i + 1].clone())[0]
        if allowed is not None:
            row = torch.full_like(row, -math.inf).index_copy(0, torch.tensor(allowed), row[allowed])
        assert row.max() - row[token_id] < 1e-4 and row[token_id] > -math.inf, f"output {i}"


def test_logit_bias_is_transformers(llm: LLM) -> None:
    prompt = [5, 6, 7]
    free = llm.generate(prompt, greedy(12))[0].token_ids
    biases = {free[0]: -100.0, free[1]: -3.5, 300: 2.0, 322: 1.5, 0: 3, 17: 0.25}
    (output,) = run_with_preemptions(llm, [prompt], greedy(24, logit_bias=biases))
    processor = SequenceBiasLogitsProcessor([[[token_id], float(bias)] for token_id, bias in biases.items()])
    assert output.token_ids[:12] != free
    assert_best_after(processor, prompt, output.token_ids)


def test_bad_words_of_several_tokens_are_transformers(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    assert tokenizer is not None
    # Few tokens, so that the words would come up: letters, a space, and merged ones.
    allowed = sorted(
        {i for text in ("a", "b", " ", "t", "h", "e", "th", "the", "ab") for i in tokenizer(text)["input_ids"]}
    )
    words = ["ba", "aa", " b", "tt", "e t", "hhh", "a b a"]
    prompts = [tokenizer(text)["input_ids"] for text in ("the a", "b", "ab ab the", "th")]
    free = llm.generate(prompts, greedy(30, allowed_token_ids=allowed))
    ids = [tokenizer(word.lstrip())["input_ids"] for word in words]
    spaced = [tokenizer(" " + word.lstrip())["input_ids"] for word in words]
    ids += [two for one, two in zip(ids, spaced, strict=True) if two[0] != one[0] and len(two) == len(one)]
    assert any(len(one) > 1 for one in ids) and any(len(one) > 2 for one in ids)

    def contains(output: list[int]) -> bool:
        return any(output[i : i + len(one)] == one for one in ids for i in range(len(output)))

    assert any(contains(output.token_ids) for output in free), "no word to ban comes up"
    outputs = run_with_preemptions(llm, prompts, greedy(30, allowed_token_ids=allowed, bad_words=words))
    for prompt, output in zip(prompts, outputs, strict=True):
        assert not contains(output.token_ids)
        assert_best_after(NoBadWordsLogitsProcessor(ids, eos_token_id=-2), prompt, output.token_ids, allowed)


def test_allowed_token_ids_are_all_that_is_drawn_and_in_proportion(llm: LLM) -> None:
    model = checkpoint("odd_vocab", tokenizer=True)
    allowed = [0, 31, 32, 33, 150, 161, 162, 200, 321, 322]
    prompts = [random_prompt(np.random.default_rng(i), 3 + i, model.vocab_size) for i in range(6)]
    params = [SamplingParams(seed=i, max_tokens=16, ignore_eos=True, allowed_token_ids=allowed) for i in range(6)]
    for i, output in enumerate(run_with_preemptions(llm, prompts, params)):
        logits = model.reference.logits(tuple(prompts[i] + output.token_ids))[len(prompts[i]) - 1 : -1].numpy()
        numbers = kit.torch_uniforms(i, 16)
        for j, token_id in enumerate(output.token_ids):
            masked = np.full_like(logits[j], -math.inf)
            masked[allowed] = logits[j, allowed]
            assert_is_the_draw(token_id, sampling_weights(masked, params[i], [], []), numbers[j])


def test_what_leaves_nothing_gives_way_and_harms_nobody(llm: LLM) -> None:
    """min_tokens bans the only allowed tokens, the end of sequence; bad words ban all others of few."""
    tokenizer = llm.get_tokenizer()
    assert tokenizer is not None
    end = sorted(llm.engine.input_processor.eos_token_ids)
    (only_end,), only_a, bystander = (
        [output.outputs[0].token_ids for output in llm.generate([[5, 6]], params)]
        for params in (
            SamplingParams(temperature=0, allowed_token_ids=end, min_tokens=4, max_tokens=6),
            SamplingParams(
                allowed_token_ids=tokenizer("a")["input_ids"], bad_words=["a"], max_tokens=3, ignore_eos=True
            ),
            greedy(6),
        )
    )
    assert len(only_end) == 4 and set(only_end) <= set(end)
    assert only_a == [3 * tokenizer("a")["input_ids"]]
    checkpoint("odd_vocab", tokenizer=True).reference.assert_greedy([5, 6], bystander[0])


@pytest.mark.parametrize(
    "options",
    [
        {"logit_bias": {-1: 1.0}}, {"logit_bias": {1: 101}}, {"logit_bias": {1: math.nan}}, {"logit_bias": [1]},
        {"logit_bias": {"1": 1.0}}, {"allowed_token_ids": []}, {"allowed_token_ids": [1.5]}, {"allowed_token_ids": 3},
        {"bad_words": [""]}, {"bad_words": ["a", "  "]}, {"bad_words": [3]}, {"n": 0}, {"n": True}, {"n": 1.0},
        {"prompt_logprobs": -1}, {"prompt_logprobs": 21}, {"output_kind": "delta"}, {"output_kind": 1},
    ],
    ids=str,
)  # fmt: skip
def test_what_cannot_be_meant_is_refused_by_name(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        SamplingParams(**options)


def test_ids_outside_the_vocabulary_are_refused_by_name() -> None:
    llm = make_llm(checkpoint("odd_vocab").directory)
    for options in ({"logit_bias": {323: 1.0}}, {"allowed_token_ids": [1, 323]}):
        with pytest.raises(ValueError, match=rf"{next(iter(options))} contains 323.*0 to 322"):
            llm.generate([[1]], SamplingParams(**options))
    with pytest.raises(ValueError, match="bad_words need a tokenizer"):
        llm.generate([[1]], SamplingParams(bad_words=["a"]))


# --- Grammars ----------------------------------------------------------------------------------------------------


class Cycle:
    """Token i of the output is one of sets[i % len(sets)]; over after `length` tokens."""

    def __init__(self, sets: list[list[int]], length: int, vocab_size: int = 323) -> None:
        self.sets, self.length, self.vocab_size = sets, length, vocab_size
        self.accepted: list[int] = []
        self.num_asked = 0

    @property
    def is_terminated(self) -> bool:
        return len(self.accepted) >= self.length

    def fill_mask(self, row: np.ndarray) -> None:
        self.num_asked += 1
        row[:] = token_bitmask(self.sets[len(self.accepted) % len(self.sets)], self.vocab_size)

    def accept(self, token_ids: list[int]) -> bool:
        self.accepted += token_ids
        return True


def steps(llm: LLM) -> Iterator[int]:
    count = 0
    while llm.engine.has_unfinished:
        llm.engine.step()
        llm.engine.scheduler.check()
        yield count
        count += 1
        assert count < 500


@pytest.mark.parametrize("preempt_every", [1000, 3, 7])
def test_a_grammar_limits_each_token_and_knows_exactly_the_output(llm: LLM, preempt_every: int) -> None:
    model = checkpoint("odd_vocab", tokenizer=True)
    sets = [[1, 2, 3], [322, 100], list(range(40, 90)), [31], [32, 64]]
    prompt = random_prompt(np.random.default_rng(7), 2 * B + 5, 323)
    grammars = [Cycle(sets, 13), Cycle(sets[:1], 100)]
    params = [greedy(50), greedy(9)]
    requests = [
        llm.engine.prepare([prompt], one, grammar=grammar)[0] for one, grammar in zip(params, grammars, strict=True)
    ]
    llm.engine.add(requests)
    (bystander,) = llm.engine.add_requests([prompt], greedy(20))
    for step in steps(llm):
        for request, grammar in zip(requests, grammars, strict=True):
            assert grammar.accepted == request.seq.output_token_ids[: len(grammar.accepted)]
            assert request.is_done or grammar.accepted == request.seq.output_token_ids
        if step % preempt_every == preempt_every - 1:
            for seq in reversed(list(llm.engine.scheduler.running.values())):
                llm.engine.scheduler.preempt(seq)
    assert_idle(llm.engine)
    for request, grammar, length, reason in zip(requests, grammars, (13, 9), ("stop", "length"), strict=True):
        output = request.output().outputs[0]
        assert len(output.token_ids) == length and output.finish_reason == reason
        assert grammar.num_asked == length, "asked for rows that do not sample"
        logits = model.reference.logits(tuple(prompt + output.token_ids))[len(prompt) - 1 : -1]
        for i, token_id in enumerate(output.token_ids):
            allowed = grammar.sets[i % len(grammar.sets)]
            assert token_id in allowed and logits[i, allowed].max() - logits[i, token_id] < 1e-4
    model.reference.assert_greedy(prompt, bystander.output().token_ids)
    tokenizer = llm.get_tokenizer()
    assert tokenizer is not None and requests[0].output().text == tokenizer.decode(
        requests[0].seq.output_token_ids, skip_special_tokens=True
    ), "the last token is a part of the text"


def test_each_completion_has_its_own_copy_of_the_grammar(llm: LLM) -> None:
    grammar = Cycle([[1, 2, 3, 4, 5, 6, 7, 8], [100, 101, 102, 103]], 12)
    params = SamplingParams(n=3, seed=3, max_tokens=20, temperature=3.0, ignore_eos=True)
    requests = llm.engine.prepare([[9, 9, 9]], params, grammar=grammar)
    llm.engine.add(requests)
    for _ in steps(llm):
        pass
    outputs = [completion.token_ids for completion in requests[0].output().outputs]
    assert len({tuple(ids) for ids in outputs}) == 3 and grammar.accepted == []
    for ids in outputs:
        assert len(ids) == 12 and all(token_id in grammar.sets[i % 2] for i, token_id in enumerate(ids))


class Faulty(Cycle):
    """Does something wrong at its third token."""

    def __init__(self, what: str) -> None:
        super().__init__([[1, 2, 3]], 100)
        self.what = what

    def fill_mask(self, row: np.ndarray) -> None:
        if len(self.accepted) == 2 and self.what == "raises in fill_mask":
            raise RuntimeError("boom")
        super().fill_mask(row)
        if len(self.accepted) == 2 and self.what == "allows nothing":
            row[:] = 0
        if len(self.accepted) == 2 and self.what == "allows only what is no token":
            row[:] = 0
            row[-1] = -(2**31)
        if len(self.accepted) == 2 and self.what == "allows other ids than the parameters":
            row[:] = token_bitmask([77], 323)

    def accept(self, token_ids: list[int]) -> bool:
        super().accept(token_ids)
        if len(self.accepted) == 3 and self.what == "raises in accept":
            raise RuntimeError("boom")
        if len(self.accepted) == 3 and self.what == "is interrupted":
            raise KeyboardInterrupt
        return not (len(self.accepted) == 3 and self.what == "does not accept")


FAULTS = [
    "raises in fill_mask", "allows nothing", "allows only what is no token", "allows other ids than the parameters",
    "raises in accept", "does not accept", "is interrupted",
]  # fmt: skip


@pytest.mark.parametrize("what", FAULTS)
def test_what_goes_wrong_in_a_grammar_ends_its_own_request_alone(llm: LLM, what: str) -> None:
    model = checkpoint("odd_vocab", tokenizer=True)
    params = greedy(30, allowed_token_ids=[1, 2, 3])
    requests = llm.engine.prepare([[4, 5]], params, grammar=Faulty(what))
    healthy = Cycle([[1, 2, 3], [100, 101], [200]], 100)
    requests += llm.engine.prepare([[4, 5]], greedy(30), grammar=healthy)
    llm.engine.add(requests)
    requests += llm.engine.add_requests([[4, 5]], greedy(30))
    returned = []
    num_interrupts = 0
    while llm.engine.has_unfinished:
        try:
            returned += llm.engine.step()
        except KeyboardInterrupt:
            num_interrupts += 1
        llm.engine.scheduler.check()
    assert num_interrupts == (what == "is interrupted")
    assert sorted(map(id, returned)) == sorted(map(id, requests))
    faulty, other, free = (request.output().outputs[0] for request in requests)
    assert faulty.finish_reason == "error" and requests[0].seq.error is not None
    assert len(faulty.token_ids) in (2, 3)
    assert other.finish_reason == "length" and len(other.token_ids) == 30
    assert healthy.accepted[:29] == other.token_ids[:29]
    assert all(token_id in healthy.sets[i % 3] for i, token_id in enumerate(other.token_ids))
    model.reference.assert_greedy([4, 5], free.token_ids)
    assert_idle(llm.engine)
