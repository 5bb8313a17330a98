"""Prompts in, tokens out, against transformers in float32: whatever the batch, the chunks, the blocks, the cache and
preemption do, the greedy tokens and their log-probabilities are the reference's. Then the forms of the API, bad input,
and steps that fail or are interrupted anywhere.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import kit
import numpy as np
import pytest
import tiny
from kit import assert_idle, checked_steps, checkpoint, fake_llm, greedy, make_llm, random_prompt

from nanoinfer import LLM, SamplingParams
from nanoinfer.engine.llm_engine import LLMEngine
from nanoinfer.engine.output_processor import Request

B = 8


def assert_all_greedy(tiny_model: kit.Tiny, prompts: list[list[int]], outputs: list[Any], max_tokens: int) -> None:
    assert len(outputs) == len(prompts)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.prompt_token_ids == prompt
        assert len(output.token_ids) == max_tokens
        assert output.outputs[0].finish_reason == "length"
        tiny_model.reference.assert_greedy(prompt, output.token_ids, output.outputs[0].logprobs)


def boundary_prompts(block_size: int, seed: int = 0, vocab_size: int = 320) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    lengths = [1, block_size - 1, block_size, block_size + 1, 2 * block_size - 1, 2 * block_size, 3 * block_size + 5]
    return [random_prompt(rng, length, vocab_size) for length in lengths if length < 160]


# --- Equality with transformers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", tiny.VARIANTS)
def test_equals_transformers_for_every_chunk_size(variant: str) -> None:
    model = checkpoint(variant)
    prompts = boundary_prompts(B, vocab_size=model.vocab_size)
    for chunk in (1, B - 1, B, B + 1, 2 * B + 3, 1024):
        llm = make_llm(model.directory, max_num_batched_tokens=chunk, shuffle=chunk)
        with checked_steps(llm.engine), kit.poisoned_on_allocation(llm):
            outputs = llm.generate(prompts, greedy(10, logprobs=3))
        assert_all_greedy(model, prompts, outputs, 10)
        assert_idle(llm.engine)


@pytest.mark.parametrize("block_size", [4, 5, 16, 64])
@pytest.mark.parametrize("variant", ["tied", "yarn", "one_kv_head"])
def test_equals_transformers_for_every_block_size(variant: str, block_size: int) -> None:
    model = checkpoint(variant)
    prompts = boundary_prompts(block_size, seed=block_size)
    for chunk in (block_size - 1, block_size, 1024):
        llm = make_llm(model.directory, kvcache_block_size=block_size, max_num_batched_tokens=chunk, shuffle=1)
        with kit.poisoned_on_allocation(llm):
            outputs = llm.generate(prompts, greedy(9, logprobs=1))
        assert_all_greedy(model, prompts, outputs, 9)
        assert_idle(llm.engine)


@pytest.mark.parametrize("variant", tiny.VARIANTS)
def test_a_batch_in_any_order_equals_each_prompt_alone(variant: str) -> None:
    model = checkpoint(variant)
    rng = np.random.default_rng(1)
    prompts = [random_prompt(rng, int(n), model.vocab_size) for n in rng.integers(1, 40, 20)]
    llm = make_llm(model.directory, num_kvcache_blocks=200)
    for prompt in prompts[:4]:
        assert_all_greedy(model, [prompt], llm.generate(prompt, greedy(8, logprobs=2)), 8)
    for order in (range(20), range(19, -1, -1), rng.permutation(20)):
        shuffled = [prompts[i] for i in order]
        assert_all_greedy(model, shuffled, llm.generate(shuffled, greedy(8, logprobs=2)), 8)
    assert_idle(llm.engine)


@pytest.mark.parametrize("variant", ["tied", "untied", "yarn"])
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_a_pool_too_small_for_all_preempts_and_changes_nothing(variant: str, prefix_caching: bool) -> None:
    model = checkpoint(variant)
    rng = np.random.default_rng(2)
    prompts = [random_prompt(rng, int(n)) for n in rng.integers(1, 2 * B, 8)]
    llm = make_llm(model.directory, num_kvcache_blocks=9, enable_prefix_caching=prefix_caching, shuffle=3)
    with checked_steps(llm.engine), kit.poisoned_on_allocation(llm):
        requests = llm.engine.add_requests(prompts, greedy(4 * B, logprobs=1))
        while llm.engine.has_unfinished:
            llm.engine.step()
    outputs = [request.output() for request in requests]
    assert_all_greedy(model, prompts, outputs, 4 * B)
    assert llm.engine.scheduler.num_preemptions > 2
    assert llm.engine.scheduler.num_preemptions == sum(request.seq.num_preemptions for request in requests)
    assert_idle(llm.engine)


@pytest.mark.parametrize("moment", ["before the first token", "after one token", "at a block boundary", "every step"])
def test_preemption_at_any_moment_changes_nothing(moment: str) -> None:
    """The last sequence that runs is preempted again and again, also half way through its prompt."""
    model = checkpoint("tied")
    rng = np.random.default_rng(3)
    prompts = [random_prompt(rng, n) for n in (5, 2 * B, 2 * B + 3)]
    llm = make_llm(model.directory, max_num_batched_tokens=B + 1)
    requests = llm.engine.add_requests(prompts, greedy(2 * B + 2, logprobs=1))
    num_steps = 0
    with checked_steps(llm.engine), kit.poisoned_on_allocation(llm):
        while llm.engine.has_unfinished:
            llm.engine.step()
            num_steps += 1
            assert num_steps < 1000, "no progress"
            for seq in reversed(list(llm.engine.scheduler.running.values())):
                now = {
                    "before the first token": seq.num_output_tokens == 0 and seq.num_preemptions < 3,
                    "after one token": seq.num_output_tokens == 1 and seq.num_preemptions < 3,
                    "at a block boundary": seq.num_tokens % B == 0 and seq.num_preemptions < 3,
                    "every step": seq.num_preemptions < 12,
                }[moment]
                if not now:
                    break
                llm.engine.scheduler.preempt(seq)
                llm.engine.scheduler.check()
    assert_all_greedy(model, prompts, [request.output() for request in requests], 2 * B + 2)
    assert llm.engine.scheduler.num_preemptions > 0
    assert_idle(llm.engine)


def test_warm_and_cold_and_disabled_prefix_cache_agree() -> None:
    """30 families of prompts with shared prefixes, in a pool that has to evict."""
    model = checkpoint("tied")
    rng = np.random.default_rng(4)
    warm = make_llm(model.directory, num_kvcache_blocks=40, shuffle=4)
    without = make_llm(model.directory, num_kvcache_blocks=40, enable_prefix_caching=False)
    with kit.poisoned_on_allocation(warm):
        for _ in range(30):
            stem = random_prompt(rng, int(rng.integers(B, 5 * B)))
            family = [stem + random_prompt(rng, int(rng.integers(1, 2 * B))) for _ in range(3)]
            family.append(family[0][: 2 * B])
            first = warm.generate(family, greedy(4, logprobs=1))
            second = warm.generate(family, greedy(4, logprobs=1))
            assert [output.num_cached_tokens for output in second] == [B * ((len(p) - 1) // B) for p in family]
            cold = without.generate(family, greedy(4, logprobs=1))
            assert not any(output.num_cached_tokens for output in cold)
            for outputs in (first, second, cold):
                assert_all_greedy(model, family, outputs, 4)
    assert_idle(warm.engine)
    assert warm.engine.scheduler.block_manager.hit_tokens > 0
    assert without.engine.scheduler.block_manager.hit_tokens == 0


@pytest.mark.parametrize("num_blocks_long", [1, 2, 3])
def test_a_prompt_that_is_cached_whole_still_computes_its_last_block(num_blocks_long: int) -> None:
    model = checkpoint("tied")
    prompt = random_prompt(np.random.default_rng(5), num_blocks_long * B)
    llm = make_llm(model.directory)
    with checked_steps(llm.engine) as plans:
        cold = llm.generate(prompt, greedy(B + 2))
        warm = llm.generate(prompt, greedy(B + 2))
        longer = llm.generate([*prompt, 7], greedy(3))
    first_plans = [plan for plan in plans if plan.new]
    assert [plan.num_tokens for plan in first_plans] == [len(prompt), B, 1]
    assert [out[0].num_cached_tokens for out in (cold, warm, longer)] == [0, len(prompt) - B, len(prompt)]
    assert_all_greedy(model, [prompt], cold, B + 2)
    assert_all_greedy(model, [prompt], warm, B + 2)
    assert_all_greedy(model, [[*prompt, 7]], longer, 3)


def test_a_conversation_hits_the_answer_that_was_generated() -> None:
    """Turn k + 1 extends turn k and its answer: all full blocks of both are hits."""
    model = checkpoint("tied")
    rng = np.random.default_rng(6)
    llm = make_llm(model.directory)
    history = random_prompt(rng, B + 3)
    for _ in range(4):
        output = llm.generate(history, greedy(B + 1))[0]
        assert_all_greedy(model, [history], [output], B + 1)
        # The last token of an answer was never computed.
        computed = len(history) + B
        history = history + output.token_ids + random_prompt(rng, 5)
        followup = llm.engine.scheduler.block_manager
        seq = llm.engine.input_processor.process([history], greedy(1))[0][1][0]
        assert len(followup.match_prefix(seq.token_ids, seq.prefix, b"")) == computed // B


def test_only_the_middle_one_of_a_batch_has_a_hit() -> None:
    model = checkpoint("tied")
    rng = np.random.default_rng(7)
    prompts = [random_prompt(rng, 3 * B + 2) for _ in range(3)]
    llm = make_llm(model.directory, shuffle=9)
    llm.generate(prompts[1], greedy(1))
    outputs = llm.generate(prompts, greedy(B, logprobs=2))
    assert [output.num_cached_tokens for output in outputs] == [0, 3 * B, 0]
    assert_all_greedy(model, prompts, outputs, B)


def test_identical_prompts_of_one_batch_then_hit_and_leave_a_whole_pool() -> None:
    model = checkpoint("tied")
    prompt = random_prompt(np.random.default_rng(8), 2 * B + 1)
    for order in ([1, 5, 9, 13], [13, 9, 5, 1], [5, 1, 13, 9]):
        llm = make_llm(model.directory, num_kvcache_blocks=20)
        with checked_steps(llm.engine), kit.poisoned_on_allocation(llm):
            outputs = llm.generate([prompt] * 4, [greedy(n, logprobs=1) for n in order])
            for output, n in zip(outputs, order, strict=True):
                assert_all_greedy(model, [prompt], [output], n)
            # Fill the pool with other content, so that blocks of the losers are reused, but not all of it.
            llm.generate(random_prompt(np.random.default_rng(9), 8 * B), greedy(1))
            fifth = llm.generate(prompt, greedy(3, logprobs=1))[0]
        assert fifth.num_cached_tokens == 2 * B
        assert_all_greedy(model, [prompt], [fifth], 3)
        assert_idle(llm.engine)


@pytest.mark.parametrize("length", [1, B - 1, B, B + 1, 2 * B - 1, 2 * B, 2 * B + 1])
@pytest.mark.parametrize("max_tokens", [1, 2, B, B + 1])
def test_a_pool_that_is_exactly_enough_is_enough(length: int, max_tokens: int) -> None:
    """And with one block less the prompt is refused, or its output cut to what the pool holds: never an assertion."""
    model = checkpoint("tied")
    prompt = random_prompt(np.random.default_rng(length), length)
    exact = -(-(length + max_tokens) // B)
    llm = make_llm(model.directory, num_kvcache_blocks=exact)
    with checked_steps(llm.engine):
        assert_all_greedy(model, [prompt], llm.generate(prompt, greedy(max_tokens)), max_tokens)
    assert_idle(llm.engine)
    if exact == 1:
        return
    short = make_llm(model.directory, num_kvcache_blocks=exact - 1)
    room = (exact - 1) * B - length
    if room < 1:
        with pytest.raises(ValueError, match=rf"prompts\[0\].*{length} tokens.*{(exact - 1) * B - 1}"):
            short.generate(prompt, greedy(max_tokens))
    else:
        output = short.generate(prompt, greedy(max_tokens))[0]
        assert_all_greedy(model, [prompt], [output], min(max_tokens, room))
    assert_idle(short.engine)
    assert_all_greedy(model, [[3]], short.generate([3], greedy(2)), 2)


@pytest.mark.parametrize("chunk", [1, 5, B, 1024])
def test_half_precision_decodes_to_tokens_that_are_among_the_reference_s_best(chunk: int) -> None:
    model = checkpoint("tied")
    prompts = boundary_prompts(B)
    llm = make_llm(model.directory, dtype="bfloat16", max_num_batched_tokens=chunk)
    assert llm.capacity.dtype == "bfloat16"
    for prompt, output in zip(prompts, llm.generate(prompts, greedy(8)), strict=True):
        logits = model.reference.logits(tuple(prompt + output.token_ids))[len(prompt) - 1 : -1]
        ranks = [(row > row[token_id]).sum() for row, token_id in zip(logits, output.token_ids, strict=True)]
        assert max(ranks) < 3


def test_ragged_limits_do_not_reach_past_the_pool() -> None:
    """max_model_len is no multiple of the block size, and more than the pool holds."""
    model = checkpoint("tied")
    llm = make_llm(model.directory, num_kvcache_blocks=5, max_model_len=43)
    limit = llm.engine.scheduler.config.max_model_len
    assert limit == 40
    prompt = random_prompt(np.random.default_rng(1), 30)
    assert_all_greedy(model, [prompt], llm.generate(prompt, greedy(64)), 10)
    llm = make_llm(model.directory, num_kvcache_blocks=6, max_model_len=43)
    assert_all_greedy(model, [prompt], llm.generate(prompt, greedy(64)), 13)
    with pytest.raises(ValueError, match=r"43 tokens.*42"):
        llm.generate([1] * 43, greedy())


# --- A random mixture of everything ------------------------------------------------------------------------------


def random_params(rng: np.random.Generator) -> SamplingParams:
    options: dict[str, Any] = {"max_tokens": int(rng.integers(1, 25)), "ignore_eos": True, "logprobs": 2}
    if rng.random() < 0.5:
        return SamplingParams(temperature=0.0, **options)
    options |= {"temperature": float(rng.uniform(0.3, 3.0)), "seed": int(rng.integers(0, 2**40))}
    if rng.random() < 0.5:
        options |= {"top_k": int(rng.integers(1, 50)), "top_p": float(rng.uniform(0.5, 1.0))}
    if rng.random() < 0.4:
        options |= {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": -0.25}
    return SamplingParams(**options)


MIXTURES: list[tuple[str, dict[str, Any]]] = [
    ("tied", {"num_kvcache_blocks": 12, "kvcache_block_size": 4, "max_num_batched_tokens": 9, "max_num_seqs": 6}),
    ("untied", {"num_kvcache_blocks": 30, "kvcache_block_size": 5, "max_num_batched_tokens": 64, "max_num_seqs": 3}),
    ("bias", {"num_kvcache_blocks": 7, "kvcache_block_size": 8, "max_num_batched_tokens": 4, "max_num_seqs": 8}),
    ("odd_vocab", {"num_kvcache_blocks": 4, "kvcache_block_size": 16, "max_num_batched_tokens": 17}),
    ("one_kv_head", {"num_kvcache_blocks": 20, "kvcache_block_size": 4, "enable_prefix_caching": False}),
    ("mha", {"num_kvcache_blocks": 3, "kvcache_block_size": 32, "max_num_batched_tokens": 31, "max_num_seqs": 2}),
    ("yarn", {"num_kvcache_blocks": 40, "kvcache_block_size": 4, "max_num_batched_tokens": 5}),
    ("tied", {"num_kvcache_blocks": 60, "kvcache_block_size": 1, "max_num_batched_tokens": 16, "max_num_seqs": 5}),
]


@pytest.mark.parametrize(("variant", "options"), MIXTURES, ids=[f"{i}-{m[0]}" for i, m in enumerate(MIXTURES)])
def test_a_random_mixture_of_everything_equals_transformers(variant: str, options: dict[str, Any]) -> None:
    """Arrivals, aborts, preemptions, failing steps, hits and evictions for hundreds of steps, checked after each."""
    model = checkpoint(variant)
    rng = np.random.default_rng(abs(hash(tuple(options.values()))) % 2**32)
    llm = make_llm(model.directory, shuffle=0, **options)
    engine = llm.engine
    limit = engine.scheduler.config.max_model_len
    stems = [random_prompt(rng, limit // 2, model.vocab_size) for _ in range(4)]
    live: list[Request] = []
    finished: list[Request] = []
    added: list[list[int]] = []
    forward = type(engine.executor.runner.model).forward
    countdown = [-1]

    def failing_forward(self: Any, *args: Any) -> Any:
        countdown[0] -= 1
        hidden = forward(self, *args)
        if countdown[0] == 0:
            raise RuntimeError("a step fails")
        return hidden

    num_failed = num_steps = 0
    with pytest.MonkeyPatch.context() as patch, checked_steps(engine), kit.poisoned_on_allocation(llm):
        patch.setattr(type(engine.executor.runner.model), "forward", failing_forward)
        while num_steps < 330 or live:
            if num_steps < 300 and rng.random() < 0.25 and len(live) < 20:
                stem = stems[rng.integers(4)][: rng.integers(0, limit // 2)]
                prompt = stem + random_prompt(rng, int(rng.integers(1, max(2, limit // 3))), model.vocab_size)
                live += engine.add_requests([prompt], random_params(rng))
                added.append(prompt)
            if live and rng.random() < 0.02:
                victim = live.pop(rng.integers(len(live)))
                engine.abort([victim])
                assert victim.seq.finish_reason is not None and victim.seq.finish_reason.value == "abort"
                engine.scheduler.check()
            running = list(engine.scheduler.running.values())
            while running and rng.random() < 0.05:
                engine.scheduler.preempt(running.pop())
                engine.scheduler.check()
            countdown[0] = 1 if rng.random() < 0.01 else -1
            before = {id(request): request.seq.num_tokens for request in live}
            try:
                done = engine.step()
            except RuntimeError:
                num_failed += 1
                engine.scheduler.check()
                continue
            num_steps += 1
            assert num_steps < 3000, "the engine makes no progress"
            for request in done:
                live.remove(request)
                finished.append(request)
            assert all(request.seq.num_tokens - before[id(request)] in (0, 1) for request in live)
    assert_idle(engine)
    assert num_failed > 0 and len(finished) > 15
    for request in finished:
        output, params = request.output(), request.seq.params
        prompt, ids = output.prompt_token_ids, output.token_ids
        assert len(ids) == min(params.max_tokens, limit - len(prompt))
        logprobs = output.outputs[0].logprobs
        assert logprobs is not None and [next(iter(entry)) for entry in logprobs] == ids
        if params.is_greedy:
            model.reference.assert_greedy(prompt, ids, logprobs)
        else:
            model.assert_sampled(prompt, ids, params, kit.torch_uniforms(params.seed, len(ids)))


# --- The forms of the API ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def text_llm() -> Iterator[LLM]:
    with make_llm(checkpoint("tied", tokenizer=True).directory) as llm:
        yield llm


def test_every_form_of_prompt_means_the_same(text_llm: LLM) -> None:
    text = "the héllo 👨‍👩‍👧"
    ids = kit.byte_tokenizer()(text)["input_ids"]
    expected = checkpoint("tied", tokenizer=True).greedy(ids, 6)
    array = np.array(ids)
    forms: list[Any] = [
        text, ids, array, array.astype(np.int32), array.astype(np.uint16), tuple(ids), [np.int64(i) for i in ids],
        {"prompt": text}, {"prompt_token_ids": ids}, {"prompt_token_ids": array},
        {"prompt": text, "prompt_token_ids": ids},
    ]  # fmt: skip
    for form in forms:
        for prompts in (form, [form]):
            outputs = text_llm.generate(prompts, greedy(6), use_tqdm=False)
            assert len(outputs) == 1
            assert outputs[0].prompt_token_ids == ids and outputs[0].token_ids == expected
            assert all(type(token_id) is int for token_id in outputs[0].prompt_token_ids)
    mixed = text_llm.generate(forms, greedy(6))
    assert [output.token_ids for output in mixed] == [expected] * len(forms)
    assert [output.prompt for output in mixed][:2] == [text, None]
    assert [output.token_ids for output in text_llm.generate((f for f in forms), greedy(6))] == [expected] * len(forms)
    assert [output.token_ids for output in text_llm.generate(np.stack([array, array]), greedy(6))] == [expected] * 2


def test_generate_of_nothing_is_nothing(text_llm: LLM) -> None:
    assert text_llm.generate([], greedy()) == []
    assert text_llm.generate([], []) == []
    assert text_llm.generate([]) == []


def test_an_output_has_vllm_s_shape_and_nano_vllm_s_keys(text_llm: LLM) -> None:
    output = text_llm.generate("abc", greedy(5, logprobs=2))[0]
    completion = output.outputs[0]
    assert output.finished and completion.finish_reason == "length" and completion.stop_reason is None
    assert output.prompt == "abc" and output.num_cached_tokens == 0
    assert output["text"] == output.text == completion.text
    assert output["token_ids"] == output.token_ids == completion.token_ids
    assert completion.text == kit.byte_tokenizer().decode(completion.token_ids, skip_special_tokens=True)
    assert completion.logprobs is not None and len(completion.logprobs) == 5
    best = [entry[token_id] for entry, token_id in zip(completion.logprobs, completion.token_ids, strict=True)]
    assert all(logprob.rank == 1 for logprob in best)
    assert completion.cumulative_logprob == pytest.approx(sum(logprob.logprob for logprob in best))
    with pytest.raises(KeyError, match="logprobs"):
        output["logprobs"]


def test_params_are_one_for_all_or_one_per_prompt_or_the_checkpoint_s(text_llm: LLM) -> None:
    prompts = [[1, 2], [3], [4, 5, 6]]
    one = text_llm.generate(prompts, greedy(3))
    assert [len(output.token_ids) for output in one] == [3, 3, 3]
    each = text_llm.generate(prompts, [greedy(1), greedy(7), greedy(2)])
    assert [len(output.token_ids) for output in each] == [1, 7, 2]
    for prompt, output in zip(prompts, each, strict=True):
        checkpoint("tied", tokenizer=True).reference.assert_greedy(prompt, output.token_ids)
    # transformers writes a generation_config.json without do_sample: greedy, like transformers' own generate.
    default = text_llm.get_default_sampling_params()
    assert default.temperature == 0.0 and default.max_tokens == 64
    output = text_llm.generate([1, 2])[0]
    checkpoint("tied", tokenizer=True).reference.assert_greedy([1, 2], output.token_ids)


def test_outputs_come_in_the_order_of_the_prompts_whenever_they_finish(text_llm: LLM) -> None:
    prompts = [[i, i + 1] for i in range(30)]
    outputs = text_llm.generate(prompts, [greedy(1 + (7 * i) % 11) for i in range(30)])
    assert [output.prompt_token_ids for output in outputs] == prompts
    assert [len(output.token_ids) for output in outputs] == [1 + (7 * i) % 11 for i in range(30)]
    assert len({output.request_id for output in outputs}) == 30


def test_the_caller_may_reuse_its_lists(text_llm: LLM) -> None:
    prompt = [5, 6, 7, 8]
    engine = text_llm.engine
    requests = engine.add_requests([prompt, prompt], greedy(4))
    prompt[:] = [0, 0, 0, 0]
    while engine.has_unfinished:
        engine.step()
    for request in requests:
        checkpoint("tied", tokenizer=True).reference.assert_greedy([5, 6, 7, 8], request.output().token_ids)
        assert request.output().prompt_token_ids == [5, 6, 7, 8]


@pytest.mark.parametrize("max_tokens", [1, 2, 7])
@pytest.mark.parametrize("num_blocks", [64, 5])
def test_max_tokens_is_exact(max_tokens: int, num_blocks: int) -> None:
    llm = make_llm(checkpoint("tied").directory, num_kvcache_blocks=num_blocks)
    outputs = llm.generate([[i] * B for i in range(6)], greedy(max_tokens))
    assert [len(output.token_ids) for output in outputs] == [max_tokens] * 6


def test_max_tokens_defaults_to_64() -> None:
    llm = make_llm(checkpoint("tied").directory)
    assert len(llm.generate([1], SamplingParams(temperature=0, ignore_eos=True))[0].token_ids) == 64


def test_prompt_plus_output_is_capped_at_max_model_len() -> None:
    model = checkpoint("tied")
    llm = make_llm(model.directory, max_model_len=4 * B)
    for length in (4 * B - 1, 4 * B - 2, 3 * B, 1):
        prompt = random_prompt(np.random.default_rng(length), length)
        output = llm.generate(prompt, greedy(64))[0]
        assert_all_greedy(model, [prompt], [output], 4 * B - length)
    with pytest.raises(ValueError, match=r"32 tokens.*31"):
        llm.generate([1] * (4 * B), greedy(2))


def test_length_cap_of_yarn_reaches_the_extended_context() -> None:
    llm = make_llm(checkpoint("yarn").directory, num_kvcache_blocks=200)
    assert llm.engine.scheduler.config.max_model_len == 256
    prompt = random_prompt(np.random.default_rng(0), 150)
    assert_all_greedy(checkpoint("yarn"), [prompt], llm.generate(prompt, greedy(100, logprobs=1)), 100)
    with pytest.raises(ValueError, match="257"):
        make_llm(checkpoint("yarn").directory, max_model_len=257)


def test_context_manager_and_close_free_the_engine() -> None:
    with make_llm(checkpoint("tied").directory) as llm:
        llm.generate([1], greedy(2))
    llm.close()
    with pytest.raises(RuntimeError, match="closed"):
        llm.generate([1], greedy(2))


def test_two_engines_do_not_know_of_each_other() -> None:
    models = [checkpoint("tied"), checkpoint("untied")]
    llms = [make_llm(model.directory) for model in models]
    requests = [llm.engine.add_requests([[1, 2, 3]], greedy(8))[0] for llm in llms]
    while any(llm.engine.has_unfinished for llm in llms):
        for llm in llms:
            llm.engine.step()
    for model, request in zip(models, requests, strict=True):
        model.reference.assert_greedy([1, 2, 3], request.output().token_ids)


def test_unknown_options_raise_and_name_the_one_that_was_meant() -> None:
    with pytest.raises(TypeError, match=r"max_num_seq\b.*max_num_seqs"):
        LLM(str(checkpoint("tied").directory), max_num_seq=3)
    with pytest.raises(TypeError, match="max_seq_len"):
        LLM(str(checkpoint("tied").directory), max_seq_len=3)


# --- Streaming and chat ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "params", [greedy(40), SamplingParams(seed=3, temperature=2.0, max_tokens=40, ignore_eos=True)]
)
def test_a_stream_concatenates_to_the_text(text_llm: LLM, params: SamplingParams) -> None:
    for prompt in ("abc", [7, 8], {"prompt": "the the"}):
        text = text_llm.generate(prompt, params)[0].text
        pieces = list(text_llm.stream(prompt, params))
        assert "".join(pieces) == text and all(pieces)
        assert len(pieces) > 3, "the text came all at once"
    assert_idle(text_llm.engine)


def test_a_stream_and_a_generate_may_take_turns(text_llm: LLM) -> None:
    """Steps of `generate` also advance the stream's request; its text is delivered all the same."""
    expected = text_llm.generate([5, 6, 7], greedy(12))[0].text
    for num_before in (0, 1, 3):
        stream = text_llm.stream([5, 6, 7], greedy(12))
        pieces = [next(stream) for _ in range(num_before)]
        text_llm.generate([[9, 9]], greedy(30))
        assert "".join([*pieces, *stream]) == expected
    assert_idle(text_llm.engine)


def test_two_streams_may_take_turns(text_llm: LLM) -> None:
    params = [greedy(20), greedy(5)]
    expected = [text_llm.generate([i, 3], p)[0].text for i, p in enumerate(params)]
    streams = [text_llm.stream([i, 3], p) for i, p in enumerate(params)]
    texts = ["", ""]
    for _ in range(30):
        for i, stream in enumerate(streams):
            texts[i] += next(stream, "")
    assert texts == expected
    assert_idle(text_llm.engine)


@pytest.mark.parametrize("num_taken", [0, 1, 2])
def test_a_stream_that_is_dropped_aborts_its_request(text_llm: LLM, num_taken: int) -> None:
    stream = text_llm.stream("abc", greedy(60))
    for _ in range(num_taken):
        next(stream)
    del stream
    gc.collect()
    text_llm.engine.step()  # a collector may run within a step, so it is left to the next one
    leaked = list(text_llm.engine.output_processor.requests.values())
    text_llm.engine.abort(leaked)  # for the tests after this one
    assert not leaked
    assert_idle(text_llm.engine)


def test_a_stream_checks_its_input_at_the_call(text_llm: LLM) -> None:
    with pytest.raises(ValueError, match="empty"):
        text_llm.stream("", greedy())
    assert_idle(text_llm.engine)


def test_chat_renders_the_template_and_passes_enable_thinking_on(text_llm: LLM) -> None:
    tokenizer = kit.byte_tokenizer()
    message = [{"role": "user", "content": "hi"}]
    other = [*message, {"role": "assistant", "content": "ho"}, {"role": "user", "content": "the end"}]
    for thinking in (None, True, False):
        options = {} if thinking is None else {"enable_thinking": thinking}
        texts = [
            tokenizer.apply_chat_template(m, tokenize=False, add_generation_prompt=True, **options)
            for m in (message, other)
        ]
        expected = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
        assert texts[0].endswith("</think>\n\n") == (thinking is False)
        one = text_llm.chat(message, greedy(3), **options)
        assert [output.prompt_token_ids for output in one] == expected[:1]
        both = text_llm.chat([message, other], [greedy(2), greedy(4)], **options)
        assert [output.prompt_token_ids for output in both] == expected
        assert [len(output.token_ids) for output in both] == [2, 4]
        assert "".join(text_llm.stream(message, greedy(3), **options)) == one[0].text
    assert text_llm.chat([], greedy()) == []


def test_chat_with_the_real_template_closes_the_thinking_only_when_told_not_to_think() -> None:
    if kit.qwen3_tokenizer_dir() is None:
        pytest.skip("the Qwen3 tokenizer is not on this machine")
    real = kit.qwen3_tokenizer()
    model_dir = kit.new_directory()
    tiny.save(model_dir, "tied", vocab_size=151936, hidden_size=16, num_hidden_layers=1)
    real.save_pretrained(model_dir)
    llm = make_llm(model_dir)
    message = [{"role": "user", "content": "Hé 👋"}]
    plain, off = (llm.chat(message, greedy(1), **o)[0].prompt_token_ids for o in ({}, {"enable_thinking": False}))
    assert real.decode(plain) == "<|im_start|>user\nHé 👋<|im_end|>\n<|im_start|>assistant\n"
    assert off[: len(plain)] == plain and real.decode(off[len(plain) :]) == "<think>\n\n</think>\n\n"
    assert llm.engine.input_processor.eos_token_ids == {2, 151645}


def test_chat_without_a_tokenizer_is_refused_by_name() -> None:
    llm = make_llm(checkpoint("tied").directory)
    with pytest.raises(ValueError, match="tokenizer"):
        llm.chat([{"role": "user", "content": "hi"}], greedy())
    with pytest.raises(ValueError, match=r"prompts\[0\].*tokenizer"):
        llm.generate("hi", greedy())
    with pytest.raises(ValueError, match="tokenizer"):
        llm.generate([1], greedy(stop=["x"]))


# --- Bad input ---------------------------------------------------------------------------------------------------

BAD_PROMPTS: list[tuple[Any, str]] = [
    ("", "empty"),
    ([], "empty"),
    ({"prompt": ""}, "empty"),
    ({"prompt_token_ids": []}, "empty"),
    (np.array([], dtype=np.int64), "empty"),
    ([1, 320], "320.*319"),
    ([-1, 1], "-1"),
    ([2**40], str(2**40)),
    ([1, 2**70], str(2**70)),
    ([True, 1], "True"),
    ([np.True_], "True"),
    ([1, 2.0], "2.0"),
    (np.array([1.0, 2.0]), "1.0"),
    ([1, "2"], "'2'"),
    ([1, None], "None"),
    ([[1, 2]], "."),
    ([1] * 256, "256 tokens.*255"),
    ({"prompt_token_ids": [1] * 300}, "300 tokens.*255"),
    ({"text": "abc"}, "text"),
    ({}, "prompt"),
    ({"prompt": 3}, "3"),
    ({"prompt_token_ids": "abc"}, "abc"),
]  # fmt: skip


@pytest.mark.parametrize(("bad", "named"), BAD_PROMPTS, ids=[str(b)[:30] for b, _ in BAD_PROMPTS])
def test_a_bad_prompt_raises_before_anything_is_scheduled(text_llm: LLM, bad: Any, named: str) -> None:
    engine = text_llm.engine
    bystander = engine.add_requests([[4, 5, 6]], greedy(9, logprobs=1))[0]
    engine.step()
    tokens = bystander.seq.num_tokens
    with pytest.raises(ValueError, match=rf"(?s)prompts\[1\].*{named}"):
        text_llm.generate([[1, 2], bad, [3]], greedy(4))
    assert bystander.seq.num_tokens == tokens, "something ran"
    assert list(engine.output_processor.requests.values()) == [bystander]
    while engine.has_unfinished:
        engine.step()
    checkpoint("tied", tokenizer=True).reference.assert_greedy(
        [4, 5, 6], bystander.output().token_ids, bystander.output().outputs[0].logprobs
    )
    assert_idle(engine)


def test_params_of_another_number_than_prompts_are_refused(text_llm: LLM) -> None:
    for num_params in (0, 2, 4):
        with pytest.raises(ValueError, match=rf"3 prompts.*{num_params} params"):
            text_llm.generate([[1], [2], [3]], [greedy()] * num_params)
    with pytest.raises(ValueError, match=r"params\[1\]"):
        text_llm.generate([[1], [2]], [greedy(), {"temperature": 0}])  # type: ignore[list-item]
    with pytest.raises(ValueError, match=r"params\[1\].*320"):
        text_llm.generate([[1], [2]], [greedy(), greedy(stop_token_ids=[320])])
    assert_idle(text_llm.engine)


def test_a_request_larger_than_the_pool_is_refused_and_others_finish() -> None:
    model = checkpoint("tied")
    llm = make_llm(model.directory, num_kvcache_blocks=4, max_model_len=250)
    smalls = [[i, i + 1] for i in range(3)]
    requests = llm.engine.add_requests(smalls, greedy(5))
    with pytest.raises(ValueError, match=r"prompts\[0\].*100 tokens.*31"):
        llm.generate([[1] * 100], greedy())
    while llm.engine.has_unfinished:
        llm.engine.step()
    assert_all_greedy(model, smalls, [request.output() for request in requests], 5)


# --- Failures and interruptions ----------------------------------------------------------------------------------


def install(
    patch: pytest.MonkeyPatch, engine: LLMEngine, place: str, error: BaseException, at_call: int, late: bool
) -> None:
    """Makes the `at_call`-th call of `place` raise, before its work or after it."""
    owners = {
        "schedule": engine.scheduler, "update": engine.scheduler, "submit": engine.executor,
        "process": engine.output_processor, "register": engine.scheduler.block_manager,
        "allocate": engine.scheduler.block_manager, "match_prefix": engine.scheduler.block_manager,
        "forward": engine.executor.runner.model, "compute_logits": engine.executor.runner.model,
        "apply": engine.executor.runner._batch, "build": engine.executor.runner._batch,
        "commit": engine.executor.runner._batch,
    }  # fmt: skip
    owner = type(owners[place])
    original, calls = getattr(owner, place), [0]

    def raising(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == at_call and not late:
            raise error
        value = original(self, *args, **kwargs)
        if calls[0] == at_call:
            raise error
        return value

    patch.setattr(owner, place, raising)


PLACES = [
    "schedule", "match_prefix", "allocate", "submit", "apply", "build", "forward", "compute_logits", "commit", "update",
    "register", "process",
]  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("error", [RuntimeError("boom"), KeyboardInterrupt()], ids=["error", "ctrl-c"])
def test_an_exception_in_a_step_is_raised_and_leaves_an_engine_that_works(
    place: str, late: bool, error: BaseException
) -> None:
    model = checkpoint("tied")
    rng = np.random.default_rng(10)
    prompts = [random_prompt(rng, n) for n in (3, 2 * B, B + 5, 1)]
    llm = make_llm(model.directory, max_num_batched_tokens=12, num_kvcache_blocks=12)
    for at_call in (1, 2, 4):
        with pytest.MonkeyPatch.context() as patch:
            install(patch, llm.engine, place, error, at_call, late)
            with pytest.raises(type(error)) as caught:
                llm.generate(prompts, greedy(B + 2))
            assert caught.value is error
        assert_idle(llm.engine)
        assert_all_greedy(model, prompts, llm.generate(prompts, greedy(B + 2, logprobs=1)), B + 2)
        assert_idle(llm.engine)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("late", [False, True])
def test_requests_of_other_calls_survive_a_step_that_fails(place: str, late: bool) -> None:
    """Whatever step fails, each survivor ends with its tokens and is returned by `step` exactly once."""
    model = checkpoint("tied", tokenizer=True)
    for at_call in range(1, 9):
        llm = make_llm(model.directory, num_kvcache_blocks=20)
        engine = llm.engine
        prompts = [[1, 2, 3], [4] * (B + 1)]
        survivors = engine.add_requests(prompts, [greedy(5, logprobs=1), greedy(7, logprobs=1)])
        returned: list[Request] = []
        num_failures = 0
        with pytest.MonkeyPatch.context() as patch:
            install(patch, engine, place, RuntimeError("boom"), at_call, late)
            for _ in range(40):
                try:
                    returned += engine.step()
                except RuntimeError:
                    num_failures += 1
                engine.scheduler.check()
        assert num_failures == 1 or (at_call > 1 and num_failures == 0)
        for prompt, request, n in zip(prompts, survivors, (5, 7), strict=True):
            output = request.output()
            assert_all_greedy(model, [prompt], [output], n)
            assert output.text == kit.byte_tokenizer().decode(output.token_ids, skip_special_tokens=True)
        assert sorted(map(id, returned)) == sorted(map(id, survivors)), "a request was never returned, or twice"
        assert_idle(engine)


def test_a_stream_survives_a_generate_that_is_interrupted(text_llm: LLM) -> None:
    expected = text_llm.generate([5, 6, 7], greedy(12))[0].text
    for place in ("submit", "update", "process"):
        for at_call in range(1, 16):
            stream = text_llm.stream([5, 6, 7], greedy(12))
            pieces = [next(stream)]
            with pytest.MonkeyPatch.context() as patch:
                install(patch, text_llm.engine, place, KeyboardInterrupt(), at_call, late=True)
                with pytest.raises(KeyboardInterrupt):
                    text_llm.generate([[9, 9]], greedy(30))
            assert "".join([*pieces, *stream]) == expected, (place, at_call)
    assert_idle(text_llm.engine)


class Interrupter:
    """Raises KeyboardInterrupt at the n-th line that runs below a function of `roots`, as a signal might."""

    def __init__(
        self, at_line: int, roots: tuple[str, ...], files: tuple[str, ...], protected: tuple[str, ...]
    ) -> None:
        self.at_line, self.roots, self.files, self.protected = at_line, roots, files, protected
        self.num_lines = 0
        self.where: str | None = None

    def __enter__(self) -> Interrupter:
        sys.settrace(self._call)
        return self

    def __exit__(self, *exception: object) -> None:
        sys.settrace(None)

    def _call(self, frame: FrameType, event: str, arg: Any) -> Callable[..., Any] | None:
        if not frame.f_code.co_filename.endswith(self.files):
            return None
        above: FrameType | None = frame
        below_root = False
        while above is not None:
            if above.f_code.co_name in self.protected:
                return None
            below_root |= above.f_code.co_name in self.roots
            above = above.f_back
        return self._line if below_root else None

    def _line(self, frame: FrameType, event: str, arg: Any) -> Callable[..., Any]:
        if event == "line":
            self.num_lines += 1
            if self.num_lines == self.at_line:
                self.where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                raise KeyboardInterrupt(self.where)
        return self._line


ENGINE_FILES = (
    "engine/llm_engine.py", "engine/scheduler.py", "engine/block_manager.py", "engine/sequence.py",
    "engine/output_processor.py", "engine/detokenizer.py", "engine/input_processor.py", "worker/input_batch.py",
    "worker/model_runner.py",
)  # fmt: skip


def interrupt_everywhere(
    llm: LLM, roots: tuple[str, ...], prompts: Any, params: Any, num_points: int, seed: int
) -> None:
    """Ctrl-C at many lines below `roots`: each time nothing leaks, and the next call gives what it should."""
    expected = [output.token_ids for output in llm.generate(prompts, params)]
    protected = ("recover", "abort")
    with Interrupter(-1, roots, ENGINE_FILES, protected) as dry:
        llm.generate(prompts, params)
    assert dry.num_lines > num_points
    rng = np.random.default_rng(seed)
    for at_line in sorted(rng.choice(dry.num_lines, num_points, replace=False) + 1):
        where = "nowhere"
        try:
            with Interrupter(int(at_line), roots, ENGINE_FILES, protected) as tracer:
                llm.generate(prompts, params)
        except KeyboardInterrupt as interrupt:
            where = str(interrupt)
        if tracer.where is None:
            continue  # a warm cache made the run shorter
        assert where == tracer.where, f"the interrupt at {tracer.where} was swallowed"
        try:
            assert_idle(llm.engine)
            assert [output.token_ids for output in llm.generate(prompts, params)] == expected
        except (AssertionError, KeyError, IndexError) as error:
            raise AssertionError(f"after an interrupt at {where}: {error}") from error


def test_ctrl_c_at_any_line_of_a_step_leaks_nothing() -> None:
    llm = fake_llm(checkpoint("tied", tokenizer=True).directory, num_kvcache_blocks=10, max_num_batched_tokens=20)
    rng = np.random.default_rng(11)
    prompts = [random_prompt(rng, n) for n in (3, 2 * B, B + 5, 1, 2 * B)]
    interrupt_everywhere(llm, ("step",), prompts, greedy(2 * B, logprobs=1, stop=["zzzz"]), 400, 12)


def test_ctrl_c_at_any_line_of_a_step_leaks_nothing_in_the_rank() -> None:
    llm = make_llm(checkpoint("tied", tokenizer=True).directory, num_kvcache_blocks=6, max_num_batched_tokens=20)
    rng = np.random.default_rng(13)
    prompts = [random_prompt(rng, n) for n in (3, 2 * B, B + 5)]
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, repetition_penalty=1.2)
    interrupt_everywhere(llm, ("step",), prompts, params, 60, 14)


def test_ctrl_c_while_requests_are_added_leaks_nothing() -> None:
    llm = fake_llm(checkpoint("tied", tokenizer=True).directory)
    interrupt_everywhere(llm, ("prepare", "add_requests", "add"), [[1, 2], [3], "abc"], greedy(3), 60, 15)


def test_ctrl_c_while_a_request_is_queued_leaks_nothing() -> None:
    """The same at a coarser place: the third of four prompts."""
    llm = make_llm(checkpoint("tied").directory)
    add, calls = llm.engine.scheduler.add, [0]

    def interrupted(seq: Any) -> None:
        calls[0] += 1
        if calls[0] == 3:
            raise KeyboardInterrupt
        add(seq)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llm.engine.scheduler, "add", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[1], [2], [3], [4]], greedy(3))
    assert_idle(llm.engine)


def container_sizes(root: object) -> dict[str, int]:
    """Length of every dict, list, set and deque that hangs on our own objects, by path."""
    sizes: dict[str, int] = {}
    seen: set[int] = set()

    def walk(value: object, path: str, depth: int) -> None:
        if id(value) in seen or depth > 6:
            return
        seen.add(id(value))
        if isinstance(value, (str, bytes, int, float, type)) or callable(value):
            return
        if hasattr(value, "__len__") and not isinstance(value, np.ndarray) and not hasattr(value, "dtype"):
            sizes[path] = len(value)  # type: ignore[arg-type]
        if type(value).__module__.startswith("nanoinfer.") and hasattr(value, "__dict__"):
            for name, child in vars(value).items():
                walk(child, f"{path}.{name}", depth + 1)

    walk(root, "engine", 0)
    return sizes


def test_200_generate_calls_leave_every_container_as_large_as_before() -> None:
    model = checkpoint("tied", tokenizer=True)
    llm = make_llm(model.directory, num_kvcache_blocks=8)
    for token_id in range(model.vocab_size):
        llm.engine.output_processor._table.bytes_of(token_id)
    rng = np.random.default_rng(16)

    def call() -> None:
        prompts = [random_prompt(rng, int(n)) for n in rng.integers(1, 2 * B, 4)]
        llm.generate(prompts, [greedy(6, logprobs=1), greedy(3, stop="zz"), SamplingParams(max_tokens=4), greedy(9)])
        stream = llm.stream(prompts[0], greedy(9))
        next(stream, "")
        stream.close()

    for _ in range(10):
        call()
    assert_idle(llm.engine)
    before = container_sizes(llm.engine)
    assert any("_free" in path for path in before) and any("requests" in path for path in before)
    for _ in range(200):
        call()
        assert_idle(llm.engine)
    after = container_sizes(llm.engine)
    index = next(path for path in before if path.endswith("_index"))
    assert after.pop(index) <= 8 and before.pop(index) <= 8, "more cached blocks than there are blocks"
    assert after == before


def test_5000_prompts_are_queued_and_finished_without_looking_at_the_queue_each_step() -> None:
    """A step looks at as many waiting requests as it admits, and one more."""
    llm = fake_llm(checkpoint("tied").directory, max_num_seqs=64, enable_prefix_caching=True)
    matched = [0]
    manager = llm.engine.scheduler.block_manager
    original = manager.match_prefix

    def counting(*args: Any) -> list[int]:
        matched[0] += 1
        return original(*args)

    manager.match_prefix = counting  # type: ignore[method-assign]
    with checked_steps(llm.engine, every=100) as plans:
        outputs = llm.generate([[i % 320] for i in range(5000)], greedy(1))
    assert len(outputs) == 5000
    assert all(output.token_ids == [kit.hashed_token(output.prompt_token_ids)] for output in outputs)
    assert 5000 <= matched[0] <= 5000 + len(plans)


def test_a_queue_may_be_aborted_from_either_end() -> None:
    llm = fake_llm(checkpoint("tied").directory, max_num_seqs=2)
    requests = llm.engine.add_requests([[i] for i in range(50)], greedy(10))
    llm.engine.step()
    llm.engine.abort(reversed(requests[10:]))
    llm.engine.scheduler.check()
    llm.engine.abort(requests[:3])
    llm.engine.abort(requests[:3])
    llm.engine.scheduler.check()
    returned = []
    while llm.engine.has_unfinished:
        returned += llm.engine.step()
    assert returned == requests[3:10]
    assert {request.output().outputs[0].finish_reason for request in requests[:3] + requests[10:]} == {"abort"}
    assert_idle(llm.engine)


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ("hi", "messages is 'hi'"),
        ({"role": "user", "content": "hi"}, "messages is"),
        ([{"content": "hi"}], r"messages\[0\]\[0\] is .*'role' and 'content'"),
        ([{"role": "user"}], r"messages\[0\]\[0\]: 'content' is None"),
        (
            [[{"role": "user", "content": "hi"}], [{"role": "user", "content": 5}]],
            r"messages\[1\]\[0\]: 'content' is 5",
        ),
        ([[]], r"messages\[0\] is \[\]"),
    ],
)
def test_a_conversation_that_is_none_is_refused_by_its_place(text_llm: LLM, messages: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        text_llm.chat(messages, greedy())
    assert_idle(text_llm.engine)


@pytest.mark.parametrize("prompts", [None, 5, np.array(5), b"hi", [b"hi"]])
def test_what_is_no_prompt_is_refused_as_such(text_llm: LLM, prompts: Any) -> None:
    with pytest.raises(ValueError, match="prompt"):
        text_llm.generate(prompts, greedy())
    assert_idle(text_llm.engine)


def test_vllm_s_name_for_the_params_works_and_both_names_at_once_do_not(text_llm: LLM) -> None:
    (output,) = text_llm.generate([1, 2], sampling_params=greedy(3))
    assert len(output.token_ids) == 3
    with pytest.raises(ValueError, match="two names"):
        text_llm.generate([1, 2], greedy(3), sampling_params=greedy(3))


def test_a_stream_that_is_collected_within_a_step_harms_nobody(text_llm: LLM) -> None:
    expected = text_llm.generate([[7, 8], [9]], greedy(20))
    engine = text_llm.engine
    stream: list[Any] = [text_llm.stream([5, 6, 7], greedy(40))]
    next(stream[0])
    allocate = engine.scheduler.block_manager.allocate

    def collecting(num_new_blocks: int) -> list[int]:
        if stream:
            stream.clear()
            gc.collect()
        return allocate(num_new_blocks)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.scheduler.block_manager, "allocate", collecting)
        outputs = text_llm.generate([[7, 8], [9]], greedy(20))
    assert not stream and [o.token_ids for o in outputs] == [o.token_ids for o in expected]
    assert_idle(engine)
