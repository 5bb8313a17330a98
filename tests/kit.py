"""What several test files share: checkpoints with a tokenizer, engines over poisoned memory, ranks without a model, and
an independent numpy form of sampling.
"""

from __future__ import annotations

import atexit
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast, Qwen3ForCausalLM

from nanoinfer import LLM, SamplingParams
from nanoinfer.config import SchedulerConfig
from nanoinfer.distributed.group import ParallelGroups, TensorParallelGroup
from nanoinfer.engine.block_manager import BlockManager
from nanoinfer.engine.llm_engine import LLMEngine
from nanoinfer.executor.base import Executor, StepHandle
from nanoinfer.step import KVCacheCapacity, NewSequence, SchedulerOutput, StepResult, TokenLogprobs
from nanoinfer.worker.model_runner import ModelRunner

ROOT = Path(__file__).resolve().parent.parent
_TEMPORARY = tempfile.TemporaryDirectory(prefix="nanoinfer-tests-")
atexit.register(_TEMPORARY.cleanup)

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)


def wait_until(fact: Callable[[], bool], what: str, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not fact():
        assert time.monotonic() < deadline, f"after {seconds:g} s: not {what}"
        time.sleep(0.01)


def qwen3_tokenizer_dir() -> Path | None:
    """The real Qwen3 tokenizer, where the machine has it."""
    for base in (ROOT.parent / "shared", ROOT / "shared", Path("/work/shared")):
        if (base / "qwen3-tokenizer" / "tokenizer.json").is_file():
            return base / "qwen3-tokenizer"
    return None


@lru_cache(maxsize=1)
def qwen3_tokenizer() -> PreTrainedTokenizerBase:
    """It takes seconds to load."""
    return AutoTokenizer.from_pretrained(qwen3_tokenizer_dir())


@lru_cache(maxsize=1)
def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE of 256 bytes, a few merges (some of them half a character), and Qwen3's kinds of added tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    stand_in = dict(zip((bytes_of_stand_in(c) for c in alphabet), alphabet, strict=True))
    vocab = {char: i for i, char in enumerate(alphabet)}
    merges: list[tuple[str, str]] = []
    for left, right in (
        (b"t", b"h"),
        (b"th", b"e"),
        (b" ", b"the"),
        (b"\xf0", b"\x9f"),
        (b"\xc3", b"\xa9"),
        (b"a", b"b"),
    ):
        pair = ("".join(stand_in[b] for b in left), "".join(stand_in[b] for b in right))
        merges.append(pair)
        vocab["".join(pair)] = len(vocab)
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    backend.add_tokens([AddedToken("<think>", normalized=False), AddedToken("</think>", normalized=False)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def bytes_of_stand_in(char: str) -> int:
    """GPT-2's printable stand-in to its byte: what `decoders.ByteLevel` does, asked of it one character at a time."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    if ord(char) in printable:
        return ord(char)
    return [byte for byte in range(256) if byte not in printable][ord(char) - 256]


class Tiny:
    """A saved checkpoint, its model in transformers, and the reference over it."""

    def __init__(self, directory: Path, model: Qwen3ForCausalLM) -> None:
        self.directory = directory
        self.model = model
        self.reference = tiny.Reference(model)
        self.vocab_size: int = model.config.vocab_size

    def greedy(self, prompt: list[int], num_tokens: int) -> list[int]:
        """What transformers decodes greedily."""
        ids = list(prompt)
        for _ in range(num_tokens):
            ids.append(int(self.reference.logits(tuple(ids))[-1].argmax()))
        return ids[len(prompt) :]

    def assert_sampled(
        self, prompt: list[int], output: list[int], params: SamplingParams, uniforms: np.ndarray
    ) -> None:
        """Each token of `output` is the inverse CDF of its uniform number, under transformers' logits."""
        logits = self.reference.logits(tuple(prompt + output))[len(prompt) - 1 : -1].numpy()
        for i, token_id in enumerate(output):
            weights = sampling_weights(logits[i], params, prompt, output[:i])
            cumulative = weights.cumsum() / weights.sum()
            before = cumulative[token_id] - weights[token_id] / weights.sum()
            assert weights[token_id] > 0, f"output {i}: token {token_id} is filtered out"
            assert before - 1e-4 <= uniforms[i] <= cumulative[token_id] + 1e-4, f"output {i} is not the inverse CDF"


def new_directory() -> Path:
    return Path(tempfile.mkdtemp(dir=_TEMPORARY.name))


@lru_cache(maxsize=64)
def checkpoint(variant: str = "tied", seed: int = 0, tokenizer: bool = False, **overrides: Any) -> Tiny:
    directory = new_directory()
    model = tiny.save(directory, variant, seed, **overrides)
    if tokenizer:
        byte_tokenizer().save_pretrained(directory)
    return Tiny(directory, model)


def make_llm(directory: Path, *, shuffle: int | None = None, **options: Any) -> LLM:
    """An engine whose unwritten KV slots are NaN. shuffle: a seed for the order in which blocks are handed out."""
    defaults: dict[str, Any] = {"num_kvcache_blocks": 64, "kvcache_block_size": 8, "dtype": "float32", "seed": 0}
    llm = LLM(str(directory), **{**defaults, **options})
    llm.engine.executor.runner._kv_cache.data.fill_(float("nan"))
    if shuffle is not None:
        manager = llm.engine.scheduler.block_manager
        order = list(manager._free)
        np.random.default_rng(shuffle).shuffle(order)
        manager._free.clear()
        manager._free.update(dict.fromkeys(order))
    return llm


@contextmanager
def poisoned_on_allocation(llm: LLM) -> Iterator[None]:
    """Every block that is handed out is filled with NaN: whoever reads what it has not written is found out."""
    data = llm.engine.executor.runner._kv_cache.data
    original = BlockManager.allocate

    def allocate(self: BlockManager, num_new_blocks: int) -> list[int]:
        block_ids = original(self, num_new_blocks)
        data[:, :, block_ids] = float("nan")
        return block_ids

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BlockManager, "allocate", allocate)
        yield


def assert_idle(engine: LLMEngine) -> None:
    """Nothing is left of any request: no queue entry, no row, no block, no request."""
    scheduler = engine.scheduler
    scheduler.check()
    assert not engine.has_unfinished
    assert not scheduler.waiting and not scheduler.running and not scheduler.sequences
    assert scheduler.block_manager.num_free_blocks == scheduler.config.num_blocks
    assert not any(scheduler.block_manager.ref_counts)
    assert not engine.output_processor.requests and not engine.output_processor.finished
    assert not engine.step(), "a step of an idle engine finished something"
    if not isinstance(engine.executor, FakeRanks):
        assert len(engine.executor.runner._batch) == 0, "a rank still knows a row"


@contextmanager
def checked_steps(engine: LLMEngine, every: int = 1) -> Iterator[list[SchedulerOutput]]:
    """The budgets after every step, `Scheduler.check()` after every `every`-th; yields the list of plans."""
    plans: list[SchedulerOutput] = []
    step, schedule = engine.step, engine.scheduler.schedule
    config = engine.scheduler.config

    def checked_schedule() -> SchedulerOutput:
        plan = schedule()
        assert plan.num_tokens <= config.max_num_batched_tokens
        assert len(plan.num_scheduled_tokens) <= config.max_num_seqs
        assert all(count > 0 for count in plan.num_scheduled_tokens.values())
        plans.append(plan)
        return plan

    def checked_step() -> Any:
        finished = step()
        if len(plans) % every == 0:
            engine.scheduler.check()
        return finished

    engine.step, engine.scheduler.schedule = checked_step, checked_schedule  # type: ignore[method-assign]
    try:
        yield plans
    finally:
        del engine.step, engine.scheduler.schedule


# --- Ranks without a model ---------------------------------------------------------------------------------------


def hashed_token(token_ids: list[int], vocab_size: int = 320) -> int:
    """A next token that depends on every token so far."""
    return hash(tuple(token_ids)) % vocab_size


class _Row:
    def __init__(self, new: NewSequence) -> None:
        self.new = new
        self.token_ids = list(new.token_ids)
        self.blocks = list(new.block_ids)
        self.num_computed = new.num_computed_tokens
        self.chain: list[int] = []
        self.extend_chain()

    def extend_chain(self) -> None:
        """chain[i] stands for the key and value of position i: it depends on all tokens up to it."""
        for i in range(len(self.chain), len(self.token_ids)):
            self.chain.append(hash((self.chain[-1] if i else 0, self.token_ids[i])))


class _Done(StepHandle):
    def __init__(self, value: StepResult) -> None:
        self.value = value

    def result(self) -> StepResult:
        return self.value


class FakeRanks(Executor):
    """Executes plans with a pool that remembers which prefix each slot was written for, and raises if a sequence would
    read another's. It learns of sequences from the plans alone, as ranks do.

    on_step: called in the middle of a step, when half of it is written; it may raise.
    """

    def __init__(self, config: SchedulerConfig, next_token: Callable[[list[int]], int] = hashed_token) -> None:
        self.config = config
        self.next_token = next_token
        self.rows: dict[int, _Row] = {}
        self.pool: list[int | None] = [None] * (config.num_blocks * config.block_size)
        self.on_step: Callable[[SchedulerOutput], None] | None = None
        self.num_computed_tokens = 0

    def capacity(self) -> KVCacheCapacity:
        raise NotImplementedError

    def allocate(self, limits: SchedulerConfig) -> None:
        raise NotImplementedError

    def close(self) -> None:
        pass

    def submit(self, plan: SchedulerOutput) -> StepHandle:
        for seq_id in list(self.rows) if plan.forget_all else plan.dropped:
            self.rows.pop(seq_id, None)
        for new in plan.new:
            assert new.seq_id not in self.rows, "a known sequence is introduced again"
            self.rows[new.seq_id] = _Row(new)
        for seq_id, block_ids in plan.new_block_ids.items():
            self.rows[seq_id].blocks += block_ids
        assert len(self.rows) <= self.config.max_num_seqs
        work = [(self.rows[seq_id], count) for seq_id, count in plan.num_scheduled_tokens.items()]
        for row, count in work:
            stop = row.num_computed + count
            assert count > 0 and stop <= len(row.token_ids), "more is scheduled than there are tokens"
            assert len(row.blocks) == -(-stop // self.config.block_size), "the table is not what the tokens need"
            self._assert_readable(row, row.num_computed)
        for i, (row, count) in enumerate(work):
            if self.on_step is not None and i == len(work) // 2:
                self.on_step(plan)
            for position in range(row.num_computed, row.num_computed + count):
                self.pool[self._slot(row, position)] = row.chain[position]
        result = StepResult()
        for row, count in work:
            row.num_computed += count
            self.num_computed_tokens += count
            self._assert_readable(row, row.num_computed)
        for row, _ in work:
            if row.num_computed == len(row.token_ids):
                token_id = self.next_token(row.token_ids)
                result.token_ids[row.new.seq_id] = [token_id]
                if row.new.params.logprobs is not None:
                    result.logprobs[row.new.seq_id] = [TokenLogprobs([token_id], [-float(token_id)], [1])]
                row.token_ids.append(token_id)
                row.extend_chain()
        return _Done(result)

    def _slot(self, row: _Row, position: int) -> int:
        size = self.config.block_size
        return row.blocks[position // size] * size + position % size

    def _assert_readable(self, row: _Row, num_tokens: int) -> None:
        stored = [self.pool[self._slot(row, position)] for position in range(num_tokens)]
        assert stored == row.chain[:num_tokens], f"sequence {row.new.seq_id} would read keys that are not its own"


class LateRanks(FakeRanks):
    """A step runs when its result is asked for, after all that were submitted before it: what is submitted ahead finds
    nothing done. Steps whose results nobody takes run all the same, as a rank's do.

    max_ahead: the most steps that were submitted and not over at any time.
    """

    runs_apart = True

    def __init__(self, config: SchedulerConfig, next_token: Callable[[list[int]], int] = hashed_token) -> None:
        super().__init__(config, next_token)
        self._submitted: deque[_Late] = deque()
        self.max_ahead = 0

    def submit(self, plan: SchedulerOutput) -> StepHandle:
        self._submitted.append(_Late(self, plan))
        self.max_ahead = max(self.max_ahead, len(self._submitted))
        return self._submitted[-1]

    def run_until(self, wanted: _Late) -> None:
        while wanted.value is None:
            late = self._submitted.popleft()
            try:
                late.value = FakeRanks.submit(self, late.plan).result()
            except BaseException:
                self._submitted.clear()  # nothing runs behind a step that has failed
                raise


class _Late(StepHandle):
    def __init__(self, ranks: LateRanks, plan: SchedulerOutput) -> None:
        self.ranks, self.plan = ranks, plan
        self.value: StepResult | None = None

    def result(self) -> StepResult:
        self.ranks.run_until(self)
        assert self.value is not None
        return self.value


def fake_llm(
    directory: Path,
    next_token: Callable[[list[int]], int] = hashed_token,
    ranks: type[FakeRanks] = FakeRanks,
    **options: Any,
) -> LLM:
    """An LLM whose ranks are `FakeRanks`: everything but the model is real."""
    llm = make_llm(directory, **options)
    llm.engine.executor = ranks(llm.engine.scheduler.config, next_token)
    return llm


def scripted(tokenizer: PreTrainedTokenizerBase, prompt: list[int], script: list[int]) -> Callable[[list[int]], int]:
    """A next token that follows `script` after `prompt`, and then repeats its last id."""

    def next_token(token_ids: list[int]) -> int:
        assert token_ids[: len(prompt)] == prompt
        return script[min(len(token_ids) - len(prompt), len(script) - 1)]

    return next_token


# --- Sampling, again ---------------------------------------------------------------------------------------------


def sampling_weights(logits: np.ndarray, params: SamplingParams, prompt: list[int], output: list[int]) -> np.ndarray:
    """The distribution that vLLM's meaning of the parameters gives, unnormalized, float64, by sorting and loops.

    `logits`: [vocab_size]. min_tokens is not looked at: ban ids by passing -inf.
    """
    x = logits.astype(np.float64).copy()
    for token_id in set(prompt) | set(output):
        x[token_id] = (
            x[token_id] / params.repetition_penalty if x[token_id] > 0 else x[token_id] * params.repetition_penalty
        )
    for token_id in output:
        x[token_id] -= params.frequency_penalty
    for token_id in set(output):
        x[token_id] -= params.presence_penalty
    if params.temperature == 0:
        weights = np.zeros_like(x)
        weights[x.argmax()] = 1.0
        return weights
    x /= params.temperature
    probs = np.exp(x - x.max())
    probs /= probs.sum()
    if params.min_p > 0:
        probs[probs < params.min_p * probs.max()] = 0.0
    if 0 < params.top_k < len(probs):
        kth = np.sort(probs)[::-1][params.top_k - 1]
        probs[probs < kth] = 0.0
    probs /= probs.sum()
    if params.top_p < 1:
        order = np.argsort(-probs, kind="stable")
        num_kept = int((np.cumsum(probs[order]) < params.top_p).sum()) + 1
        probs[probs < probs[order[min(num_kept, len(order)) - 1]]] = 0.0
    return probs


def random_prompt(rng: np.random.Generator, length: int, vocab_size: int = 320) -> list[int]:
    return rng.integers(0, vocab_size, length).tolist()


def greedy(max_tokens: int = 16, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **options)


def torch_uniforms(seed: int, count: int) -> np.ndarray:
    """The engine's numbers for a request: what they are is its choice, that they depend on nothing else is tested."""
    from nanoinfer.layers.sampler import uniforms

    return uniforms(np.full(count, seed % 2**64, np.uint64), np.arange(count, dtype=np.uint64))


# --- Ranks side by side in one process ---------------------------------------------------------------------------


class HandMerged(TensorParallelGroup):
    """A rank whose collectives return its own part: the test merges the parts by hand."""

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


def hand_merged(size: int) -> list[ParallelGroups]:
    return [ParallelGroups(tp=HandMerged(rank, size)) for rank in range(size)]


class _Meeting:
    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=60)
        self.parts: list[torch.Tensor | None] = [None] * size


class Lockstep(TensorParallelGroup):
    """A rank that is a thread: collectives meet at a barrier. A mismatch of shapes or dtypes is an error, as it is
    between processes."""

    def __init__(self, rank: int, size: int, meeting: _Meeting) -> None:
        super().__init__(rank, size)
        self._meeting = meeting
        self.num_calls = 0

    def _exchange(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        self.num_calls += 1
        meeting = self._meeting
        meeting.parts[self.rank] = tensor.clone()
        meeting.barrier.wait()
        parts = [part for part in meeting.parts if part is not None]
        meeting.barrier.wait()
        assert len({(part.shape, part.dtype) for part in parts}) == 1, "ranks bring different tensors to a collective"
        return parts

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        parts = self._exchange(tensor)
        tensor.fill_(77)  # it may be overwritten, so nobody may rely on it
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        return total

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat(self._exchange(tensor), dim=-1)


class Ranks:
    """`size` ranks in threads of this process. `run` calls a function once per rank, all at the same time."""

    def __init__(self, size: int) -> None:
        meeting = _Meeting(size)
        self.groups = [ParallelGroups(tp=Lockstep(rank, size, meeting)) for rank in range(size)]
        self._meeting = meeting
        self._pool = ThreadPoolExecutor(size)

    def run(self, function: Callable[[int], Any]) -> list[Any]:
        def guarded(rank: int) -> Any:
            try:
                return function(rank)
            except BaseException:
                self._meeting.barrier.abort()
                raise

        futures = [self._pool.submit(guarded, rank) for rank in range(len(self.groups))]
        errors = [future.exception() for future in futures]
        if failed := [error for error in errors if error is not None]:
            self._meeting.barrier.reset()
            raise min(failed, key=lambda error: isinstance(error, threading.BrokenBarrierError))
        return [future.result() for future in futures]


class LockstepExecutor(Executor):
    """Every rank of an engine, each in its thread. All must return the same result."""

    def __init__(self, llm: LLM, size: int) -> None:
        engine = llm.engine
        directory = Path(engine.config.model)
        self.ranks = Ranks(size)
        self.runners = self.ranks.run(
            lambda rank: ModelRunner(
                engine.config, engine.model_config, directory, engine.seed, self.ranks.groups[rank]
            )
        )
        self.allocate(engine.scheduler.config)
        for runner in self.runners:
            runner._kv_cache.data.fill_(float("nan"))

    @property
    def runner(self) -> ModelRunner:
        return self.runners[0]

    def capacity(self) -> KVCacheCapacity:
        return self.runner.capacity()

    def allocate(self, limits: SchedulerConfig) -> None:
        for runner in self.runners:
            runner.allocate(limits)

    def submit(self, plan: SchedulerOutput) -> StepHandle:
        results = self.ranks.run(lambda rank: self.runners[rank].step(plan))
        assert all(result == results[0] for result in results), "ranks end a step with different tokens"
        return _Done(results[0])

    def close(self) -> None:
        self.runners = []


def lockstep_llm(directory: Path, size: int, **options: Any) -> LLM:
    llm = make_llm(directory, **options)
    llm.engine.executor = LockstepExecutor(llm, size)
    return llm
