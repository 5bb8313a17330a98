"""What an engine that serves can tell about itself: `EngineStats` at any moment, `IterationStats` after each step.

Names and meanings are those of vLLM's metrics. Times are in seconds, on the monotonic clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from nanoinfer.engine.scheduler import Scheduler
from nanoinfer.engine.sequence import Sequence


@dataclass
class EngineStats:
    """Gauges, then counters since the start.

    num_running, num_waiting: sequences. kv_cache_usage: fraction of the blocks that live sequences hold.
    prompt_tokens: of prompts that were read (once per request); generation_tokens: of all completions.
    prefix_cache_queries, prefix_cache_hits: tokens looked up and found.
    finished: completions by finish reason.
    """

    num_running: int = 0
    num_waiting: int = 0
    kv_cache_usage: float = 0.0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    num_preemptions: int = 0
    finished: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("stop", "length", "abort", "error"), 0))


@dataclass(frozen=True)
class FinishedRequestStats:
    """One completion that has ended, from the arrival of its request on.

    queue_time: until it was first scheduled; prefill_time: from then to its first token; decode_time: to its last.
    None where it ended before.
    """

    finish_reason: str
    num_prompt_tokens: int
    num_generation_tokens: int
    max_tokens: int
    n: int
    e2e_latency: float
    queue_time: float | None
    prefill_time: float | None
    decode_time: float | None


@dataclass
class IterationStats:
    """What one step brought, for histograms.

    num_prompt_tokens, num_generation_tokens: what the counters of the same names rose by, together what vLLM calls
        iteration tokens. time_to_first_token, queue_time: of requests whose first token came; inter_token_latency: of
        every completion that got a further token.
    """

    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    time_to_first_token: list[float] = field(default_factory=list)
    queue_time: list[float] = field(default_factory=list)
    inter_token_latency: list[float] = field(default_factory=list)
    finished: list[FinishedRequestStats] = field(default_factory=list)


class StatsKeeper:
    """Keeps the counters. Called by the engine loop, from its thread; `snapshot` from any."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._counters = EngineStats()

    def snapshot(self) -> EngineStats:
        scheduler, counters = self._scheduler, self._counters
        manager = scheduler.block_manager
        return EngineStats(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            kv_cache_usage=1 - manager.num_free_blocks / manager.num_blocks,
            prompt_tokens=counters.prompt_tokens,
            generation_tokens=counters.generation_tokens,
            prefix_cache_queries=manager.query_tokens,
            prefix_cache_hits=manager.hit_tokens,
            num_preemptions=scheduler.num_preemptions,
            finished=dict(counters.finished),
        )

    def count(self, timeline: SequenceTimeline, now: float, iteration: IterationStats) -> None:
        """Takes in what a sequence has grown by; once more when it has ended."""
        seq = timeline.seq
        if num_new := max(0, seq.num_output_tokens - timeline.num_tokens):
            timeline.num_tokens += num_new
            self._count_tokens(timeline, num_new, now, iteration)
        if seq.is_finished:
            self._count_end(timeline, now, iteration)

    def _count_tokens(self, timeline: SequenceTimeline, num_new: int, now: float, iteration: IterationStats) -> None:
        seq = timeline.seq
        if timeline.first_token_time is None:
            timeline.first_token_time = now
            if seq.leader is None:
                iteration.num_prompt_tokens += seq.num_prompt_tokens
                self._counters.prompt_tokens += seq.num_prompt_tokens
                iteration.time_to_first_token.append(now - seq.arrival_time)
                if seq.first_scheduled_time is not None:
                    iteration.queue_time.append(seq.first_scheduled_time - seq.arrival_time)
        else:
            iteration.inter_token_latency.append(now - timeline.last_token_time)
        timeline.last_token_time = now
        iteration.num_generation_tokens += num_new
        self._counters.generation_tokens += num_new

    def _count_end(self, timeline: SequenceTimeline, now: float, iteration: IterationStats) -> None:
        seq, first_token_time = timeline.seq, timeline.first_token_time
        assert seq.finish_reason is not None
        reason = seq.finish_reason.value
        self._counters.finished[reason] += 1
        scheduled = seq.first_scheduled_time
        iteration.finished.append(
            FinishedRequestStats(
                finish_reason=reason,
                num_prompt_tokens=seq.num_prompt_tokens,
                num_generation_tokens=seq.num_output_tokens,
                max_tokens=seq.params.max_tokens,
                n=seq.params.n,
                e2e_latency=now - seq.arrival_time,
                queue_time=None if scheduled is None else scheduled - seq.arrival_time,
                prefill_time=None if scheduled is None or first_token_time is None else first_token_time - scheduled,
                decode_time=None if first_token_time is None else timeline.last_token_time - first_token_time,
            )
        )


class SequenceTimeline:
    """When a sequence got its tokens."""

    def __init__(self, seq: Sequence) -> None:
        self.seq = seq
        self.first_token_time: float | None = None
        self.last_token_time = 0.0
        self.num_tokens = 0
