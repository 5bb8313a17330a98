"""`Scheduler`: decides what the next step computes. Called by the engine once before and once after each step.

    plan = schedule()  ->  the ranks run it  ->  update(plan, result)

The next plan may be made before the last result is there: each sequence counts its tokens in flight, and a token that
is being sampled is one more to compute. What a sequence that has ended still has in flight comes to nothing.

There is no prefill or decode phase. A step has a budget of tokens; running sequences take from it first, oldest first,
each as many as it has left to compute; then waiting sequences are admitted in the order of their arrival. Chunked
prefill, prefix hits, resumption after preemption and decoding are all this one rule. Since a sequence is admitted only
into budget that the running ones left over, whoever decodes gets its token in every step.

When blocks run out, the newest running sequence is preempted: its blocks are released and it goes to the head of the
queue, to be recomputed (mostly from the prefix cache). So `running` stays in the order of arrival, and the oldest
sequence always makes progress. There is one exception: the further sequences of a request with several completions wait
until the first one has read the prompt, to find its blocks in the prefix cache; meanwhile others pass them.
"""

from __future__ import annotations

from collections import deque
from time import monotonic

from nanoinfer.config import SchedulerConfig
from nanoinfer.engine.block_manager import BlockManager
from nanoinfer.engine.sequence import FinishReason, Sequence, SequenceStatus
from nanoinfer.step import NewSequence, SchedulerOutput, StepResult


class Scheduler:
    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.block_manager = BlockManager(config.num_blocks, config.block_size, config.enable_prefix_caching)
        # All unfinished sequences (and finished ones with tokens in flight) by id, in the order of arrival.
        self.sequences: dict[int, Sequence] = {}
        self.waiting: deque[Sequence] = deque()
        self.running: dict[int, Sequence] = {}
        self.num_preemptions = 0
        # Whether a sequence sat the last plan out, for want of blocks that steps in flight write to. The next plan
        # preempts; before it is made, all results have to be in.
        self.is_short = False
        # For the next plan: what the ranks are still to be told.
        self._dropped: list[int] = []
        self._forget_all = False
        # Sequences that `schedule` itself finished, for the next `update` to report.
        self._ended_in_schedule: list[Sequence] = []

    @property
    def has_unfinished(self) -> bool:
        return bool(self.sequences)

    def check_fits(self, num_prompt_tokens: int) -> None:
        """Raises ValueError if a prompt of that length could never run."""
        limit = min(self.config.max_model_len, self.config.num_blocks * self.config.block_size)
        if num_prompt_tokens > limit - 1:
            raise ValueError(
                f"the prompt has {num_prompt_tokens} tokens; at most {limit - 1} fit (max_model_len "
                f"{self.config.max_model_len}, KV pool {self.config.num_blocks} blocks of {self.config.block_size} "
                "tokens, one token of room for the output)"
            )

    def add(self, seq: Sequence) -> None:
        self.check_fits(seq.num_prompt_tokens)
        self.sequences[seq.seq_id] = seq
        self.waiting.append(seq)

    def abort(self, seq: Sequence) -> None:
        """Ends a sequence now; its blocks are freed at once, or when the step that writes to them has come back.

        Nothing happens if it has ended; one that was never (or only half) added is taken back.
        """
        if not seq.is_finished:
            self.finish(seq, FinishReason.ABORT)

    def finish_scheduled(self, seq: Sequence, reason: FinishReason) -> None:
        """Ends a sequence of the plan that `schedule` has just made; the next `update` reports it."""
        self.finish(seq, reason)
        self._ended_in_schedule.append(seq)

    def finish(self, seq: Sequence, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        if seq.status is SequenceStatus.WAITING and seq in self.waiting:
            self.waiting.remove(seq)
        seq.finish(reason, stop_reason)
        if seq.num_inflight_tokens == 0:
            self._retire(seq)

    def preempt(self, seq: Sequence) -> None:
        """Takes a running sequence's blocks away and queues it at the head, to be recomputed."""
        assert seq.status is SequenceStatus.RUNNING and seq.num_inflight_tokens == 0
        assert seq.num_output_placeholders == 0
        self._drop(seq)
        seq.num_computed_tokens = 0
        seq.status = SequenceStatus.WAITING
        seq.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.appendleft(seq)

    def schedule(self) -> SchedulerOutput:
        plan = SchedulerOutput(dropped=self._dropped, forget_all=self._forget_all)
        self._dropped, self._forget_all = plan.dropped, False
        self.is_short = False
        preemptions_before = self.num_preemptions
        budget = self.config.max_num_batched_tokens
        for seq in list(self.running.values()):
            if budget == 0:
                break
            if seq.status is not SequenceStatus.RUNNING:
                continue  # preempted for the sake of an older one, or ended and not yet back
            num_expected = seq.num_output_placeholders
            if num_expected and seq.num_output_tokens + num_expected >= seq.max_tokens:
                continue  # its last token is in flight
            num_started = seq.num_computed_tokens + seq.num_inflight_tokens
            num_left = seq.num_tokens + num_expected - num_started
            num_tokens = min(num_left, budget)
            if num_started + num_tokens > len(seq.block_table) * self.config.block_size:
                new_blocks = self._grow(seq, num_started + num_tokens)
                if new_blocks is None:
                    continue
                plan.new_block_ids[seq.seq_id] = new_blocks
            plan.num_scheduled_tokens[seq.seq_id] = num_tokens
            seq.num_inflight_tokens += num_tokens
            seq.num_output_placeholders += num_tokens == num_left
            budget -= num_tokens
        # Blocks that were just taken from one sequence are not for a newer one.
        if self.num_preemptions == preemptions_before:
            self._admit(plan, budget)
        self._dropped = []
        return plan

    def _grow(self, seq: Sequence, num_tokens: int) -> list[int] | None:
        """New blocks so that the table covers `num_tokens`; None if the sequence cannot run in this step."""
        manager = self.block_manager
        num_new = manager.num_blocks_for(num_tokens) - len(seq.block_table)
        while not manager.can_allocate(num_new):
            victim = self.running[next(reversed(self.running))]
            if victim.num_inflight_tokens:
                self.is_short = True
                return None
            if victim is seq and len(self.running) == 1:
                # The whole pool is its own, and it is full.
                self.finish(seq, FinishReason.LENGTH)
                self._ended_in_schedule.append(seq)
                return None
            self.preempt(victim)
            if victim is seq:
                return None
        new_blocks = manager.allocate(num_new)
        seq.block_table += new_blocks
        return new_blocks

    def _admit(self, plan: SchedulerOutput, budget: int) -> None:
        manager = self.block_manager
        passed: list[Sequence] = []
        while self.waiting and budget > 0 and len(self.running) < self.config.max_num_seqs:
            seq = self.waiting[0]
            if seq.leader is not None and self._is_reading(seq.leader):
                passed.append(self.waiting.popleft())
                continue
            cached: list[int] = []
            if not seq.lacks_prompt_logprobs:
                cached = manager.match_prefix(seq.token_ids, seq.prefix, seq.cache_key)
            num_cached = len(cached) * manager.block_size
            num_tokens = min(seq.num_tokens - num_cached, budget)
            num_new = manager.num_blocks_for(num_cached + num_tokens) - len(cached)
            # Beside others, start only what can be finished reading, and leave each of them a block to grow into:
            # admitting more would preempt it again at once. Alone, take what there is.
            num_wanted = manager.num_blocks_for(seq.num_tokens) - len(cached) + len(self.running)
            if not manager.can_allocate(num_wanted if self.running else num_new, cached):
                if not self.running:
                    # Nobody will free another block: it has outgrown the pool.
                    self.finish(seq, FinishReason.LENGTH)
                    self._ended_in_schedule.append(seq)
                    continue
                break
            self.waiting.popleft()
            manager.acquire(cached)
            seq.block_table = cached + manager.allocate(num_new)
            seq.num_computed_tokens = num_cached
            seq.num_inflight_tokens = num_tokens
            seq.num_output_placeholders = int(num_cached + num_tokens == seq.num_tokens)
            seq.status = SequenceStatus.RUNNING
            self.running[seq.seq_id] = seq
            if seq.num_cached_tokens is None:
                seq.num_cached_tokens = num_cached
                seq.first_scheduled_time = monotonic()
                manager.count_query(seq.num_tokens, num_cached)
            plan.new.append(self._introduce(seq))
            plan.num_scheduled_tokens[seq.seq_id] = num_tokens
            budget -= num_tokens
        self.waiting.extendleft(reversed(passed))

    def _is_reading(self, leader: Sequence) -> bool:
        """Whether blocks of its prompt that others are to share are still to come."""
        can_share = self.config.enable_prefix_caching and leader.num_prompt_tokens > self.config.block_size
        return can_share and not leader.num_output_tokens and not leader.is_finished

    def _introduce(self, seq: Sequence) -> NewSequence:
        return NewSequence(
            seq_id=seq.seq_id,
            token_ids=list(seq.token_ids),
            num_prompt_tokens=seq.num_prompt_tokens,
            num_computed_tokens=seq.num_computed_tokens,
            block_ids=list(seq.block_table),
            params=seq.params,
            seed=seq.seed,
            stop_token_ids=seq.stop_token_ids,
            prompt_logprobs=seq.params.prompt_logprobs if seq.lacks_prompt_logprobs else None,
            bad_words=seq.bad_words,
        )

    def update(self, plan: SchedulerOutput, result: StepResult) -> list[Sequence]:
        """Takes in what a step computed. Returns the sequences that got tokens or ended, aborted ones aside."""
        changed, self._ended_in_schedule = self._ended_in_schedule, []
        block_size = self.block_manager.block_size
        for seq_id, num_tokens in plan.num_scheduled_tokens.items():
            seq = self.sequences.get(seq_id)
            if seq is None:
                continue  # dropped by `recover`
            num_before = seq.num_computed_tokens
            seq.num_inflight_tokens -= num_tokens
            seq.num_computed_tokens += num_tokens
            if seq.num_computed_tokens == seq.num_tokens:
                seq.num_output_placeholders -= 1
            if seq.is_finished:
                if seq.num_inflight_tokens == 0:
                    self._retire(seq)
                continue
            first, last = num_before // block_size, seq.num_computed_tokens // block_size
            if first < last:
                self.block_manager.register(seq.token_ids, seq.prefix, seq.cache_key, seq.block_table, first, last)
            if result.prompt_logprobs and seq_id in result.prompt_logprobs:
                # After a preemption some are told again.
                entries = result.prompt_logprobs[seq_id]
                seq.prompt_logprobs += entries[len(seq.prompt_logprobs) - num_before :]
            new_token_ids = result.token_ids.get(seq_id)
            if not new_token_ids:
                continue
            for i, token_id in enumerate(new_token_ids):
                seq.token_ids.append(token_id)
                if result.logprobs and seq_id in result.logprobs:
                    seq.logprobs.append(result.logprobs[seq_id][i])
                seq.check_stop()
                if seq.is_finished:
                    break
            if seq.is_finished and seq.num_inflight_tokens == 0:
                self._retire(seq)
            changed.append(seq)
        return changed

    def recover(self) -> None:
        """After a step that failed or was interrupted anywhere: back to a state that is consistent by construction.

        Every unfinished sequence is queued again in the order of arrival, to be recomputed; the pool starts afresh (so
        nothing that a broken step may have written is hit), and the ranks forget all rows. Results of plans that are
        still in flight must not be brought to `update` any more.
        """
        old = self.block_manager
        self.block_manager = BlockManager(old.num_blocks, old.block_size, old.enable_prefix_caching)
        self.block_manager.count_query(old.query_tokens, old.hit_tokens)
        for seq in self.sequences.values():
            seq.repair()
        self.sequences = {seq_id: seq for seq_id, seq in self.sequences.items() if not seq.is_finished}
        self.running = {}
        self.waiting = deque(self.sequences.values())
        for seq in self.waiting:
            seq.block_table = []
            seq.num_computed_tokens = seq.num_inflight_tokens = seq.num_output_placeholders = 0
            seq.status = SequenceStatus.WAITING
        self._dropped, self._forget_all = [], True

    def _retire(self, seq: Sequence) -> None:
        self._drop(seq)
        self.sequences.pop(seq.seq_id, None)

    def _drop(self, seq: Sequence) -> None:
        """Releases the blocks and lets the ranks forget the row."""
        self.block_manager.release(seq.block_table)
        seq.block_table = []
        if self.running.pop(seq.seq_id, None) is not None:
            self._dropped.append(seq.seq_id)

    def check(self) -> None:
        """Raises AssertionError unless queues, tables and pool agree. For tests, after any step."""
        running, waiting = list(self.running.values()), list(self.waiting)
        assert all(s.status is SequenceStatus.WAITING and not s.block_table for s in waiting)
        assert all(s.status is SequenceStatus.RUNNING or s.num_inflight_tokens for s in running)
        assert len({s.seq_id for s in running + waiting}) == len(running) + len(waiting) == len(self.sequences)
        order = [s.seq_id for s in running + waiting if s.leader is None]
        arrived = [s.seq_id for s in self.sequences.values() if s.leader is None]
        assert order == arrived, "running and waiting are not in the order of arrival"
        assert len(running) <= self.config.max_num_seqs
        for seq in running:
            covered = seq.num_computed_tokens + seq.num_inflight_tokens
            assert covered <= seq.num_tokens + seq.num_output_placeholders
            assert 0 <= seq.num_output_placeholders <= seq.num_inflight_tokens
            assert len(seq.block_table) == self.block_manager.num_blocks_for(covered)
        self.block_manager.check([seq.block_table for seq in running])
