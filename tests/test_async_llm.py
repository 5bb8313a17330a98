"""`AsyncLLM`: every stream equals the offline answer, whoever reads when; leaving, cancelling and aborting free all
that a request held; the queue is bounded and first come is first served; a dead engine fails everybody at once.

Most tests run over ranks without a model, whose steps wait at a gate: what happens between two steps is decided, not
timed.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import os
import signal
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import kit
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit import checkpoint, greedy, hashed_token, make_llm, random_prompt

from nanoinfer import (
    AsyncLLM,
    EngineDeadError,
    QueueFullError,
    RequestFailedError,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
)
from nanoinfer.config import EngineConfig, ModelConfig, SchedulerConfig
from nanoinfer.engine import llm_engine, output_processor
from nanoinfer.engine.stats import IterationStats
from nanoinfer.executor.multiproc import MultiprocExecutor
from nanoinfer.step import KVCacheCapacity

B = 8
OPTIONS: dict[str, Any] = {"num_kvcache_blocks": 64, "kvcache_block_size": B, "dtype": "float32", "seed": 0}
CUMULATIVE, DELTA, FINAL_ONLY = RequestOutputKind


class GatedRanks(kit.FakeRanks):
    """Each step waits for a permit."""

    def __init__(self, config: EngineConfig, model_config: ModelConfig, model_dir: Path, seed: int) -> None:
        self.engine_config = config
        self.gate = threading.Semaphore(0)
        self.is_open = False
        self.has_begun = threading.Semaphore(0)
        self.fault: BaseException | None = None

    def capacity(self) -> KVCacheCapacity:
        config = self.engine_config
        assert config.num_kvcache_blocks is not None and config.kvcache_block_size is not None
        return KVCacheCapacity(
            config.num_kvcache_blocks,
            config.kvcache_block_size,
            1,
            config.max_num_batched_tokens or 1024,
            "cpu",
            "float32",
        )

    def allocate(self, limits: SchedulerConfig) -> None:
        super().__init__(limits)
        self.on_step = self._wait

    def _wait(self, plan: Any) -> None:
        self.has_begun.release()
        if not self.is_open:
            assert self.gate.acquire(timeout=30)
        if self.fault is not None:
            raise self.fault

    def open(self) -> None:
        self.is_open = True
        self.gate.release()


class Apart(GatedRanks, kit.LateRanks):
    """With the next step submitted while one waits."""


@contextmanager
def gated(apart: bool = False, tokenizer: bool = False, **options: Any) -> Iterator[tuple[AsyncLLM, GatedRanks]]:
    directory = checkpoint("tied", tokenizer=tokenizer).directory
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llm_engine, "UniprocExecutor", Apart if apart else GatedRanks)
        defaults = {**OPTIONS, "async_scheduling": apart}
        llm = AsyncLLM(directory, distributed_executor_backend="uni", **{**defaults, **options})
    ranks = llm._engine.executor
    assert isinstance(ranks, GatedRanks)
    try:
        yield llm, ranks
    finally:
        ranks.open()
        llm._stop()
    assert not llm._loop._thread.is_alive()


def run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(main, 60))


async def until(condition: Callable[[], bool]) -> None:
    """For what another thread is about to do; `run` has a deadline."""
    while not condition():
        await asyncio.sleep(0.001)


async def collect(stream: AsyncIterator[RequestOutput]) -> list[RequestOutput]:
    return [output async for output in stream]


def expected_ids(prompt: list[int], count: int) -> list[int]:
    ids = list(prompt)
    for _ in range(count):
        ids.append(hashed_token(ids))
    return ids[len(prompt) :]


async def assert_idle(llm: AsyncLLM) -> None:
    """Nothing is left of any request."""
    await llm.check_health()  # behind all commands that were given before
    kit_engine = llm._engine
    kit_engine.scheduler.check()
    assert not kit_engine.has_unfinished and not llm._loop._live and not llm._loop._mailboxes
    assert not any(kit_engine.scheduler.block_manager.ref_counts)
    stats = llm.stats()
    assert (stats.num_running, stats.num_waiting, stats.kv_cache_usage) == (0, 0, 0.0)


# --- Equality with the offline API -------------------------------------------------------------------------------


async def assert_equals_offline(llm: AsyncLLM, params_options: dict[str, Any]) -> None:
    model = checkpoint("tied", tokenizer=True)
    offline = make_llm(model.directory, num_kvcache_blocks=200)
    rng = np.random.default_rng(0)
    prompts = [random_prompt(rng, int(length)) for length in rng.integers(1, 30, 24)]
    params = [
        SamplingParams(
            n=i % 3 + 1, seed=i, max_tokens=int(rng.integers(1, 20)), output_kind=list(RequestOutputKind)[i % 3],
            logprobs=[None, 2][i % 2], prompt_logprobs=[None, None, 1, None][i % 4], stop=[[], ["e", "a"]][i % 5 == 0],
            **params_options,
        )
        for i in range(24)
    ]  # fmt: skip
    expected = offline.generate(prompts, params)
    streams = [llm.generate(prompt, one, f"r{i}") for i, (prompt, one) in enumerate(zip(prompts, params, strict=True))]
    answers = await asyncio.gather(*map(collect, streams))
    for i, (outputs, wanted, one) in enumerate(zip(answers, expected, params, strict=True)):
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
        assert all(output.request_id == f"r{i}" and output.prompt_token_ids == prompts[i] for output in outputs)
        assert (outputs[0].prompt_logprobs is None) == (one.prompt_logprobs is None)
        if one.output_kind is DELTA:
            assert all(output.prompt_logprobs is None for output in outputs[1:])
        for completion in wanted.outputs:
            parts = [part for output in outputs for part in output.outputs if part.index == completion.index]
            if one.output_kind is DELTA:
                assert [i for part in parts for i in part.token_ids] == completion.token_ids
                assert "".join(part.text for part in parts) == completion.text
                assert all(part.token_ids or part.finish_reason for part in parts), "a delta of nothing"
                if one.logprobs is not None:
                    entries = [entry for part in parts for entry in part.logprobs or []]
                    assert [list(entry) for entry in entries] == [list(entry) for entry in completion.logprobs or []]
            else:
                assert len(outputs[-1].outputs) == one.n
                assert (parts[-1].token_ids, parts[-1].text) == (completion.token_ids, completion.text)
                assert [list(entry) for entry in parts[-1].logprobs or []] == [
                    list(entry) for entry in completion.logprobs or []
                ]
                assert all(completion.text.startswith(part.text) for part in parts)
                if one.logprobs is not None:
                    assert parts[-1].cumulative_logprob == pytest.approx(completion.cumulative_logprob, abs=1e-3)
            if one.output_kind is FINAL_ONLY:
                assert len(outputs) == 1
            reasons = [(part.finish_reason, part.stop_reason) for part in parts]
            assert reasons[-1] == (completion.finish_reason, completion.stop_reason)
    await assert_idle(llm)
    stats = llm.stats()
    assert stats.prompt_tokens == sum(map(len, prompts))
    assert stats.generation_tokens == sum(len(c.token_ids) for output in expected for c in output.outputs)
    assert sum(stats.finished.values()) == sum(one.n for one in params)


@pytest.mark.parametrize("options", [{}, {"max_num_seqs": 3}, {"num_kvcache_blocks": 10}], ids=str)
def test_streams_of_every_kind_equal_the_offline_answers(options: dict[str, Any]) -> None:
    async def main() -> None:
        directory = checkpoint("tied", tokenizer=True).directory
        llm = AsyncLLM(directory, distributed_executor_backend="uni", **{**OPTIONS, **options})
        await assert_equals_offline(llm, {})
        await llm.shutdown()

    run(main())


@pytest.mark.parametrize("size", [1, 2])
def test_streams_equal_the_offline_answers_over_rank_processes_and_a_killed_rank_ends_them_all(size: int) -> None:
    async def main() -> None:
        llm = AsyncLLM(checkpoint("tied", tokenizer=True).directory, tensor_parallel_size=size, **OPTIONS)
        executor = llm._engine.executor
        assert isinstance(executor, MultiprocExecutor) and len(executor._ranks) == size
        await assert_equals_offline(llm, {})
        streams = [llm.generate([i], greedy(250, output_kind=DELTA)) for i in range(8)]
        await asyncio.gather(*(anext(stream) for stream in streams))
        os.kill(executor._ranks[-1].process.pid, signal.SIGKILL)
        results = await asyncio.gather(*map(collect, streams), return_exceptions=True)
        assert all(isinstance(result, EngineDeadError) and "SIGKILL" in str(result) for result in results)
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            await llm.check_health()
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            llm.generate([1])
        assert llm.errored
        await llm.shutdown()

    run(main())


def test_a_rank_that_dies_while_nothing_runs_is_noticed() -> None:
    async def main() -> None:
        llm = AsyncLLM(checkpoint("tied").directory, **OPTIONS)
        await llm.check_health()
        executor = llm._engine.executor
        assert isinstance(executor, MultiprocExecutor)
        os.kill(executor._ranks[0].process.pid, signal.SIGKILL)
        executor._ranks[0].process.wait(30)
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            await llm.check_health()
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            await llm.check_health()
        await llm.shutdown()

    run(main())


# --- Slow readers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_who_reads_late_gets_all_in_one_piece_and_stops_nobody(kind: RequestOutputKind, apart: bool) -> None:
    async def main() -> None:
        with gated(apart) as (llm, ranks):
            ranks.open()
            slow = llm.generate([1, 2], greedy(20, output_kind=kind, n=2))
            # Another one comes to its end while nobody reads the first.
            assert (await collect(llm.generate([3], greedy(60))))[-1].outputs[0].token_ids == expected_ids([3], 60)
            (output,) = await collect(slow)
            assert output.finished and len(output.outputs) == 2
            assert all(part.token_ids == expected_ids([1, 2], 20) for part in output.outputs)
            await assert_idle(llm)

    run(main())


def test_steps_go_on_while_the_event_loop_does_not() -> None:
    """The event loop is blocked until the engine has finished a request."""

    async def main() -> None:
        with gated() as (llm, ranks):
            ranks.open()
            stream = llm.generate([1], greedy(50, output_kind=DELTA))
            for _ in range(50):
                assert ranks.has_begun.acquire(timeout=30)
            (output,) = [output async for output in stream][-1:]
            assert output.finished

    run(main())


def test_each_token_is_told_before_the_next_step_is_over() -> None:
    """Step by step: after each permit comes one token, also when telling is left to the time of the next step."""

    async def main(apart: bool) -> None:
        with gated(apart) as (llm, ranks):
            stream = llm.generate([7], greedy(6, output_kind=DELTA))
            ids: list[int] = []
            for _ in range(6):
                ranks.gate.release()
                output = await asyncio.wait_for(anext(stream), 30)
                ids += output.outputs[0].token_ids
                assert len(output.outputs[0].token_ids) == 1
            assert ids == expected_ids([7], 6) and output.finished

    run(main(False))
    run(main(True))


# --- Leaving -----------------------------------------------------------------------------------------------------


async def leave(how: str, llm: AsyncLLM, stream: Any) -> None:
    if how == "close":
        await stream.aclose()
        assert await collect(stream) == []
    elif how == "drop":
        pass  # the caller has deleted it
    elif how == "cancel":
        task = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await collect(stream) == []


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("how", ["close", "drop", "cancel"])
@pytest.mark.parametrize("moment", ["waiting", "running", "after some tokens"])
def test_a_stream_that_is_left_frees_all_that_its_request_held(how: str, moment: str, n: int, apart: bool) -> None:
    async def main() -> None:
        with gated(apart, max_num_seqs=3 if moment != "waiting" else 1) as (llm, ranks):
            bystander = llm.generate([5], greedy(8))
            await until(lambda: llm.stats().num_running == 1)
            stream = llm.generate(list(range(2 * B)), greedy(200, n=n))
            if moment == "after some tokens":
                for _ in range(5):
                    ranks.gate.release()
                while len((await anext(stream)).outputs[0].token_ids) < 2:
                    pass
            if how == "drop":
                del stream
                gc.collect()
                stream = None
            elif how == "cancel" and moment == "after some tokens":
                await until(lambda: ranks.gate._value == 0)
                await asyncio.sleep(0)
                while stream._mailbox.can_be_read:
                    await anext(stream)
            await leave(how, llm, stream)
            ranks.open()
            assert (await collect(bystander))[-1].outputs[0].token_ids == expected_ids([5], 8)
            await assert_idle(llm)
            stats = llm.stats()
            assert stats.finished["abort"] == n and stats.finished["length"] == 1
            assert stats.generation_tokens < 50, "it went on running"

    run(main())


def test_abort_ends_the_iterator_with_what_there_is() -> None:
    async def main() -> None:
        with gated() as (llm, ranks):
            stream = llm.generate([1], greedy(200, n=2), "mine")
            task = asyncio.ensure_future(collect(stream))
            for _ in range(3):
                ranks.gate.release()
            await until(lambda: llm.stats().generation_tokens >= 4)
            ranks.gate.release()
            await llm.abort("nobody's")
            ranks.gate.release()
            await llm.abort("mine")
            assert llm.stats().kv_cache_usage == 0, "abort returns when the blocks are free"
            last = (await task)[-1]
            assert last.finished and [part.finish_reason for part in last.outputs] == ["abort", "abort"]
            for part in last.outputs:
                assert 2 <= len(part.token_ids) < 200
                assert part.token_ids == expected_ids([1], len(part.token_ids))
            await assert_idle(llm)

    run(main())


def test_requests_of_an_event_loop_that_is_gone_are_aborted() -> None:
    with gated() as (llm, ranks):
        kept: list[Any] = []

        async def first() -> None:
            kept.append(llm.generate([1], greedy(200)))

        async def second() -> None:
            ranks.open()
            assert (await collect(llm.generate([2], greedy(20))))[-1].finished
            await until(lambda: not llm._loop._mailboxes)
            await assert_idle(llm)

        asyncio.run(first())
        run(second())


# --- Refusals ----------------------------------------------------------------------------------------------------


def test_bad_requests_raise_at_the_call_and_queue_nothing() -> None:
    async def main() -> None:
        with gated(max_model_len=32) as (llm, ranks):
            for prompt, params, options, what in (
                ([], None, {}, "empty"),
                ([1] * 40, None, {}, "40 tokens"),
                ("text", None, {}, "no tokenizer"),
                ([1], SamplingParams(logit_bias={400: 1.0}), {}, "logit_bias"),
                ([1], SamplingParams(bad_words=["a"]), {}, "bad_words"),
                ([1], None, {"cache_salt": ""}, "cache_salt"),
                ({"prompt": 3}, None, {}, "must be a string"),
                ([1], SamplingParams(n=2), {"grammar": threading.Lock()}, "copied"),
            ):
                with pytest.raises(ValueError, match=what):
                    llm.generate(prompt, params, **options)
            await assert_idle(llm)
            first = llm.generate([1], greedy(3), "a")
            with pytest.raises(ValueError, match="'a'"):
                llm.generate([1], greedy(3), "a")
            ranks.open()
            assert (await collect(first))[-1].finished
            assert (await collect(llm.generate([1], greedy(3), "a")))[-1].finished, "the id is free again"

    run(main())


# --- Texts -------------------------------------------------------------------------------------------------------


class GatedTokenizer:
    """Each text waits for a permit, in whatever thread it is tokenized."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.gate, self.has_begun = threading.Semaphore(0), threading.Semaphore(0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __call__(self, text: str, **options: Any) -> Any:
        self.has_begun.release()
        assert self.gate.acquire(timeout=30)
        return self._tokenizer(text, **options)


@contextmanager
def gated_texts(**options: Any) -> Iterator[tuple[AsyncLLM, GatedTokenizer]]:
    with gated(tokenizer=True, **options) as (llm, ranks):
        ranks.open()
        tokenizer = GatedTokenizer(llm.tokenizer)
        llm._engine.input_processor.tokenizer = tokenizer  # type: ignore[assignment]
        try:
            yield llm, tokenizer
        finally:
            tokenizer.gate.release(100)


def test_streams_go_on_while_a_text_is_tokenized_and_texts_keep_their_order() -> None:
    """The first text is not let through before another request has ended; nor are words that are to be banned."""

    async def main() -> None:
        with gated_texts(max_num_seqs=1) as (llm, tokenizer):
            order: list[str] = []

            async def read(stream: Any) -> RequestOutput:
                outputs = [await anext(stream)]
                order.append(stream.request_id)
                return [*outputs, *await collect(stream)][-1]

            banned = greedy(3, bad_words=["a"])
            streams = [
                llm.generate("a long text", greedy(3), "first"),
                llm.generate({"prompt": "another"}, greedy(3), "second", cache_salt="x"),
                llm.generate([1, 2], banned, "third"),
            ]
            tasks = [asyncio.ensure_future(read(stream)) for stream in streams]
            assert (await collect(llm.generate([3], greedy(30))))[-1].outputs[0].token_ids == expected_ids([3], 30)
            assert not order
            tokenizer.gate.release(100)
            outputs = await asyncio.gather(*tasks)
            assert order == ["first", "second", "third"]
            assert llm.tokenizer is not None
            for text, output in zip(("a long text", "another"), outputs, strict=False):
                prompt = llm.tokenizer(text)["input_ids"]
                assert (output.prompt, output.prompt_token_ids) == (text, prompt)
                assert output.outputs[0].token_ids == expected_ids(prompt, 3)
            await assert_idle(llm)

    run(main())


def test_texts_in_the_tokenizer_count_as_waiting_and_what_is_wrong_with_them_is_told_by_the_iterator() -> None:
    async def main() -> None:
        with gated_texts(max_model_len=8, max_waiting=2) as (llm, tokenizer):
            streams = [llm.generate(text, greedy(1), text[:1]) for text in ("", "long " * 30)]
            with pytest.raises(QueueFullError):
                llm.generate("b", greedy(1))
            tokenizer.gate.release(100)
            for stream, what in zip(streams, ("empty", "at most 7"), strict=True):
                with pytest.raises(ValueError, match=what):
                    await collect(stream)
            assert (await collect(llm.generate("b", greedy(1), "l")))[-1].finished
            await assert_idle(llm)

    run(main())


def test_log_probabilities_of_prompts_are_made_off_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    directory = checkpoint("tied").directory
    prompt, params = [5, 6, 7, 8, 9], greedy(3, prompt_logprobs=2)
    expected = make_llm(directory, num_kvcache_blocks=200).generate(prompt, params)[0].prompt_logprobs
    threads: set[int] = set()
    make = output_processor._logprob_dict

    def watched(*arguments: Any) -> Any:
        threads.add(threading.get_ident())
        return make(*arguments)

    async def main() -> None:
        monkeypatch.setattr(output_processor, "_logprob_dict", watched)
        llm = AsyncLLM(directory, distributed_executor_backend="uni", **OPTIONS)
        for kind in RequestOutputKind:
            outputs = await collect(llm.generate(prompt, dataclasses.replace(params, output_kind=kind)))
            assert outputs[0].prompt_logprobs is not None and expected is not None
            assert [entry and list(entry) for entry in outputs[0].prompt_logprobs] == [
                entry and list(entry) for entry in expected
            ]
        await llm.shutdown()

    run(main())
    assert threads and threading.get_ident() not in threads


@pytest.mark.parametrize("how", ["close", "drop", "cancel", "abort", "death", "shutdown"])
def test_a_request_can_be_left_while_its_text_is_tokenized(how: str) -> None:
    async def main() -> None:
        with gated_texts(max_num_seqs=1) as (llm, tokenizer):
            stream: Any = llm.generate("a text", greedy(50, n=2), "mine")
            reading = asyncio.ensure_future(collect(llm.generate("another", greedy(5))))
            assert await asyncio.to_thread(tokenizer.has_begun.acquire, timeout=30)
            if how == "abort":
                await llm.abort("mine")
            elif how == "death":
                llm._engine.executor.fault = EngineDeadError("gone")  # type: ignore[attr-defined]
                ended = collect(llm.generate([1], greedy(3)))
                for result in await asyncio.gather(ended, reading, collect(stream), return_exceptions=True):
                    assert isinstance(result, EngineDeadError)
                return
            elif how == "shutdown":
                ending = asyncio.ensure_future(llm.shutdown())
                for result in await asyncio.gather(reading, collect(stream), return_exceptions=True):
                    assert isinstance(result, EngineDeadError) and "shut" in str(result)
                await ending
                return
            elif how == "drop":
                del stream
                gc.collect()
                stream = None
            await leave(how, llm, stream)
            tokenizer.gate.release(100)
            assert (await reading)[-1].finished
            if how == "abort":
                (output,) = [output async for output in stream][-1:]
                assert [part.finish_reason for part in output.outputs] == ["abort", "abort"] and output.finished
            await assert_idle(llm)
            assert llm.stats().finished["abort"] == 2 and llm.stats().generation_tokens == 5

    run(main())


@pytest.mark.parametrize("max_waiting", [0, -1, True, 1.5])
def test_a_queue_has_room_for_at_least_one(max_waiting: Any) -> None:
    with pytest.raises(ValueError, match="max_waiting"):
        AsyncLLM(checkpoint("tied").directory, max_waiting=max_waiting)


def test_a_full_queue_refuses_and_takes_again_when_there_is_room() -> None:
    async def main() -> None:
        with gated(max_num_seqs=1, max_waiting=3) as (llm, ranks):
            running = llm.generate([1], greedy(3))
            await until(lambda: llm.stats().num_running == 1)
            waiting = [llm.generate([i], greedy(3)) for i in range(2, 5)]
            for _ in range(2):
                with pytest.raises(QueueFullError, match="3 requests wait"):
                    llm.generate([9], greedy(3))
            await waiting.pop().aclose()
            ranks.gate.release()
            await until(lambda: len(llm._loop._mailboxes) == 3)
            waiting.append(llm.generate([6], greedy(3)))
            with pytest.raises(QueueFullError):
                llm.generate([9], greedy(3))
            ranks.open()
            for prompt, stream in zip((1, 2, 3, 6), (running, *waiting), strict=True):
                assert (await collect(stream))[-1].outputs[0].token_ids == expected_ids([prompt], 3)
            await assert_idle(llm)

    run(main())


def test_first_come_is_first_served() -> None:
    async def main() -> None:
        with gated(max_num_seqs=3, max_num_batched_tokens=8) as (llm, ranks):
            order: list[int] = []

            async def read(i: int, stream: AsyncIterator[RequestOutput]) -> None:
                await anext(stream)
                order.append(i)
                await collect(stream)

            streams = [llm.generate([i] * (i % 5 + 1), greedy(4)) for i in range(20)]
            tasks = [asyncio.ensure_future(read(i, stream)) for i, stream in enumerate(streams)]
            ranks.open()
            await asyncio.gather(*tasks)
            assert order == sorted(order)

    run(main())


# --- Death and shutdown ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error", [EngineDeadError("rank 1 is gone"), RuntimeError("rank 1 is gone"), MemoryError("rank 1 is gone")]
)
def test_a_step_that_raises_fails_every_request_at_once(error: BaseException) -> None:
    async def main() -> None:
        with gated(max_num_seqs=2) as (llm, ranks):
            kinds = list(RequestOutputKind)
            streams = [llm.generate([i], greedy(20, output_kind=kinds[i % 3])) for i in range(9)]
            tasks = [asyncio.ensure_future(collect(stream)) for stream in streams[:7]]
            health = asyncio.ensure_future(llm.check_health())
            for _ in range(3):
                ranks.gate.release()
            await until(lambda: llm.stats().generation_tokens >= 2)
            ranks.fault = error
            asking = asyncio.ensure_future(llm.check_health())
            ranks.open()
            results = await asyncio.gather(*tasks, asking, return_exceptions=True)
            assert all(isinstance(result, EngineDeadError) and "rank 1 is gone" in str(result) for result in results)
            assert len({id(result) for result in results}) == len(results)
            with pytest.raises(EngineDeadError):
                await collect(streams[7])
            del streams[8]  # nobody ever asked for it
            await asyncio.gather(health, return_exceptions=True)
            for _ in range(2):
                with pytest.raises(EngineDeadError, match="rank 1 is gone"):
                    llm.generate([1])
                with pytest.raises(EngineDeadError, match="rank 1 is gone"):
                    await llm.check_health()
            assert llm.errored and not llm._loop._mailboxes
            await llm.abort("anything")
            llm.stats()
            await llm.shutdown()
            await llm.shutdown()

    run(main())


@pytest.mark.parametrize("what", ["raises in fill_mask", "does not accept"])
@pytest.mark.parametrize("n", [1, 2])
def test_a_grammar_that_fails_fails_its_own_request_alone(what: str, n: int) -> None:
    from test_choice import Faulty

    class Widened(Faulty):
        def __init__(self) -> None:
            super().__init__(what)
            self.sets, self.vocab_size = [list(range(320))], 320

    async def main() -> None:
        with gated() as (llm, ranks):
            ranks.open()
            other = llm.generate([2], greedy(30))
            with pytest.raises(RequestFailedError):
                await collect(llm.generate([1], greedy(30, n=n), grammar=Widened()))
            assert (await collect(other))[-1].outputs[0].token_ids == expected_ids([2], 30)
            await until(lambda: not llm._loop._mailboxes)
            await assert_idle(llm)
            stats = llm.stats()
            assert stats.finished["error"] >= 1 and stats.finished["error"] + stats.finished["abort"] == n

    run(main())


@pytest.mark.parametrize("timeout", [0, 30])
def test_shutdown_drains_or_aborts_and_refuses_what_comes_after(timeout: float) -> None:
    async def main() -> None:
        with gated() as (llm, ranks):
            stream = llm.generate([1], greedy(40))
            task = asyncio.ensure_future(collect(stream))
            await until(lambda: llm.stats().num_running == 1)
            ending = asyncio.ensure_future(llm.shutdown(timeout))
            await asyncio.sleep(0)
            with pytest.raises(EngineDeadError, match="shut"):
                llm.generate([1])
            if not timeout:
                await until(lambda: not llm._loop._commands.empty())
            ranks.open()
            await ending
            part = (await task)[-1].outputs[0]
            assert part.finish_reason == ("length" if timeout else "abort")
            assert part.token_ids == expected_ids([1], len(part.token_ids))
            assert (len(part.token_ids) == 40) == bool(timeout)
            assert not llm._loop._thread.is_alive() and not any(llm._engine.scheduler.block_manager.ref_counts)

    run(main())


# --- Statistics --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("apart", [False, True])
def test_observations_add_up(apart: bool) -> None:
    async def main() -> None:
        with gated(apart, max_num_seqs=4, num_kvcache_blocks=12, max_num_batched_tokens=16) as (llm, ranks):
            seen: list[IterationStats] = []

            def faulty(iteration: IterationStats) -> None:
                raise RuntimeError("a listener that fails harms nobody")

            llm.stats_listeners += [faulty, seen.append]
            ranks.open()
            rng = np.random.default_rng(1)
            prompts = [random_prompt(rng, int(length)) for length in rng.integers(1, 40, 10)]
            params = [greedy(4 * i + 1, n=i % 2 + 1, output_kind=list(RequestOutputKind)[i % 3]) for i in range(10)]
            streams = [llm.generate(prompt, one) for prompt, one in zip(prompts, params, strict=True)]
            await asyncio.gather(*map(collect, streams))
            await assert_idle(llm)
            num_sequences, num_tokens = sum(one.n for one in params), sum(one.n * one.max_tokens for one in params)
            firsts = [value for iteration in seen for value in iteration.time_to_first_token]
            gaps = [value for iteration in seen for value in iteration.inter_token_latency]
            queued = [value for iteration in seen for value in iteration.queue_time]
            ended = [one for iteration in seen for one in iteration.finished]
            assert (len(firsts), len(queued), len(gaps)) == (10, 10, num_tokens - num_sequences)
            assert all(value >= 0 for value in firsts + gaps + queued) and max(firsts) > min(firsts) > 0
            assert len(ended) == num_sequences
            for one in ended:
                assert one.finish_reason == "length" and one.num_generation_tokens == one.max_tokens
                assert one.queue_time is not None and one.prefill_time is not None and one.decode_time is not None
                parts = (one.queue_time, one.prefill_time, one.decode_time)
                assert min(parts) >= 0 and sum(parts) == pytest.approx(one.e2e_latency, abs=1e-6)
            stats = llm.stats()
            assert (
                stats.prompt_tokens == sum(iteration.num_prompt_tokens for iteration in seen) == sum(map(len, prompts))
            )
            assert stats.generation_tokens == sum(iteration.num_generation_tokens for iteration in seen) == num_tokens
            assert stats.finished == {"stop": 0, "length": num_sequences, "abort": 0, "error": 0}
            assert stats.num_preemptions == llm._engine.scheduler.num_preemptions > 0
            assert stats.prefix_cache_queries >= stats.prompt_tokens and stats.prefix_cache_hits > 0

    run(main())


# --- Load --------------------------------------------------------------------------------------------------------


async def read(
    llm: AsyncLLM, stream: Any, fate: float, kind: RequestOutputKind, rng: np.random.Generator, found: list[list[int]]
) -> None:
    """Some leave, in one of several ways; some are slow."""
    num_read = 0
    async for output in stream:
        num_read += 1
        for part in output.outputs:
            found[part.index] = (found[part.index] if kind is DELTA else []) + part.token_ids
        if 0.2 <= fate < 0.3 and num_read == 2:
            await stream.aclose()
        if 0.3 <= fate < 0.4 and num_read == 2:
            await llm.abort(stream.request_id)
        if 0.4 <= fate < 0.5:
            break
        await asyncio.sleep(rng.random() * 0.001)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32), apart=st.booleans(), num_blocks=st.integers(4, 40), max_num_seqs=st.integers(1, 12))
def test_random_aborts_under_load_lose_and_mix_up_nothing(
    seed: int, apart: bool, num_blocks: int, max_num_seqs: int
) -> None:
    async def client(llm: AsyncLLM, rng: np.random.Generator) -> None:
        for _ in range(int(rng.integers(1, 4))):
            prompt = random_prompt(rng, int(rng.integers(1, 3 * B)))
            count, n, kind = int(rng.integers(1, 9)), int(rng.integers(1, 4)), list(RequestOutputKind)[rng.integers(3)]
            stream = llm.generate(prompt, greedy(count, n=n, output_kind=kind))
            fate = rng.random()
            found: list[list[int]] = [[] for _ in range(n)]
            reading = read(llm, stream, fate, kind, rng, found)
            try:
                await asyncio.wait_for(reading, rng.random() * 0.004 if fate < 0.2 else None)
            except asyncio.TimeoutError:
                assert fate < 0.2
            for ids in found:
                assert ids == expected_ids(prompt, len(ids)), "another request's tokens"
                assert fate < 0.5 or len(ids) == count, "tokens are lost"

    async def main() -> None:
        options = {"num_kvcache_blocks": num_blocks, "max_num_seqs": max_num_seqs, "max_num_batched_tokens": 24}
        with gated(apart, **options) as (llm, ranks):
            ranks.open()
            rngs = np.random.default_rng(seed).spawn(12)
            await asyncio.gather(*(client(llm, rng) for rng in rngs))
            gc.collect()
            await assert_idle(llm)
            stats = llm.stats()
            assert stats.finished["error"] == stats.finished["stop"] == 0

    run(main())
