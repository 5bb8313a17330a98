"""The scheduler's laws, over ranks without a model: whatever happens to a sequence, its tokens are those that it gets
alone, and budgets, order and the pool hold after every step.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
from kit import FakeRanks, LateRanks, hashed_token

from nanoinfer import SamplingParams
from nanoinfer.config import SchedulerConfig
from nanoinfer.engine import block_manager
from nanoinfer.engine.scheduler import Scheduler
from nanoinfer.engine.sequence import FinishReason, Sequence, SequenceStatus
from nanoinfer.executor.base import StepHandle
from nanoinfer.step import SchedulerOutput, StepResult

B = 4
EOS = frozenset({7})


def config(**options: Any) -> SchedulerConfig:
    defaults: dict[str, Any] = {
        "max_num_seqs": 8, "max_num_batched_tokens": 32, "max_model_len": 64, "num_blocks": 32, "block_size": B,
    }  # fmt: skip
    return SchedulerConfig(**{**defaults, **options})


def expected(prompt: list[int], params: SamplingParams, max_tokens: int) -> tuple[list[int], FinishReason, Any]:
    """What a sequence gives when it has the machine to itself: (output, reason, stop_reason)."""
    ids = list(prompt)
    while True:
        ids.append(hashed_token(ids))
        output = ids[len(prompt) :]
        if len(output) >= params.min_tokens:
            if ids[-1] in EOS and not params.ignore_eos:
                return output, FinishReason.STOP, None
            if ids[-1] in params.stop_token_ids:
                return output, FinishReason.STOP, ids[-1]
        if len(output) == max_tokens:
            return output, FinishReason.LENGTH, None


class Driver:
    """A scheduler and its ranks, checked after every step.

    ahead: how many steps stay in flight between two calls of `step`.
    """

    def __init__(self, limits: SchedulerConfig, ahead: int = 0) -> None:
        self.limits = limits
        self.scheduler = Scheduler(limits)
        self.ahead = ahead
        self.ranks = LateRanks(limits) if ahead else FakeRanks(limits)
        self.in_flight: deque[tuple[SchedulerOutput, StepHandle]] = deque()
        self.num_sequences = 0
        self.changed: list[Sequence] = []
        self.plans: list[SchedulerOutput] = []

    def sequence(self, prompt: list[int], params: SamplingParams | None = None, **options: Any) -> Sequence:
        params = params or SamplingParams(max_tokens=8, ignore_eos=True)
        room = self.limits.max_model_len - len(prompt)
        seq = Sequence(self.num_sequences, list(prompt), params, 0, min(params.max_tokens, room), EOS, **options)
        self.num_sequences += 1
        return seq

    def add(self, prompt: list[int], params: SamplingParams | None = None, **options: Any) -> Sequence:
        seq = self.sequence(prompt, params, **options)
        self.scheduler.add(seq)
        return seq

    def step(self) -> SchedulerOutput:
        """One step. Whatever raises, `recover` is called, as the engine does."""
        scheduler = self.scheduler
        decoding = {
            s.seq_id
            for s in scheduler.running.values()
            if s.num_computed_tokens + s.num_inflight_tokens == s.num_tokens + s.num_output_placeholders - 1
            and (s.num_output_tokens + s.num_output_placeholders < s.max_tokens and not s.is_finished)
        }
        self.changed = []
        try:
            num_preemptions = scheduler.num_preemptions
            plan = scheduler.schedule()
            self.plans.append(plan)
            assert not plan.new or scheduler.num_preemptions == num_preemptions, (
                "blocks were taken for a newer sequence"
            )
            self._check_plan(plan, decoding)
            self.in_flight.append((plan, self.ranks.submit(plan)))
            self.take_results(self.ahead if plan.num_scheduled_tokens and not scheduler.is_short else 0)
        except RuntimeError:
            self.in_flight.clear()
            scheduler.recover()
            scheduler.check()
            raise
        return plan

    def take_results(self, num_left: int = 0) -> None:
        """Until only so many steps are in flight."""
        while len(self.in_flight) > num_left:
            plan, handle = self.in_flight.popleft()
            self.changed += self.scheduler.update(plan, handle.result())
            self._check()
        self._check()

    def _check(self) -> None:
        scheduler, limits = self.scheduler, self.limits
        scheduler.check()
        assert scheduler.block_manager.num_blocks == limits.num_blocks
        used = {block for seq in scheduler.running.values() for block in seq.block_table}
        assert scheduler.block_manager.num_free_blocks == limits.num_blocks - len(used)

    def _check_plan(self, plan: SchedulerOutput, decoding: set[int]) -> None:
        scheduler, limits = self.scheduler, self.limits
        assert plan.num_tokens <= limits.max_num_batched_tokens
        assert len(plan.num_scheduled_tokens) <= limits.max_num_seqs
        assert len(scheduler.running) <= limits.max_num_seqs
        introduced = [new.seq_id for new in plan.new]
        assert len(set(introduced)) == len(introduced)
        assert set(introduced) <= set(plan.num_scheduled_tokens)
        assert not set(introduced) & set(plan.new_block_ids), "blocks of a new sequence are sent twice"
        assert not set(plan.num_scheduled_tokens) & {seq.seq_id for seq in scheduler.waiting}
        assert set(plan.num_scheduled_tokens) <= set(scheduler.running)
        assert set(plan.new_block_ids) <= set(plan.num_scheduled_tokens)
        for seq_id in decoding & set(scheduler.running):
            is_served = plan.num_scheduled_tokens.get(seq_id) == 1
            assert is_served or scheduler.is_short, "a decoding sequence is left out of a step"
        assert self.in_flight or not scheduler.is_short, "there is nothing to wait for"
        if not plan.num_scheduled_tokens and scheduler.sequences and not self.in_flight:
            # Nothing to do though there is work: then at least one sequence must have been given up.
            assert scheduler._ended_in_schedule, "an empty plan makes no progress"

    def run(self, max_steps: int = 10_000) -> int:
        num_steps = 0
        while self.scheduler.has_unfinished:
            self.step()
            num_steps += 1
            assert num_steps < max_steps, "no progress"
        return num_steps

    def assert_idle(self) -> None:
        assert not self.scheduler.waiting and not self.scheduler.running and not self.scheduler.sequences
        assert self.scheduler.block_manager.num_free_blocks == self.limits.num_blocks


def assert_output(seq: Sequence, prompt: list[int]) -> None:
    output, reason, stop_reason = expected(prompt, seq.params, seq.max_tokens)
    assert seq.output_token_ids == output
    assert (seq.finish_reason, seq.stop_reason) == (reason, stop_reason)


def random_params(rng: random.Random) -> SamplingParams:
    max_tokens = rng.randrange(1, 20)
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=rng.randrange(0, max_tokens + 1) if rng.random() < 0.3 else 0,
        ignore_eos=rng.random() < 0.7,
        stop_token_ids=tuple(rng.sample(range(320), 20)) if rng.random() < 0.4 else (),
        logprobs=1 if rng.random() < 0.3 else None,
    )


CONFIGS: list[dict[str, Any]] = [
    {},
    {"num_blocks": 16, "max_num_batched_tokens": 7},
    {"num_blocks": 16, "max_num_seqs": 3, "block_size": 5, "max_num_batched_tokens": 16},
    {"num_blocks": 17, "block_size": 4, "max_num_batched_tokens": 1},
    {"num_blocks": 64, "block_size": 1, "max_num_batched_tokens": 20},
    {"num_blocks": 20, "enable_prefix_caching": False},
    {"num_blocks": 4, "block_size": 16, "max_num_batched_tokens": 15},
    {"num_blocks": 16, "max_num_seqs": 1},
    {"num_blocks": 100, "max_num_seqs": 16, "max_num_batched_tokens": 3},
    {"num_blocks": 18, "block_size": 7, "max_model_len": 100, "max_num_batched_tokens": 33},
]
COLLISIONS: dict[str, Callable[[bytes, bytes, bytes], bytes] | None] = {
    "sound": None,
    "constant": lambda parent, tokens, cache_key: b"same",
    "ignores the parent": lambda parent, tokens, cache_key: tokens,
}


@pytest.mark.parametrize("hashes", COLLISIONS)
@pytest.mark.parametrize("options", CONFIGS, ids=str)
def test_no_history_changes_a_sequence_s_tokens(
    options: dict[str, Any], hashes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Arrivals, aborts, preemptions, hits and failing steps at random: every finished output is what it is alone."""
    if (broken := COLLISIONS[hashes]) is not None:
        monkeypatch.setattr(block_manager, "hash_block", broken)
    limits = config(**options)
    for ahead in (0, random.Random(f"{options}{hashes}").choice([1, 1, 2])):
        rng = random.Random(f"{options}{hashes}{ahead}")
        driver = Driver(limits, ahead)
        stems = [[rng.randrange(320) for _ in range(40)] for _ in range(3)]
        live: dict[int, tuple[Sequence, list[int]]] = {}
        num_finished = num_failed = num_forced = 0

        def fail(plan: SchedulerOutput) -> None:
            raise RuntimeError("a step fails")

        for i in range(900):
            if i < 700 and rng.random() < 0.3 and len(live) < 25:
                stem = rng.choice(stems)[: rng.randrange(0, 40)]
                longest = limits.max_model_len - 1 - len(stem)
                prompt = stem + [rng.randrange(320) for _ in range(rng.randrange(1, min(20, longest)))]
                key = rng.choice([b"", b"", b"salt"])
                seq = driver.add(prompt, random_params(rng), cache_key=key)
                live[seq.seq_id] = (seq, prompt)
            if live and rng.random() < 0.03:
                seq, _ = live.pop(rng.choice(list(live)))
                driver.scheduler.abort(seq)
                assert seq.finish_reason is FinishReason.ABORT
                assert bool(seq.block_table) == bool(seq.num_inflight_tokens), "freed under a step, or never"
                driver.scheduler.check()
            if rng.random() < 0.1:
                driver.ranks.on_step = None
                driver.changed = []
                driver.take_results()
                num_finished += collect(driver, live)
                running = list(driver.scheduler.running.values())
                while running and rng.random() < 0.5:
                    driver.scheduler.preempt(running.pop())
                    num_forced += 1
                    driver.scheduler.check()
            driver.ranks.on_step = fail if rng.random() < 0.02 else None
            try:
                driver.step()
            except RuntimeError:
                num_failed += 1
                for slot in range(0, len(driver.ranks.pool), 3):  # a broken step may have written anything
                    driver.ranks.pool[slot] = None
            num_finished += collect(driver, live)
            assert set(live) == {seq.seq_id for seq in driver.scheduler.sequences.values() if not seq.is_finished}
        driver.ranks.on_step = None
        while driver.scheduler.has_unfinished:
            driver.step()
            num_finished += collect(driver, live)
        assert not live
        driver.assert_idle()
        assert num_finished > 10 and num_failed > 3 and num_forced > 3
        assert not isinstance(driver.ranks, LateRanks) or driver.ranks.max_ahead == ahead + 1


def collect(driver: Driver, live: dict[int, tuple[Sequence, list[int]]]) -> int:
    """Checks what has just finished; returns how many that were."""
    finished = [seq for seq in dict.fromkeys(driver.changed) if seq.is_finished]
    for seq in finished:
        assert_output(seq, live.pop(seq.seq_id)[1])
        assert bool(seq.block_table) == bool(seq.num_inflight_tokens)
        if seq.params.logprobs is not None:
            assert [entry.token_ids[0] for entry in seq.logprobs] == seq.output_token_ids
    return len(finished)


def test_many_short_runs_with_random_limits_end_with_a_whole_pool() -> None:
    """500 runs, pools from barely enough to ample (user case C3)."""
    rng = random.Random(5)
    num_preemptions = 0
    for _ in range(500):
        block_size = rng.randrange(1, 9)
        max_model_len = rng.randrange(4, 40)
        least = -(-max_model_len // block_size)
        limits = config(
            block_size=block_size,
            max_model_len=max_model_len,
            num_blocks=least + rng.randrange(0, 6),
            max_num_seqs=rng.randrange(1, 7),
            max_num_batched_tokens=rng.randrange(1, 30),
            enable_prefix_caching=rng.random() < 0.8,
        )
        driver = Driver(limits, ahead=rng.randrange(3))
        prompts = [[rng.randrange(3) for _ in range(rng.randrange(1, max_model_len))] for _ in range(6)]
        seqs = [driver.add(prompt, random_params(rng)) for prompt in prompts]
        driver.run(2000)
        for seq, prompt in zip(seqs, prompts, strict=True):
            assert_output(seq, prompt)
        driver.assert_idle()
        num_preemptions += driver.scheduler.num_preemptions
    assert num_preemptions > 50


def test_a_natural_shortage_preempts_the_newest_and_never_the_oldest() -> None:
    limits = config(num_blocks=16, max_num_seqs=6, max_num_batched_tokens=64)
    driver = Driver(limits)
    prompts = [[i] * 6 for i in range(6)]
    seqs = [driver.add(prompt, SamplingParams(max_tokens=30, ignore_eos=True)) for prompt in prompts]
    driver.run()
    for seq, prompt in zip(seqs, prompts, strict=True):
        assert_output(seq, prompt)
    assert driver.scheduler.num_preemptions > 0
    assert seqs[0].num_preemptions == 0
    assert driver.scheduler.num_preemptions == sum(seq.num_preemptions for seq in seqs)


def test_finishing_is_first_come_first_served() -> None:
    """Equal requests end in the order of their arrival, however few may run at once."""
    for options in ({"max_num_seqs": 2}, {"num_blocks": 16}, {"max_num_batched_tokens": 3}):
        driver = Driver(config(**options))
        seqs = [driver.add([i, i, i], SamplingParams(max_tokens=5, ignore_eos=True)) for i in range(12)]
        order: list[Sequence] = []
        while driver.scheduler.has_unfinished:
            driver.step()
            order += [seq for seq in driver.changed if seq.is_finished]
        assert order == seqs


def test_admission_is_in_order_even_if_a_later_one_would_fit() -> None:
    driver = Driver(config(num_blocks=16, max_num_batched_tokens=64))
    first = driver.add([1] * 40, SamplingParams(max_tokens=12, ignore_eos=True))
    driver.step()
    big, small = driver.add([2] * 50), driver.add([3])
    while not first.is_finished:
        driver.step()
        assert small.status is SequenceStatus.WAITING or big.status is not SequenceStatus.WAITING
    driver.run()
    assert_output(big, [2] * 50)
    assert_output(small, [3])


@pytest.mark.parametrize("budget", [1, 3, 8, 64])
def test_a_decoding_sequence_gets_a_token_in_every_step_whatever_arrives(budget: int) -> None:
    driver = Driver(config(num_blocks=400, max_num_batched_tokens=budget))
    seq = driver.add([1, 2, 3], SamplingParams(max_tokens=40, ignore_eos=True))
    while seq.num_output_tokens == 0:
        driver.step()
    for i in range(39):
        driver.add([i % 320] * 50)
        tokens_before = seq.num_output_tokens
        driver.step()
        assert seq.num_output_tokens == tokens_before + 1
    assert seq.is_finished


def test_running_never_exceeds_max_num_seqs_and_the_slots_are_used() -> None:
    driver = Driver(config(max_num_seqs=2))
    for i in range(6):
        driver.add([i], SamplingParams(max_tokens=20, ignore_eos=True))
    widths = []
    while driver.scheduler.has_unfinished:
        widths.append(len(driver.step().num_scheduled_tokens))
    assert max(widths) == 2
    assert widths.count(2) == 60


def test_chunks_add_up_to_the_prompt_and_only_the_last_one_samples() -> None:
    for budget in (1, B - 1, B, B + 1, 2 * B + 3):
        driver = Driver(config(max_num_batched_tokens=budget))
        seq = driver.add(list(range(50)), SamplingParams(max_tokens=2, ignore_eos=True))
        sizes = []
        while seq.num_output_tokens == 0:
            sizes.append(driver.step().num_scheduled_tokens[seq.seq_id])
            assert (seq.num_output_tokens > 0) == (sum(sizes) == 50)
            assert (driver.changed == [seq]) == (sum(sizes) == 50)
        assert sum(sizes) == 50 and sizes[:-1] == [budget] * (len(sizes) - 1)


def test_the_budget_is_spent_while_there_is_work() -> None:
    driver = Driver(config(num_blocks=400, max_num_batched_tokens=10))
    for i in range(6):
        driver.add([i] * 25, SamplingParams(max_tokens=1))
    sizes = []
    while driver.scheduler.has_unfinished:
        sizes.append(driver.step().num_tokens)
    assert sum(sizes) == 150 and sizes == [10] * 15


@pytest.mark.parametrize("length", range(1, 4 * B + 2))
def test_a_repeated_prompt_of_n_tokens_computes_n_less_its_cached_blocks(length: int) -> None:
    driver = Driver(config())
    for i in range(3):
        before = driver.ranks.num_computed_tokens
        seq = driver.add(list(range(length)), SamplingParams(max_tokens=1))
        driver.run()
        cached = B * ((length - 1) // B) if i else 0
        assert driver.ranks.num_computed_tokens - before == length - cached
        assert seq.num_cached_tokens == cached
    manager = driver.scheduler.block_manager
    assert manager.query_tokens == 3 * length and manager.hit_tokens == 2 * B * ((length - 1) // B)


def test_a_preempted_sequence_comes_back_from_its_own_cached_blocks() -> None:
    """User case A3: what is left to compute is counted after the hit."""
    driver = Driver(config())
    seq = driver.add(list(range(10)), SamplingParams(max_tokens=20, ignore_eos=True))
    for _ in range(6):
        driver.step()
    assert seq.num_computed_tokens == 15
    driver.scheduler.preempt(seq)
    driver.scheduler.check()
    plan = driver.step()
    assert plan.num_scheduled_tokens == {seq.seq_id: 16 - 12}
    assert plan.new[0].num_computed_tokens == 12 and len(plan.new[0].token_ids) == 16
    assert plan.new[0].num_prompt_tokens == 10
    driver.run()
    assert_output(seq, list(range(10)))
    assert seq.num_cached_tokens == 0, "the cached tokens of a request are those of its first admission"


def test_ranks_are_never_told_again_what_they_know() -> None:
    """Per admission the tokens once; per block its number once; a drop when it leaves `running`."""
    driver = Driver(config(num_blocks=16, max_num_seqs=4))
    prompts = [[i] * 9 for i in range(8)]
    seqs = [driver.add(prompt, SamplingParams(max_tokens=25, ignore_eos=True)) for prompt in prompts]
    driver.run()
    driver.step()
    for seq in seqs:
        introductions = sum(new.seq_id == seq.seq_id for plan in driver.plans for new in plan.new)
        drops = sum(seq.seq_id in plan.dropped for plan in driver.plans)
        assert introductions == drops == 1 + seq.num_preemptions
    assert not driver.ranks.rows, "a rank keeps a row that nobody will use"


def test_a_partly_read_prompt_that_is_preempted_does_not_block_those_before_it() -> None:
    """User case C4: decodes that need blocks beside a long prompt half way in."""
    driver = Driver(config(num_blocks=16, max_num_batched_tokens=6))
    old = driver.add([1] * 4, SamplingParams(max_tokens=44, ignore_eos=True))
    driver.step()
    long = driver.add([2] * 40, SamplingParams(max_tokens=10, ignore_eos=True))
    late = driver.add([3] * 2, SamplingParams(max_tokens=10, ignore_eos=True))
    driver.run(300)
    assert long.num_preemptions > 0
    for seq, prompt in ((old, [1] * 4), (long, [2] * 40), (late, [3] * 2)):
        assert_output(seq, prompt)


def test_a_sequence_alone_that_outgrows_the_pool_ends_with_length_and_the_next_one_runs() -> None:
    """User case A8, at the scheduler: the limit on the length is beyond the pool."""
    for budget in (2, 32):
        driver = Driver(config(num_blocks=3, max_model_len=64, max_num_batched_tokens=budget))
        seq = driver.add([5] * 2 * B, SamplingParams(max_tokens=4 * B, ignore_eos=True))
        waiting = driver.add([6], SamplingParams(max_tokens=3, ignore_eos=True))
        driver.run(100)
        assert seq.finish_reason is FinishReason.LENGTH
        # The pool holds 3 B computed tokens; the one sampled from the last of them is the last.
        assert len(seq.output_token_ids) == B + 1
        assert seq.output_token_ids == expected([5] * 2 * B, SamplingParams(ignore_eos=True), B + 1)[0]
        assert_output(waiting, [6])
        driver.assert_idle()


def test_sequences_that_outgrow_the_pool_together_all_end() -> None:
    driver = Driver(config(num_blocks=5, max_model_len=64, max_num_seqs=3))
    seqs = [driver.add([i] * 7, SamplingParams(max_tokens=50, ignore_eos=True)) for i in range(3)]
    driver.run(400)
    for seq in seqs:
        assert seq.finish_reason is FinishReason.LENGTH and len(seq.output_token_ids) == 5 * B + 1 - 7
        assert seq.output_token_ids == expected([seq.seq_id] * 7, SamplingParams(ignore_eos=True), 14)[0]
    driver.assert_idle()


@pytest.mark.parametrize(
    ("num_blocks", "max_model_len", "most"), [(4, 64, 15), (32, 64, 63), (16, 64, 63), (16, 63, 62)]
)
def test_a_prompt_that_can_never_fit_is_refused_at_submission(num_blocks: int, max_model_len: int, most: int) -> None:
    driver = Driver(config(num_blocks=num_blocks, max_model_len=max_model_len))
    with pytest.raises(ValueError, match=rf"{most + 1} tokens.*at most {most}"):
        driver.add([1] * (most + 1))
    driver.assert_idle()
    seq = driver.add([1] * most)
    driver.run()
    assert seq.finish_reason is not None and seq.num_output_tokens >= 1


def test_an_idle_scheduler_has_an_empty_plan() -> None:
    driver = Driver(config())
    for _ in range(3):
        plan = driver.step()
        assert plan == SchedulerOutput() and driver.changed == []
        assert plan.num_tokens == 0


def test_a_waiting_prompt_is_not_hashed_again_in_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = [0]
    real = block_manager.hash_block

    def counting(*args: bytes) -> bytes:
        calls[0] += 1
        return real(*args)

    monkeypatch.setattr(block_manager, "hash_block", counting)
    driver = Driver(config(num_blocks=95, max_model_len=420, max_num_batched_tokens=512))
    driver.add([1] * 300, SamplingParams(max_tokens=60, ignore_eos=True))
    driver.step()
    waiting = driver.add([1] * 299 + [2] * 75, SamplingParams(max_tokens=2, ignore_eos=True))
    for _ in range(50):
        driver.step()
    assert waiting.status is SequenceStatus.WAITING
    assert calls[0] <= (300 + 60) // B + 400 // B
    driver.run()
    assert_output(waiting, [1] * 299 + [2] * 75)


def test_recover_forgets_what_a_broken_step_wrote_and_keeps_every_token() -> None:
    driver = Driver(config())
    prompts = [[i] * 9 for i in range(5)]
    seqs = [driver.add(prompt, SamplingParams(max_tokens=9, ignore_eos=True)) for prompt in prompts]
    for _ in range(4):
        driver.step()
    before = [list(seq.token_ids) for seq in seqs]

    def fail(plan: SchedulerOutput) -> None:
        raise RuntimeError

    driver.ranks.on_step = fail
    with pytest.raises(RuntimeError):
        driver.step()
    driver.ranks.on_step = None
    driver.ranks.pool = [None] * len(driver.ranks.pool)
    assert [seq.token_ids for seq in seqs] == before
    assert list(driver.scheduler.waiting) == seqs
    plan = driver.step()
    assert plan.forget_all and not plan.dropped
    assert not driver.step().forget_all
    driver.run()
    for seq, prompt in zip(seqs, prompts, strict=True):
        assert_output(seq, prompt)


def test_a_stale_result_for_a_sequence_that_was_aborted_meanwhile_is_ignored() -> None:
    """With a step in flight: its blocks are freed when the step has come back, and it gets no token."""
    driver = Driver(config())
    seqs = [driver.add([i] * 5) for i in range(3)]
    plan = driver.scheduler.schedule()
    result = driver.ranks.submit(plan).result()
    driver.scheduler.abort(seqs[1])
    assert seqs[1].block_table, "blocks were freed while a step may still write to them"
    driver.scheduler.check()
    changed = driver.scheduler.update(plan, result)
    driver.scheduler.check()
    assert seqs[1] not in changed and not seqs[1].output_token_ids and not seqs[1].block_table
    driver.run()
    for i in (0, 2):
        assert_output(seqs[i], [i] * 5)
    driver.assert_idle()


def test_several_tokens_per_step_end_where_the_first_stop_is() -> None:
    """A result may carry k tokens (speculation); what follows the one that ends the sequence is not taken."""
    driver = Driver(config())
    seq = driver.add([1, 2], SamplingParams(max_tokens=4, ignore_eos=True))
    plan = driver.scheduler.schedule()
    changed = driver.scheduler.update(plan, StepResult(token_ids={seq.seq_id: [11, 12, 13, 14, 15, 16]}))
    assert changed == [seq] and seq.output_token_ids == [11, 12, 13, 14]
    assert seq.finish_reason is FinishReason.LENGTH
    driver.assert_idle()
    seq = driver.add([1, 2], SamplingParams(max_tokens=9))
    plan = driver.scheduler.schedule()
    driver.scheduler.update(plan, StepResult(token_ids={seq.seq_id: [11, 7, 13]}))
    assert seq.output_token_ids == [11, 7] and seq.finish_reason is FinishReason.STOP
    driver.assert_idle()


# --- Steps in flight ---------------------------------------------------------------------------------------------


def test_the_next_step_is_planned_while_the_last_one_runs_and_no_token_beyond_max_tokens() -> None:
    driver = Driver(config(), ahead=1)
    seqs = [driver.add([i, i], SamplingParams(max_tokens=n, ignore_eos=True)) for i, n in enumerate((1, 4, 6))]
    num_steps = driver.run()
    assert num_steps == 6 + 1, "the first result is taken in the second step"
    assert driver.ranks.num_computed_tokens == sum(2 + n - 1 for n in (1, 4, 6)), "a token is computed in vain"
    for i, seq in enumerate(seqs):
        assert_output(seq, [i, i])


def test_a_sequence_that_stops_computes_one_token_in_vain_and_keeps_its_blocks_until_then() -> None:
    driver = Driver(config(), ahead=1)
    prompt = [1, 2, 3]
    ids = list(prompt)
    for _ in range(2):
        ids.append(hashed_token(ids))
    # The wasted token, the sixth, is the second of its block.
    seq = driver.add(prompt, SamplingParams(max_tokens=9, ignore_eos=True, stop_token_ids=(ids[-1],)))
    while not seq.is_finished:
        driver.step()
    assert seq.output_token_ids == ids[3:] and len(seq.block_table) == 2 and seq.num_inflight_tokens == 1
    assert driver.scheduler.block_manager.num_free_blocks == 30
    assert driver.scheduler.has_unfinished, "somebody has to take the result"
    plan = driver.step()
    assert not plan.num_scheduled_tokens and not seq.block_table and seq.output_token_ids == ids[3:]
    driver.assert_idle()
    assert driver.ranks.num_computed_tokens == 3 + 1 + 1
    assert driver.step().dropped == [seq.seq_id]


def test_a_full_block_can_be_hit_once_its_step_is_back_and_not_before() -> None:
    driver = Driver(config(), ahead=1)
    prompt = list(range(2 * B + 1))
    first = driver.add(prompt, SamplingParams(max_tokens=1))
    driver.step()
    early = driver.add(prompt, SamplingParams(max_tokens=1))
    driver.step()
    assert first.is_finished and early.num_cached_tokens == 0
    late = driver.add(prompt, SamplingParams(max_tokens=1))
    driver.step()
    assert late.num_cached_tokens == 2 * B
    driver.run()
    for seq in (first, early, late):
        assert_output(seq, prompt)


def test_for_want_of_blocks_the_next_plan_waits_for_what_is_in_flight_and_then_preempts() -> None:
    driver = Driver(config(num_blocks=6, max_model_len=24, enable_prefix_caching=False), ahead=1)
    old, new = (driver.add([i] * 7, SamplingParams(max_tokens=17, ignore_eos=True)) for i in range(2))
    while not driver.scheduler.is_short:
        assert not driver.scheduler.num_preemptions
        driver.step()
    # All of it came back within that step; nothing was taken from anybody yet.
    assert not old.num_inflight_tokens and not new.num_inflight_tokens and not driver.scheduler.num_preemptions
    plan = driver.step()
    assert list(plan.num_scheduled_tokens) == [old.seq_id] and new.num_preemptions == 1
    driver.run()
    for i, seq in enumerate((old, new)):
        assert_output(seq, [i] * 7)
    driver.assert_idle()
