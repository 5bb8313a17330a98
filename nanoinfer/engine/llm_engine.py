"""`LLMEngine`: requests in, one step at a time, finished requests out. Ties together everything in this room.

    requests = engine.add_requests(prompts, params)
    while engine.has_unfinished: finished = engine.step()

Steps may overlap where ranks run apart from this process: the next one is planned and sent before the result of the
last one is taken. So the ranks go from one to the next, and a sequence that turns out to have ended has computed at
most one token in vain.

A step that raises, or is interrupted by Ctrl-C at any point, leaves the engine usable: `step` puts the scheduler back
into a state that is consistent by construction and raises on.
"""

from __future__ import annotations

import logging
import secrets
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np

from nanoinfer.config import EngineConfig, ModelConfig, SchedulerConfig
from nanoinfer.engine import sequence
from nanoinfer.engine.checkpoint import (
    default_sampling_params,
    find_checkpoint,
    find_eos_token_ids,
    load_generation_config,
    load_tokenizer,
)
from nanoinfer.engine.detokenizer import TokenTable
from nanoinfer.engine.input_processor import InputProcessor, Prompt
from nanoinfer.engine.output_processor import OutputProcessor, Request
from nanoinfer.engine.scheduler import Scheduler
from nanoinfer.engine.sequence import FinishReason
from nanoinfer.executor.base import Executor, StepHandle
from nanoinfer.executor.multiproc import MultiprocExecutor
from nanoinfer.executor.uniproc import UniprocExecutor
from nanoinfer.sampling_params import Grammar, SamplingParams
from nanoinfer.step import KVCacheCapacity, SchedulerOutput, StepResult, StepStats, token_bitmask

if TYPE_CHECKING:
    pass

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _StepInFlight:
    """A step whose result has not been taken. handle: None if there was nothing to tell the ranks.

    start: when its planning began. submit_seconds: what sending it took. observe: makes its StepStats, given its times.
    """

    plan: SchedulerOutput
    handle: StepHandle | None
    start: float
    submit_seconds: float
    observe: Callable[[float, float], StepStats] | None

    def result(self) -> StepResult:
        return StepResult() if self.handle is None else self.handle.result()


class LLMEngine:
    """on_step: called after every step with what it did; for progress bars and benchmarks."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        model_dir = find_checkpoint(config.model, config.revision, weights=config.load_format != "dummy")
        self.model_config = ModelConfig.from_directory(model_dir)
        self.tokenizer = load_tokenizer(model_dir)
        generation_config = load_generation_config(model_dir)
        self.seed = secrets.randbits(63) if config.seed is None else config.seed
        if config.seed is None:
            logger.info("seed is %d (pass seed= to repeat a run)", self.seed)
        _check_length(config, self.model_config)

        # All that can be wrong with the files is found before anything is loaded.
        default_params = default_sampling_params(model_dir, generation_config)
        eos_token_ids = find_eos_token_ids(self.model_config, generation_config, self.tokenizer)
        self.output_processor = OutputProcessor(TokenTable(self.tokenizer) if self.tokenizer is not None else None)
        self.executor: Executor = _make_executor(config, self.model_config, model_dir, self.seed)
        try:
            self.capacity: KVCacheCapacity = self.executor.capacity()
            limits = _scheduler_config(config, self.model_config, self.capacity)
            self.executor.allocate(limits)
        except BaseException:
            self.executor.close()
            raise
        logger.info(
            "%s, %s, %d rank(s) of %d thread(s), KV pool of %d blocks of %d tokens",
            self.capacity.device, self.capacity.dtype, config.tensor_parallel_size, self.capacity.num_threads,
            limits.num_blocks, limits.block_size,
        )  # fmt: skip
        if config.async_scheduling and not self.executor.runs_apart:
            logger.warning(
                "async_scheduling=True changes nothing here: a step on the CPU in this process is over when it has "
                "been submitted; distributed_executor_backend='mp' gives it a process of its own"
            )
        # On a CPU a step takes so long that the gap after it does not count, but the token in vain does, and so does
        # the step that a new request finds already planned.
        is_on_gpu = self.capacity.device == "cuda"
        self.async_scheduling = is_on_gpu if config.async_scheduling is None else config.async_scheduling
        self.scheduler = Scheduler(limits)
        self.input_processor = InputProcessor(
            tokenizer=self.tokenizer,
            vocab_size=self.model_config.vocab_size,
            max_model_len=limits.max_model_len,
            eos_token_ids=eos_token_ids,
            default_params=default_params,
            seed=self.seed,
        )
        self.on_step: Callable[[StepStats], None] | None = None
        # The sequences that the last call of `step` brought on or to their end.
        self.changed: list[sequence.Sequence] = []
        self._to_abort: deque[Request] = deque()
        # In the order of submission; between two calls of `step` at most one.
        self._in_flight: deque[_StepInFlight] = deque()
        self._last_result_time = 0.0
        self._has_grammars = False
        # Whether a step failed since texts were last brought in line with tokens.
        self._is_uncertain = False

    @property
    def has_unfinished(self) -> bool:
        """Whether there is something to do for `step`, if only to take the result of a step that is in flight."""
        return self.scheduler.has_unfinished or bool(self.output_processor.requests or self.output_processor.finished)

    @property
    def overlaps_steps(self) -> bool:
        return self.async_scheduling and self.executor.runs_apart

    def add_requests(
        self, prompts: Prompt | Iterable[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Request]:
        """Queues a call's prompts, all or (on any exception) none."""
        requests = self.prepare(prompts, params)
        try:
            self.add(requests)
        except BaseException:
            self.abort(requests)
            raise
        return requests

    def prepare(
        self,
        prompts: Prompt | Iterable[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        request_id: str | None = None,
        grammar: Grammar | None = None,
    ) -> list[Request]:
        """Checks a call's prompts and makes its requests. Queues nothing yet. Raises ValueError on bad input.

        grammar: of all of them; each sequence gets a copy (copy.deepcopy) if there are several. Safe in any thread.
        """
        processed = self.input_processor.process(prompts, params, grammar)
        make_request = self.output_processor.make_request
        return [make_request(prompt.text, sequences, request_id) for prompt, sequences in processed]

    def add(self, requests: Iterable[Request]) -> None:
        """Queues prepared requests. If it is interrupted, `abort` takes back any of them, queued or not."""
        for request in requests:
            for completion in request.completions:
                self._has_grammars |= completion.seq.grammar is not None
                self.output_processor.requests[completion.seq.seq_id] = request
                self.scheduler.add(completion.seq)

    def abort(self, requests: Iterable[Request]) -> None:
        """Ends requests that are not finished, with finish_reason "abort", and frees their blocks.

        Blocks that a step in flight writes to are free once it has come back. If no request is left, that is waited
        for, so that nothing is in flight for nobody.
        """
        for request in requests:
            for completion in request.completions:
                self.scheduler.abort(completion.seq)
            self.output_processor.drop(request)
        if self._in_flight and not self.output_processor.requests:
            try:
                while self._in_flight:
                    step = self._in_flight.popleft()
                    self.scheduler.update(step.plan, step.result())
            except Exception:
                # It concerns nobody who is left. If the ranks are dead, whoever comes next is told.
                logger.warning("a step that had become pointless failed", exc_info=True)
                self._recover()
            except BaseException:
                self._recover()
                raise

    def abort_later(self, request: Request) -> None:
        """Aborts before the next step. Safe at any moment, in any thread."""
        self._to_abort.append(request)

    def step(self, meanwhile: Callable[[], None] | None = None) -> list[Request]:
        """Runs one step. Returns the requests that are finished.

        If steps overlap, the step that is sent and the one whose result is taken are two: this one stays in flight
        until the next call, which sends another one before it waits for this one.

        meanwhile: called when the step is on its way, before anything is waited for. If ranks run in processes of their
        own, what it does costs no time.
        """
        start = perf_counter()
        self.changed = []
        while self._to_abort:
            self.abort([self._to_abort[0]])
            self._to_abort.popleft()  # only now: interrupted before, it is aborted again, which does nothing
        stats: list[StepStats | None] = []
        try:
            if not self._has_to_wait:
                self._submit(start)
            if meanwhile is not None:
                meanwhile()
            if len(self._in_flight) > 1 or self._has_to_wait:
                stats.append(self._take_result())
            # There is nothing to wait for in a step that computes nothing.
            while self._in_flight and not self._in_flight[0].plan.num_scheduled_tokens:
                stats.append(self._take_result())
        except BaseException:
            self._recover()
            raise
        for one in stats:
            if one is not None and self.on_step:
                self.on_step(one)
        return self.output_processor.take_finished()

    @property
    def _has_to_wait(self) -> bool:
        """Whether the next step cannot be planned before the one in flight is back.

        So it is if that samples under a grammar, which has to see the token before it tells the next mask. A stop
        string ends a sequence as unforeseen as a stop token does; to compute a token in vain then costs less than to
        wait each time.
        """
        if not self._in_flight:
            return False
        plan = self._in_flight[-1].plan
        if plan.bitmasks or not plan.num_scheduled_tokens or self.scheduler.is_short:
            return True
        return not self.overlaps_steps

    def _submit(self, start: float) -> None:
        """Plans the next step and sends it to the ranks."""
        num_preemptions = self.scheduler.num_preemptions
        plan = self.scheduler.schedule()
        if self._has_grammars:
            self._fill_bitmasks(plan)
        observe = self._observation(plan, num_preemptions) if self.on_step else None
        submit_start = perf_counter()
        is_empty = not (plan.num_scheduled_tokens or plan.dropped or plan.forget_all)
        handle = None if is_empty else self.executor.submit(plan)
        self._in_flight.append(_StepInFlight(plan, handle, start, perf_counter() - submit_start, observe))

    def _take_result(self) -> StepStats | None:
        """Waits for the oldest step in flight, and deals with what it brought."""
        step, wait_start = self._in_flight.popleft(), perf_counter()
        result = step.result()
        execute_seconds = step.submit_seconds + perf_counter() - wait_start
        self._process(self.scheduler.update(step.plan, result))
        start, self._last_result_time = max(step.start, self._last_result_time), perf_counter()
        return step.observe(self._last_result_time - start, execute_seconds) if step.observe else None

    def _recover(self) -> None:
        """What is in flight counts for nothing: its results are not taken, and the ranks forget all rows."""
        self._in_flight.clear()
        self._is_uncertain = True
        self.scheduler.recover()

    def _process(self, changed: list[sequence.Sequence]) -> None:
        if self._is_uncertain:
            changed = self.output_processor.restart()
            self._is_uncertain = False
        if self._has_grammars:
            for seq in changed:
                self._advance_grammar(seq)
        for seq, stop in self.output_processor.process(changed):
            self.scheduler.finish(seq, FinishReason.STOP, stop)
        self.changed += changed

    def _advance_grammar(self, seq: sequence.Sequence) -> None:
        """After a step. What goes wrong in a grammar is its own request's business."""
        if seq.grammar is None or seq.is_finished:
            return
        try:
            is_over = seq.advance_grammar()
        except Exception as error:
            seq.error = error
            self.scheduler.finish(seq, FinishReason.ERROR)
        else:
            if is_over:
                self.scheduler.finish(seq, FinishReason.STOP)

    def _fill_bitmasks(self, plan: SchedulerOutput) -> None:
        """Asks the grammars of the rows that sample in this step. Tokens of theirs are never in flight."""
        for seq_id in plan.num_scheduled_tokens:
            seq = self.scheduler.sequences[seq_id]
            if seq.grammar is None or seq.num_computed_tokens + seq.num_inflight_tokens != seq.num_tokens:
                continue
            try:
                # It has been told all tokens, unless the last step was interrupted.
                if seq.advance_grammar():
                    self.scheduler.finish_scheduled(seq, FinishReason.STOP)
                else:
                    plan.bitmasks[seq_id] = _bitmask(seq, self.model_config.vocab_size)
            except Exception as error:
                seq.error = error
                self.scheduler.finish_scheduled(seq, FinishReason.ERROR)

    def _observation(self, plan: SchedulerOutput, preemptions_before: int) -> Callable[[float, float], StepStats]:
        """What a plan will do, as StepStats that wait for its times. Before `update`, which moves the sequences on."""
        num_decode = num_sampled = num_context = num_pairs = 0
        for seq_id, num_tokens in plan.num_scheduled_tokens.items():
            seq = self.scheduler.sequences[seq_id]
            stop = seq.num_computed_tokens + seq.num_inflight_tokens
            num_context += stop
            num_sampled += stop >= seq.num_tokens
            if num_tokens == 1 and stop > seq.num_prompt_tokens:
                num_decode += 1
            else:
                num_pairs += num_tokens * (2 * stop - num_tokens + 1) // 2
        num_preemptions = self.scheduler.num_preemptions - preemptions_before
        num_running, num_waiting = len(self.scheduler.running), len(self.scheduler.waiting)

        def stats(seconds: float, execute_seconds: float) -> StepStats:
            return StepStats(
                num_prefill_tokens=plan.num_tokens - num_decode,
                num_decode_tokens=num_decode,
                num_sampled=num_sampled,
                num_context_tokens=num_context,
                num_attention_pairs=num_pairs,
                num_running=num_running,
                num_waiting=num_waiting,
                num_preemptions=num_preemptions,
                seconds=seconds,
                execute_seconds=execute_seconds,
            )

        return stats

    def close(self) -> None:
        self.executor.close()


def _make_executor(config: EngineConfig, model_config: ModelConfig, model_dir: Path, seed: int) -> Executor:
    model_config.check_tensor_parallel(config.tensor_parallel_size)
    backend = config.distributed_executor_backend or ("uni" if config.tensor_parallel_size == 1 else "mp")
    kind = UniprocExecutor if backend == "uni" else MultiprocExecutor
    return kind(config, model_config, model_dir, seed)


def _bitmask(seq: sequence.Sequence, vocab_size: int) -> np.ndarray:
    """What its grammar and its parameters allow. Raises what the grammar raises, ValueError if that is nothing."""
    assert seq.grammar is not None
    mask = np.full(-(-vocab_size // 32), -1, np.int32)
    seq.grammar.fill_mask(mask)
    if seq.params.allowed_token_ids is not None:
        mask &= token_bitmask(seq.params.allowed_token_ids, vocab_size)
    if vocab_size % 32:
        mask[-1] &= (1 << vocab_size % 32) - 1
    if not mask.any():
        raise ValueError("the grammar allows no token here")
    return mask


def _check_length(config: EngineConfig, model_config: ModelConfig) -> None:
    if config.max_model_len is not None and config.max_model_len > model_config.max_model_len:
        raise ValueError(
            f"max_model_len is {config.max_model_len}; the model's positions reach {model_config.max_model_len} "
            "(config.json: max_position_embeddings, extended by yarn where that is set)"
        )


def _scheduler_config(config: EngineConfig, model_config: ModelConfig, capacity: KVCacheCapacity) -> SchedulerConfig:
    max_model_len = config.max_model_len or model_config.max_model_len
    num_slots = capacity.num_blocks * capacity.block_size
    if num_slots < 2:
        raise ValueError("the KV pool holds one token; the shortest request needs two")
    if max_model_len > num_slots:
        logger.warning(
            "max_model_len is lowered from %d to %d, which is what the KV pool holds (%d blocks of %d tokens, %d bytes "
            "each); %s or num_kvcache_blocks make it larger",
            max_model_len, num_slots, capacity.num_blocks, capacity.block_size, capacity.bytes_per_block,
            "cpu_kvcache_gib" if capacity.device == "cpu" else "gpu_memory_utilization",
        )  # fmt: skip
        max_model_len = num_slots
    return SchedulerConfig(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=capacity.max_num_batched_tokens,
        max_model_len=max_model_len,
        num_blocks=capacity.num_blocks,
        block_size=capacity.block_size,
        enable_prefix_caching=config.enable_prefix_caching,
    )
