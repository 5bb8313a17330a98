"""Steps in flight, from the engine's side: whatever happens while one is planned before the last one is back, outputs
are those of an engine that waits for each step, and those of transformers; nothing is left over.

Most tests run over `LateRanks`, which do a step when its result is asked for and no sooner. The scheduler's own laws
are in test_scheduler.py, what is launched on a GPU in test_device_step.py and triton_engine_cases.py.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from time import perf_counter
from typing import Any

import kit
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit import LateRanks, assert_idle, checkpoint, fake_llm, greedy, hashed_token, random_prompt
from test_choice import Cycle
from test_generate import interrupt_everywhere

from nanoinfer import LLM, RequestOutput, SamplingParams
from nanoinfer.config import EngineConfig
from nanoinfer.engine.output_processor import Request
from nanoinfer.executor.uniproc import UniprocExecutor
from nanoinfer.step import SchedulerOutput, StepStats, token_bitmask

B = 8
DIRECTORY = checkpoint("tied", tokenizer=True).directory


def late_llm(**options: Any) -> tuple[LLM, LateRanks]:
    llm = fake_llm(DIRECTORY, ranks=LateRanks, **{"async_scheduling": True, **options})
    ranks = llm.engine.executor
    assert isinstance(ranks, LateRanks)
    return llm, ranks


def facts(output: RequestOutput) -> list[Any]:
    return [
        (one.token_ids, one.text, one.finish_reason, one.stop_reason, one.logprobs, one.cumulative_logprob)
        for one in output.outputs
    ]


def random_params(rng: np.random.Generator) -> SamplingParams:
    text_of = kit.byte_tokenizer().decode
    return SamplingParams(
        max_tokens=int(rng.integers(1, 20)),
        n=int(rng.integers(1, 4)) if rng.random() < 0.3 else 1,
        ignore_eos=bool(rng.random() < 0.7),
        stop=[text_of([int(token)]) for token in rng.integers(0, 255, 20)] if rng.random() < 0.4 else [],
        stop_token_ids=rng.integers(0, 320, 20).tolist() if rng.random() < 0.4 else [],
        logprobs=1 if rng.random() < 0.3 else None,
    )


# --- Equality with the engine that waits ---------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), num_blocks=st.integers(6, 40), budget=st.sampled_from([1, 7, 24, 200]))
def test_outputs_are_those_of_an_engine_that_waits(seed: int, num_blocks: int, budget: int) -> None:
    """Stops of every kind, chunks, prefix hits, preemptions, late arrivals, aborts, grammars and failing steps."""
    rng = np.random.default_rng(seed)
    options = {"num_kvcache_blocks": num_blocks, "max_num_batched_tokens": budget, "max_num_seqs": 5}
    stems = [random_prompt(rng, 3 * B) for _ in range(2)]
    prompts = [stems[i % 2][: rng.integers(0, 3 * B)] + random_prompt(rng, int(rng.integers(1, 6))) for i in range(9)]
    params = [random_params(rng) for _ in prompts]
    waiting = fake_llm(DIRECTORY, **options)
    expected = [
        facts(waiting.generate([prompt], one, use_tqdm=False)[0]) for prompt, one in zip(prompts, params, strict=True)
    ]

    llm, ranks = late_llm(**options)
    engine = llm.engine

    def fail(plan: SchedulerOutput) -> None:
        if rng.random() < 0.03:
            raise RuntimeError("a step fails")

    ranks.on_step = fail
    left = list(zip(prompts, params, strict=True))
    requests: list[Request] = []
    returned: list[Request] = []
    aborted: list[Request] = []
    while left or engine.has_unfinished:
        if left and rng.random() < 0.4:
            requests += engine.add_requests([left[0][0]], left[0][1])
            left.pop(0)
        if requests and rng.random() < 0.02:
            victim = requests[int(rng.integers(len(requests)))]
            if not victim.is_done:
                engine.abort([victim])
                aborted.append(victim)
        try:
            returned += engine.step()
        except RuntimeError:
            assert not engine._in_flight
        engine.scheduler.check()
        assert len(engine._in_flight) <= 1
    ranks.on_step = None
    assert_idle(engine)
    assert sorted(map(id, returned)) == sorted(id(request) for request in requests if request not in aborted)
    for request, of_waiting in zip(requests, expected, strict=True):
        if request not in aborted:
            assert facts(request.output()) == of_waiting
    assert ranks.max_ahead == 2


def test_a_grammar_makes_steps_wait_while_it_runs_and_no_longer() -> None:
    """Its mask follows the last token; beside it and after it, all is as without it."""
    llm, ranks = late_llm(max_num_batched_tokens=16)
    engine = llm.engine
    grammar = Cycle([[1, 2, 3], [300, 100], [31]], 6, 320)
    (constrained,) = engine.prepare([random_prompt(np.random.default_rng(0), 40)], greedy(9), grammar=grammar)
    (free,) = engine.prepare([[1, 2]], greedy(30))
    engine.add([free, constrained])
    masks: list[dict[int, np.ndarray]] = []
    submit = ranks.submit

    def noting(plan: SchedulerOutput) -> Any:
        masks.append(plan.bitmasks)
        if constrained.seq.num_output_tokens:
            assert constrained.is_done or not ranks._submitted, "a step was planned before the grammar saw its token"
        return submit(plan)

    ranks.submit = noting  # type: ignore[method-assign]
    ahead = []
    while engine.has_unfinished:
        engine.step()
        ahead.append(len(engine._in_flight))
    assert constrained.is_done and free.seq.output_token_ids == expected_ids([1, 2], 30)
    of_grammar = [mask[constrained.seq.seq_id] for mask in masks if mask]
    assert len(of_grammar) == 6
    for i, words in enumerate(of_grammar):
        np.testing.assert_array_equal(words, token_bitmask(grammar.sets[i % 3], 320))
    # While the prompt is read in chunks, and once the grammar is over.
    assert ahead[0] == ahead[1] == 1 and ahead[-2] == 1 and 0 in ahead


def expected_ids(prompt: list[int], count: int) -> list[int]:
    ids = list(prompt)
    for _ in range(count):
        ids.append(hashed_token(ids))
    return ids[len(prompt) :]


@pytest.mark.parametrize("how", ["token", "string"])
def test_a_stop_costs_one_token_in_vain_and_no_step_waits(how: str) -> None:
    text = "bcdefghijklmnopqrstuvwxyz"
    letters = [kit.byte_tokenizer().encode(letter)[0] for letter in text]
    llm, ranks = late_llm(next_token=lambda ids: letters[len(ids)])
    stop: dict[str, Any] = {"stop_token_ids": [letters[5]]} if how == "token" else {"stop": [text[5]]}
    llm.engine.add_requests([[5, 6], [7]], [SamplingParams(max_tokens=50, ignore_eos=True, **stop), greedy(20)])
    num_calls = 0
    while llm.engine.has_unfinished:
        llm.engine.step()
        num_calls += 1
    assert num_calls == 20 + 1, "a step waited"
    assert ranks.num_computed_tokens == (2 + 3 + 1) + (1 + 19)
    assert_idle(llm.engine)


def test_for_want_of_blocks_all_results_are_taken_before_the_next_plan() -> None:
    llm, _ = late_llm(num_kvcache_blocks=6, enable_prefix_caching=False)
    engine = llm.engine
    prompts = [[i] * (5 + i) for i in range(3)]
    requests = engine.add_requests(prompts, greedy(30))
    while not engine.scheduler.is_short:
        engine.step()
    assert len(engine._in_flight) == 1 and not engine.scheduler.num_preemptions
    engine.step()
    assert not engine._in_flight and not engine.scheduler.num_preemptions, "it was planned before all was back"
    engine.step()
    assert engine.scheduler.num_preemptions == 1 and len(engine._in_flight) == 1
    while engine.has_unfinished:
        engine.step()
    assert [request.seq.output_token_ids for request in requests] == [expected_ids(prompt, 30) for prompt in prompts]
    assert_idle(engine)


# --- Nothing is left over ------------------------------------------------------------------------------------------


def test_ctrl_c_at_any_line_of_a_step_leaks_nothing_with_steps_in_flight() -> None:
    llm, ranks = late_llm(num_kvcache_blocks=10, max_num_batched_tokens=20)
    rng = np.random.default_rng(11)
    prompts = [random_prompt(rng, n) for n in (3, 2 * B, B + 5, 1, 2 * B)]
    interrupt_everywhere(llm, ("step",), prompts, greedy(2 * B, logprobs=1, stop=["zzzz"]), 250, 12)
    assert ranks.max_ahead >= 2


def test_when_the_last_request_is_gone_nothing_stays_in_flight() -> None:
    """It stops, or is aborted, or its stream is left: its token in vain is waited for, and its blocks are free."""
    llm, ranks = late_llm()
    engine = llm.engine
    last = expected_ids([5, 6], 4)[-1]
    stopping = SamplingParams(max_tokens=50, ignore_eos=True, stop_token_ids=[last])
    llm.generate([[5, 6]], stopping, use_tqdm=False)
    assert ranks.max_ahead == 2
    assert_idle(engine)
    stream = llm.stream([5, 6], stopping)
    text = "".join(stream)
    assert_idle(engine)
    assert text == llm.generate([[5, 6]], stopping, use_tqdm=False)[0].text
    first, second = engine.add_requests([[1], [2]], greedy(40))
    for _ in range(3):
        engine.step()
    engine.abort([first])
    assert first.seq.block_table and len(engine._in_flight) == 1, "freed under a step"
    engine.abort([second])
    assert not first.seq.block_table and not second.seq.block_table
    assert_idle(engine)


def test_a_step_that_fails_takes_those_behind_it_along() -> None:
    llm, ranks = late_llm()
    engine = llm.engine
    (request,) = engine.add_requests([[1, 2, 3]], greedy(10, logprobs=1))
    for _ in range(4):
        engine.step()
    num_tokens = request.seq.num_output_tokens
    assert num_tokens == 3 and request.seq.num_output_placeholders == 1

    def fail(plan: SchedulerOutput) -> None:
        raise RuntimeError("a step fails")

    ranks.on_step = fail
    with pytest.raises(RuntimeError, match="a step fails"):
        engine.step()
    ranks.on_step = None
    assert not engine._in_flight and request.seq.num_output_placeholders == request.seq.num_inflight_tokens == 0
    assert request.seq.num_output_tokens == num_tokens
    while engine.has_unfinished:
        engine.step()
    assert request.output().token_ids == expected_ids([1, 2, 3], 10)
    assert_idle(engine)


def test_a_step_in_vain_that_fails_spoils_no_answer(caplog: pytest.LogCaptureFixture) -> None:
    llm, ranks = late_llm()
    ids = expected_ids([5, 6], 4)

    def fail(plan: SchedulerOutput) -> None:
        if len(ranks.rows[min(ranks.rows)].token_ids) == 2 + 4:
            raise RuntimeError("the token after the last")

    ranks.on_step = fail
    for _ in range(2):
        (output,) = llm.generate([[5, 6]], SamplingParams(max_tokens=9, stop_token_ids=[ids[-1]]), use_tqdm=False)
        assert output.token_ids == ids
        assert "the token after the last" in caplog.text
        caplog.clear()
        assert_idle(llm.engine)


# --- The switch, and what is told of steps -------------------------------------------------------------------------


@pytest.mark.parametrize(("option", "most"), [(None, 1), (True, 2), (False, 1)])
def test_async_scheduling(option: bool | None, most: int) -> None:
    """None: not on a CPU."""
    llm, ranks = late_llm(async_scheduling=option)
    (output,) = llm.generate([[1, 2]], greedy(10), use_tqdm=False)
    assert output.token_ids == expected_ids([1, 2], 10) and ranks.max_ahead == most


def test_where_steps_cannot_overlap_asking_for_it_is_answered(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "nanoinfer"):
        llm = kit.make_llm(DIRECTORY, async_scheduling=True)
    assert "async_scheduling=True changes nothing" in caplog.text and "'mp'" in caplog.text
    engine = llm.engine
    engine.add_requests([[1, 2]], greedy(3))
    for count in (1, 2, 3):
        engine.step()
        assert engine.has_unfinished == (count < 3) and not engine._in_flight, "each call is a whole step"


def test_on_a_gpu_steps_overlap_unless_that_is_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    capacity = UniprocExecutor.capacity
    monkeypatch.setattr(UniprocExecutor, "capacity", lambda self: replace(capacity(self), device="cuda"))
    for option, expected in ((None, True), (True, True), (False, False)):
        engine = kit.make_llm(DIRECTORY, async_scheduling=option).engine
        assert not engine.overlaps_steps, "this rank does not run ahead"
        engine.executor.runs_apart = True
        assert engine.overlaps_steps == expected


@pytest.mark.parametrize("value", ["auto", 1, 0])
def test_async_scheduling_is_a_bool_or_none(value: Any) -> None:
    with pytest.raises(ValueError, match=f"async_scheduling is {value!r}; it must be True, False or None"):
        EngineConfig("m", async_scheduling=value)


def test_steps_are_counted_once_and_their_times_do_not_overlap() -> None:
    """What steps tell of themselves is the same with steps in flight, but for the step in vain at the end of a stop."""
    rng = np.random.default_rng(3)
    prompts = [random_prompt(rng, n) for n in (30, 3, 17)]

    def observed(llm: LLM) -> tuple[list[StepStats], float]:
        seen: list[StepStats] = []
        llm.engine.on_step = seen.append
        start = perf_counter()
        llm.generate(prompts, [greedy(n) for n in (6, 9, 4)], use_tqdm=False)
        return [one for one in seen if one.num_prefill_tokens + one.num_decode_tokens], perf_counter() - start

    waiting, _ = observed(fake_llm(DIRECTORY, max_num_batched_tokens=20))
    overlapped, took = observed(late_llm(max_num_batched_tokens=20)[0])
    names = ("num_prefill_tokens", "num_decode_tokens", "num_sampled", "num_context_tokens", "num_attention_pairs")
    for name in names:
        assert [getattr(one, name) for one in overlapped] == [getattr(one, name) for one in waiting], name
    assert sum(one.seconds for one in overlapped) < took
    assert all(one.execute_seconds > 0 for one in overlapped)


# --- Rank processes ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=[1, 2], ids=lambda size: f"{size} rank(s)")
def processes(request: pytest.FixtureRequest) -> Iterator[LLM]:
    options: dict[str, Any] = {"num_kvcache_blocks": 14, "kvcache_block_size": B, "max_num_batched_tokens": 16}
    options |= {"tensor_parallel_size": request.param, "distributed_executor_backend": "mp", "dtype": "float32"}
    options["async_scheduling"] = True
    with LLM(DIRECTORY, seed=0, max_num_seqs=4, **options) as llm:
        yield llm


def test_rank_processes_give_what_transformers_does(processes: LLM) -> None:
    """Chunks, preemptions and prefix hits, with steps in flight."""
    llm = processes
    assert llm.engine.overlaps_steps
    rng = np.random.default_rng(7)
    shared = random_prompt(rng, 2 * B)
    prompts = [shared + random_prompt(rng, n) for n in (1, 5, 9)] + [random_prompt(rng, n) for n in (3, 30)]
    preemptions, hits = llm.engine.scheduler.num_preemptions, llm.engine.scheduler.block_manager.hit_tokens
    for _ in range(2):
        outputs = llm.generate(prompts, greedy(25), use_tqdm=False)
        for prompt, output in zip(prompts, outputs, strict=True):
            assert len(output.token_ids) == 25
            checkpoint("tied", tokenizer=True).reference.assert_greedy(prompt, output.token_ids)
    assert llm.engine.scheduler.num_preemptions > preemptions
    assert llm.engine.scheduler.block_manager.hit_tokens > hits
    llm.engine.scheduler.check()
    assert not llm.engine.has_unfinished and not any(llm.engine.scheduler.block_manager.ref_counts)


def test_rank_processes_give_what_an_engine_that_waits_does(processes: LLM) -> None:
    """Stops of every kind, penalties, bad words, logprobs, several completions, aborts."""
    alone = kit.make_llm(DIRECTORY)
    rng = np.random.default_rng(8)
    prompts = [random_prompt(rng, int(n)) for n in rng.integers(1, 20, 12)]
    drafts = [output.outputs[0] for output in alone.generate(prompts, greedy(12), use_tqdm=False)]
    params = [
        SamplingParams(
            temperature=[0.0, 0.9][i % 2],
            seed=i,
            max_tokens=int(rng.integers(2, 12)),
            ignore_eos=i % 3 > 0,
            n=1 + (i % 5 == 0 and i % 2),
            repetition_penalty=1.3 if i % 4 == 0 else 1.0,
            stop_token_ids=draft.token_ids[5:6] if i % 4 == 1 else [],
            stop=[draft.text[6:7]] if i % 4 == 2 and draft.text[6:7] else [],
            bad_words=[kit.byte_tokenizer().decode(draft.token_ids[2:3])] if i % 4 == 3 else [],
            logprobs=2 if i % 3 == 1 else None,
        )
        for i, draft in enumerate(drafts)
    ]
    expected = alone.generate(prompts, params, use_tqdm=False)
    engine = processes.engine
    bystanders = engine.add_requests([[1, 2], [3]], greedy(40))
    requests = engine.add_requests(prompts, params)
    for num_steps in range(1, 10_000):
        engine.step()
        if num_steps == 5:
            engine.abort(bystanders)
        if not engine.has_unfinished:
            break
    for request, of_waiting in zip(requests, expected, strict=True):
        for one, other in zip(request.output().outputs, of_waiting.outputs, strict=True):
            assert (one.token_ids, one.text, one.finish_reason) == (other.token_ids, other.text, other.finish_reason)
            assert (one.logprobs is None) == (other.logprobs is None)
    assert any(output.outputs[0].finish_reason == "stop" for output in expected)
    engine.scheduler.check()
    assert not any(engine.scheduler.block_manager.ref_counts)
