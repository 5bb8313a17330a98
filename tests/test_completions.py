"""Several completions of one prompt, log-probabilities of the prompt, and salted caches: each against single requests,
transformers, or arithmetic, whatever the chunks, the cache, the pool and the ranks are.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import kit
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit import assert_idle, checked_steps, checkpoint, fake_llm, greedy, lockstep_llm, make_llm, random_prompt

from nanoinfer import LLM, RequestOutput, SamplingParams

B = 8


# --- n -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {}, {"enable_prefix_caching": False}, {"max_num_seqs": 1}, {"max_num_seqs": 2}, {"max_num_batched_tokens": 5},
        {"num_kvcache_blocks": 9}, {"num_kvcache_blocks": 9, "enable_prefix_caching": False, "max_num_seqs": 3},
    ],
    ids=str,
)  # fmt: skip
def test_n_completions_equal_n_requests_with_the_following_seeds(options: dict[str, Any]) -> None:
    model = checkpoint("tied")
    rng = np.random.default_rng(0)
    prompts = [random_prompt(rng, length) for length in (1, B, 3 * B + 2, 2 * B)]
    params = [
        SamplingParams(n=4, seed=2**64 - 2, max_tokens=11, ignore_eos=True, logprobs=2),
        SamplingParams(n=1, seed=5, max_tokens=9, ignore_eos=True),
        SamplingParams(n=3, seed=-7, max_tokens=12, ignore_eos=True, temperature=0.7),
        SamplingParams(n=2, seed=0, max_tokens=8, temperature=1.5, stop_token_ids=list(range(100))),
    ]
    llm = make_llm(model.directory, **options)
    with checked_steps(llm.engine), kit.poisoned_on_allocation(llm):
        outputs = llm.generate(prompts, params)
    assert_idle(llm.engine)
    reference = make_llm(model.directory)
    for prompt, one, output in zip(prompts, params, outputs, strict=True):
        assert [completion.index for completion in output.outputs] == list(range(one.n)) and output.finished
        assert one.seed is not None
        for i, completion in enumerate(output.outputs):
            single = dataclasses.replace(one, n=1, seed=(one.seed + i) % 2**64)
            expected = reference.generate(prompt, single)[0].outputs[0]
            assert completion.token_ids == expected.token_ids
            assert (completion.finish_reason, completion.stop_reason) == (expected.finish_reason, expected.stop_reason)
            if one.logprobs is not None:
                assert completion.logprobs is not None and expected.logprobs is not None
                for mine, theirs in zip(completion.logprobs, expected.logprobs, strict=True):
                    assert {k: v.logprob for k, v in mine.items()} == pytest.approx(
                        {k: v.logprob for k, v in theirs.items()}, abs=1e-4
                    )


def test_completions_without_a_seed_differ_and_repeat_with_the_engine_s() -> None:
    model = checkpoint("tied")
    params = SamplingParams(n=5, max_tokens=12, ignore_eos=True)
    first, second = (
        [completion.token_ids for completion in make_llm(model.directory, seed=3).generate([4, 5], params)[0].outputs]
        for _ in range(2)
    )
    assert first == second
    assert len(set(map(tuple, first))) == 5


@pytest.mark.parametrize("length", [1, B, B + 1, 3 * B, 3 * B + 5])
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_completions_share_the_prompt_s_full_blocks_and_recompute_the_tail(length: int, prefix_caching: bool) -> None:
    llm = fake_llm(checkpoint("tied").directory, enable_prefix_caching=prefix_caching)
    llm.generate([random_prompt(np.random.default_rng(1), length)], greedy(6, n=4), use_tqdm=False)
    shared = B * ((length - 1) // B) if prefix_caching else 0
    assert llm.engine.executor.num_computed_tokens == 4 * (length + 5) - 3 * shared
    assert_idle(llm.engine)


def test_who_comes_later_passes_completions_that_wait_for_their_prompt() -> None:
    llm = fake_llm(checkpoint("tied").directory, max_num_batched_tokens=4 * B)
    engine = llm.engine
    rng = np.random.default_rng(2)
    (big,) = engine.add_requests([random_prompt(rng, 5 * B + 1)], greedy(4, n=3))
    (small,) = engine.add_requests([random_prompt(rng, 3)], greedy(4))
    with checked_steps(engine) as plans:
        while engine.has_unfinished:
            engine.step()
    first, *others = (completion.seq.seq_id for completion in big.completions)
    assert list(plans[0].num_scheduled_tokens) == [first]
    assert list(plans[1].num_scheduled_tokens) == [first, small.seq.seq_id]
    assert [new.seq_id for new in plans[2].new] == others
    assert [new.num_computed_tokens for new in plans[2].new] == [5 * B, 5 * B]
    assert_idle(engine)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32), num_blocks=st.integers(5, 24), max_num_seqs=st.integers(1, 8))
def test_requests_with_completions_may_be_aborted_and_preempted_at_any_time(
    seed: int, num_blocks: int, max_num_seqs: int
) -> None:
    rng = np.random.default_rng(seed)
    llm = fake_llm(
        checkpoint("tied").directory, num_kvcache_blocks=num_blocks, max_num_seqs=max_num_seqs,
        max_num_batched_tokens=int(rng.integers(4, 40)), enable_prefix_caching=bool(rng.integers(4)),
    )  # fmt: skip
    engine = llm.engine
    requests, aborted = [], set()
    with checked_steps(engine):
        for _ in range(60):
            if rng.random() < 0.3:
                prompt = random_prompt(rng, int(rng.integers(1, 3 * B)))
                requests += engine.add_requests([prompt], greedy(int(rng.integers(1, 12)), n=int(rng.integers(1, 5))))
            if requests and rng.random() < 0.1:
                victim = requests[rng.integers(len(requests))]
                engine.abort([victim])
                aborted.add(victim)
                engine.scheduler.check()
            if engine.scheduler.running and rng.random() < 0.2:
                engine.scheduler.preempt(list(engine.scheduler.running.values())[-1])
            engine.step()
        for _ in range(2000):
            if not engine.has_unfinished:
                break
            engine.step()
    assert_idle(engine)
    for request in requests:
        assert request.is_done
        for completion in request.completions:
            seq = completion.seq
            expected = list(seq.token_ids[: seq.num_prompt_tokens])
            for _ in range(seq.num_output_tokens):
                expected.append(kit.hashed_token(expected))
            assert seq.token_ids == expected
            assert seq.num_output_tokens == seq.max_tokens or request in aborted


def test_a_stream_of_text_has_one_completion() -> None:
    llm = fake_llm(checkpoint("tied", tokenizer=True).directory)
    with pytest.raises(ValueError, match="n is 2"):
        llm.stream("a", SamplingParams(n=2))


# --- prompt_logprobs ---------------------------------------------------------------------------------------------


def assert_prompt_logprobs(model: kit.Tiny, output: RequestOutput, num_best: int) -> None:
    """Those of a forward pass of transformers."""
    prompt, found = output.prompt_token_ids, output.prompt_logprobs
    assert found is not None and len(found) == len(prompt) and found[0] is None
    expected = model.reference.logits(tuple(prompt)).double().log_softmax(dim=-1)
    for position, entry in enumerate(found[1:]):
        assert entry is not None
        row, token_id = expected[position], prompt[position + 1]
        assert next(iter(entry)) == token_id
        assert set(entry) == {token_id, *row.topk(num_best).indices.tolist()}
        for other, value in entry.items():
            assert abs(value.logprob - row[other].item()) < 1e-4
            assert (
                abs(value.rank - 1 - int((row > row[other]).sum())) <= int((row - row[other]).abs().lt(1e-4).sum()) - 1
            )


@pytest.mark.parametrize("chunk", [1, 7, B, 64, 1024])
@pytest.mark.parametrize("variant", ["tied", "odd_vocab"])
def test_prompt_logprobs_are_transformers_whatever_the_chunks(variant: str, chunk: int) -> None:
    model = checkpoint(variant)
    rng = np.random.default_rng(chunk)
    prompts = [random_prompt(rng, length, model.vocab_size) for length in (1, 2, B, 2 * B + 1, 70)]
    llm = make_llm(model.directory, max_num_batched_tokens=chunk, num_kvcache_blocks=40)
    params = [greedy(3, prompt_logprobs=k) for k in (0, 1, 4, 20, 2)]
    with checked_steps(llm.engine), kit.poisoned_on_allocation(llm):
        outputs = llm.generate([*prompts, prompts[2]], [*params, greedy(3)])
    for output, one in zip(outputs, params, strict=False):
        assert one.prompt_logprobs is not None
        assert_prompt_logprobs(model, output, one.prompt_logprobs)
        model.reference.assert_greedy(output.prompt_token_ids, output.token_ids)
    assert outputs[-1].prompt_logprobs is None
    assert_idle(llm.engine)


def test_prompt_logprobs_use_no_cached_blocks_and_others_use_theirs() -> None:
    model = checkpoint("tied")
    prompt = random_prompt(np.random.default_rng(3), 3 * B + 2)
    llm = make_llm(model.directory)
    for _ in range(2):
        output = llm.generate(prompt, greedy(4, prompt_logprobs=2))[0]
        assert output.num_cached_tokens == 0
        assert_prompt_logprobs(model, output, 2)
    assert llm.generate(prompt, greedy(4))[0].num_cached_tokens == 3 * B
    output = llm.generate(prompt, SamplingParams(n=3, seed=1, max_tokens=4, prompt_logprobs=2))[0]
    assert_prompt_logprobs(model, output, 2)
    assert len(output.outputs) == 3


@pytest.mark.parametrize("moment", ["within the prompt", "after it"])
def test_prompt_logprobs_survive_preemption(moment: str) -> None:
    model = checkpoint("tied")
    rng = np.random.default_rng(4)
    llm = make_llm(model.directory, max_num_batched_tokens=B + 3)
    requests = llm.engine.add_requests(
        [random_prompt(rng, length) for length in (5, 5 * B + 3)], greedy(12, prompt_logprobs=3)
    )
    seq = requests[1].seq
    with checked_steps(llm.engine), kit.poisoned_on_allocation(llm):
        while llm.engine.has_unfinished:
            llm.engine.step()
            now = (
                seq.lacks_prompt_logprobs and seq.prompt_logprobs
                if moment == "within the prompt"
                else seq.num_output_tokens
            )
            if now and seq.num_preemptions < 3 and seq.seq_id in llm.engine.scheduler.running:
                llm.engine.scheduler.preempt(seq)
    assert seq.num_preemptions == 3
    for request in requests:
        assert_prompt_logprobs(model, request.output(), 3)
        model.reference.assert_greedy(request.output().prompt_token_ids, request.output().token_ids)
    assert_idle(llm.engine)


@pytest.mark.parametrize(("variant", "size"), [("tied", 2), ("odd_vocab", 2), ("one_kv_head", 4)])
def test_all_of_it_with_several_ranks(variant: str, size: int) -> None:
    model = checkpoint(variant)
    rng = np.random.default_rng(5)
    prompts = [random_prompt(rng, length, model.vocab_size) for length in (1, 2 * B + 3, 50)]
    params = [
        SamplingParams(n=3, seed=4, max_tokens=8, ignore_eos=True),
        SamplingParams(n=2, seed=9, max_tokens=8, ignore_eos=True, prompt_logprobs=5, logprobs=2),
        greedy(4, prompt_logprobs=0),
    ]
    options: dict[str, Any] = {"max_num_batched_tokens": 24}
    many, one = lockstep_llm(model.directory, size, **options), make_llm(model.directory, **options)
    for llm_outputs in zip(many.generate(prompts, params), one.generate(prompts, params), strict=True):
        mine, theirs = ([completion.token_ids for completion in output.outputs] for output in llm_outputs)
        assert mine == theirs
    for output, one_params in zip(many.generate(prompts, params)[1:], params[1:], strict=True):
        assert one_params.prompt_logprobs is not None
        assert_prompt_logprobs(model, output, one_params.prompt_logprobs)


# --- cache_salt --------------------------------------------------------------------------------------------------


def num_cached(llm: LLM, prompt: list[int], salt: str | None) -> int:
    one: dict[str, Any] = {"prompt_token_ids": prompt}
    if salt is not None:
        one["cache_salt"] = salt
    output = llm.generate([one], greedy(4), use_tqdm=False)[0]
    assert output.prompt_token_ids == prompt
    return output.num_cached_tokens


def test_blocks_are_shared_under_equal_salts_only() -> None:
    llm = fake_llm(checkpoint("tied").directory)
    prompt = random_prompt(np.random.default_rng(6), 3 * B + 1)
    salts = (None, "a", "b", "ab", "\0", "ä")
    for salt in salts:
        assert num_cached(llm, prompt, salt) == 0, f"{salt!r} found another salt's blocks"
    for salt in salts:
        assert num_cached(llm, prompt, salt) == 3 * B
    assert_idle(llm.engine)


@pytest.mark.parametrize("salt", ["", 3, b"a"])
def test_a_salt_is_a_non_empty_string(salt: Any) -> None:
    llm = fake_llm(checkpoint("tied").directory)
    with pytest.raises(ValueError, match="cache_salt"):
        llm.generate([{"prompt_token_ids": [1], "cache_salt": salt}], greedy())
    assert_idle(llm.engine)
