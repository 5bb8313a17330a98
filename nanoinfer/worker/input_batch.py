"""`InputBatch`: a rank's rows, one per sequence that it knows, kept from step to step; plans change them by deltas.

What every step needs of every row lies in numpy arrays, so that a step's tensors are built by indexing and not by a
loop over tokens. Called by the model runner: `apply(plan)`, then `build(plan)`, or `decodes(plan)` where a kernel makes
the inputs of decodes, then `commit(...)` when the step is done, or on a GPU launched: there, a row's sampled tokens may
be unknown to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from nanoinfer.attention.base import ForwardBatch
from nanoinfer.kernels.cpu.inputs import DecodeColumns
from nanoinfer.layers.sampler import Bias, Penalty, SamplingBatch, TokenCounts, inverse_temperatures, uniforms
from nanoinfer.step import NewSequence, SchedulerOutput, token_bitmask


@dataclass
class _Row:
    """What only some steps need of a sequence.

    initial_ids: its tokens when it was introduced. allowed: the bit mask of allowed_token_ids.
    output_ids: all of its output, if it has bad words.
    """

    new: NewSequence
    initial_ids: np.ndarray
    counts: TokenCounts | None
    allowed: np.ndarray | None
    output_ids: list[int] | None

    def banned(self, output_index: int) -> list[int]:
        """What min_tokens and bad_words keep out now."""
        banned = list(self.new.stop_token_ids) if output_index < self.new.params.min_tokens else []
        if self.output_ids is not None:
            for *prefix, last in self.new.bad_words:
                if not prefix or self.output_ids[-len(prefix) :] == prefix:
                    banned.append(last)
        return banned


@dataclass(frozen=True)
class PromptPart:
    """Prompt tokens whose log-probabilities a step tells.

    indices: [n] int64, the tokens of the batch that precede them; token_ids: [n] int64.
    """

    seq_id: int
    indices: torch.Tensor
    token_ids: torch.Tensor
    num_best: int


@dataclass(frozen=True)
class StepRows:
    """Which rows a plan runs, in the order of the batch.

    sampled: positions within `rows` of those that sample; longest: most tokens of one, the step's own included.
    """

    seq_ids: list[int]
    rows: np.ndarray
    num_scheduled: np.ndarray
    sampled: np.ndarray
    prompts: list[PromptPart]
    bitmasks: Mapping[int, np.ndarray]
    longest: int


class InputBatch:
    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int, vocab_size: int) -> None:
        self.block_size = block_size
        self.vocab_size = vocab_size
        self._row_of: dict[int, int] = {}
        self._free_rows = list(reversed(range(max_num_seqs)))
        self._rows: list[_Row | None] = [None] * max_num_seqs
        self._num_initial = np.zeros(max_num_seqs, np.int64)
        self._num_prompt = np.zeros(max_num_seqs, np.int64)
        self._num_tokens = np.zeros(max_num_seqs, np.int64)
        self._num_computed = np.zeros(max_num_seqs, np.int64)
        self._last_token = np.zeros(max_num_seqs, np.int64)
        self._num_blocks = np.zeros(max_num_seqs, np.int64)
        self._block_tables = np.zeros((max_num_seqs, -(-max_model_len // block_size)), np.int32)
        self._seeds = np.zeros(max_num_seqs, np.uint64)
        self._temperature = np.zeros(max_num_seqs, np.float64)
        self._top_k = np.zeros(max_num_seqs, np.int64)
        self._top_p = np.zeros(max_num_seqs, np.float64)
        self._min_p = np.zeros(max_num_seqs, np.float64)
        # Rows whose sampling needs more than the arrays: penalties, min_tokens, logprobs, and what limits the choice.
        self._special = np.zeros(max_num_seqs, bool)
        # Rows that draw from what min_p, top_k or top_p leaves.
        self._filtered = np.zeros(max_num_seqs, bool)
        # Rows whose sampling depends on what was sampled before: penalties and bad words.
        self._needs_tokens = np.zeros(max_num_seqs, bool)

    def __len__(self) -> int:
        return len(self._row_of)

    def apply(self, plan: SchedulerOutput) -> None:
        """Takes in what the plan says about sequences coming, going and growing."""
        for seq_id in list(self._row_of) if plan.forget_all else plan.dropped:
            row = self._row_of.pop(seq_id, None)
            if row is not None:
                self._rows[row] = None
                self._free_rows.append(row)
        for new in plan.new:
            self._add(new)
        for seq_id, block_ids in plan.new_block_ids.items():
            row = self._row_of[seq_id]
            start = self._num_blocks[row]
            self._block_tables[row, start : start + len(block_ids)] = block_ids
            self._num_blocks[row] += len(block_ids)

    def _add(self, new: NewSequence) -> None:
        row = self._free_rows.pop()
        self._row_of[new.seq_id] = row
        ids, params = np.array(new.token_ids, np.int64), new.params
        counts = None
        if params.has_penalties:
            counts = TokenCounts.of(self.vocab_size, ids[: new.num_prompt_tokens], ids[new.num_prompt_tokens :])
        allowed = None
        if params.allowed_token_ids is not None:
            allowed = token_bitmask(params.allowed_token_ids, self.vocab_size)
        output_ids = list(new.token_ids[new.num_prompt_tokens :]) if new.bad_words else None
        self._rows[row] = _Row(new, ids, counts, allowed, output_ids)
        self._num_initial[row] = self._num_tokens[row] = len(ids)
        self._num_prompt[row] = new.num_prompt_tokens
        self._num_computed[row] = new.num_computed_tokens
        self._num_blocks[row] = len(new.block_ids)
        self._block_tables[row, : len(new.block_ids)] = new.block_ids
        self._seeds[row] = new.seed
        self._temperature[row] = 0.0 if params.is_greedy else params.temperature
        self._top_k[row] = max(params.top_k, 0)
        self._top_p[row] = params.top_p
        self._min_p[row] = params.min_p
        limits_choice = params.allowed_token_ids is not None or params.logit_bias is not None or bool(new.bad_words)
        with_logprobs = params.logprobs is not None
        self._needs_tokens[row] = params.has_penalties or bool(new.bad_words)
        self._special[row] = params.has_penalties or params.min_tokens > 0 or with_logprobs or limits_choice
        has_filter = params.top_k > 0 or params.top_p < 1 or params.min_p > 0
        self._filtered[row] = has_filter and not params.is_greedy

    def row_of(self, seq_id: int) -> int:
        return self._row_of[seq_id]

    def num_blocks(self, row: int) -> int:
        return int(self._num_blocks[row])

    def row_settings(self, rows: np.ndarray) -> list[np.ndarray]:
        """Of those rows: num_prompt, seeds (the bits), inverse temperature (0: greedy), min_p, top_k, top_p.

        In the device's types: int32, int64, float32, float32, int32, float32.
        """
        return [
            self._num_prompt[rows].astype(np.int32),
            self._seeds[rows].view(np.int64),
            inverse_temperatures(self._temperature[rows]),
            self._min_p[rows].astype(np.float32),
            self._top_k[rows].clip(0, 2**31 - 1).astype(np.int32),
            self._top_p[rows].astype(np.float32),
        ]

    def decode_columns(self) -> DecodeColumns:
        """Of all rows, as they are at any time: no copies."""
        return DecodeColumns(
            self._last_token,
            self._num_computed,
            self._num_tokens,
            self._num_prompt,
            self._block_tables,
            self._seeds,
            self._temperature,
        )

    def num_computed(self, rows: np.ndarray) -> np.ndarray:
        return self._num_computed[rows]

    def has_filters(self, rows: np.ndarray) -> bool:
        """Whether any of them samples with min_p, top_k or top_p."""
        return bool(self._filtered[rows].any())

    def is_plain(self, step: StepRows) -> bool:
        """Whether all that sample are sampled by temperature alone."""
        return not self.has_special(step) and not self.has_filters(step.rows[step.sampled])

    def has_special(self, step: StepRows) -> bool:
        """Whether any row that samples has penalties, min_tokens, logprobs, or a limited choice."""
        return bool(step.bitmasks) or bool(self._special[step.rows[step.sampled]].any())

    def needs_tokens(self, step: StepRows) -> bool:
        """Whether `commit` has to know the tokens."""
        return bool(self._needs_tokens[step.rows[step.sampled]].any())

    def sampled_inputs(self, step: StepRows) -> tuple[np.ndarray, np.ndarray]:
        """Which tokens of the step's batch are a row's last sampled one, and of which rows; [n] int64 each."""
        is_sampled = self._num_computed[step.rows] >= self._num_initial[step.rows]
        first = step.num_scheduled.cumsum() - step.num_scheduled
        return first[is_sampled], step.rows[is_sampled]

    def decodes(self, plan: SchedulerOutput, *, longest_first: bool = False) -> StepRows | None:
        """The step's rows if each computes its last sampled token and nothing else, or None.

        longest_first: in place of the plan's order.
        """
        seq_ids = list(plan.num_scheduled_tokens)
        if plan.num_tokens != len(seq_ids):
            return None
        rows = np.fromiter((self._row_of[seq_id] for seq_id in seq_ids), np.int64, len(seq_ids))
        computed = self._num_computed[rows]
        if bool((computed < self._num_initial[rows]).any()):
            return None
        if longest_first:
            order = np.argsort(-computed, kind="stable")
            rows, seq_ids = rows[order], [seq_ids[i] for i in order.tolist()]
        longest = int(computed.max()) + 1
        return StepRows(seq_ids, rows, np.ones(len(rows), np.int64), np.arange(len(rows)), [], plan.bitmasks, longest)

    def build(self, plan: SchedulerOutput) -> tuple[StepRows, ForwardBatch]:
        """The step's tensors, on the CPU."""
        if (step := self.decodes(plan)) is not None:
            return step, self._decode_batch(step)
        seq_ids = list(plan.num_scheduled_tokens)
        rows = np.fromiter((self._row_of[seq_id] for seq_id in seq_ids), np.int64, len(seq_ids))
        num_scheduled = np.fromiter(plan.num_scheduled_tokens.values(), np.int64, len(seq_ids))
        computed = self._num_computed[rows]
        seq_lens = computed + num_scheduled
        query_start_loc = np.concatenate(([0], num_scheduled.cumsum()))
        sampled = np.flatnonzero(seq_lens == self._num_tokens[rows])

        # For each token of the batch: which of `rows` it belongs to, and its position in that sequence.
        owner = np.repeat(np.arange(len(rows)), num_scheduled)
        positions = np.arange(query_start_loc[-1]) - query_start_loc[owner] + computed[owner]
        # The last sampled token of a sequence; wrong for sequences that still have initial tokens to compute.
        input_ids = self._last_token[rows[owner]]
        prompts: list[PromptPart] = []
        for i in np.flatnonzero(computed < self._num_initial[rows]):
            row = self._rows[rows[i]]
            assert row is not None
            input_ids[query_start_loc[i] : query_start_loc[i + 1]] = row.initial_ids[computed[i] : seq_lens[i]]
            if row.new.prompt_logprobs is not None:
                prompts += _prompt_part(row.new, row.initial_ids, int(query_start_loc[i]), computed[i], seq_lens[i])
        num_columns = -(-int(seq_lens.max()) // self.block_size)
        block_tables = self._block_tables[rows, :num_columns]
        slots = block_tables[owner, positions // self.block_size].astype(np.int64) * self.block_size
        slots += positions % self.block_size
        batch = ForwardBatch(
            input_ids=torch.from_numpy(input_ids),
            positions=torch.from_numpy(positions),
            query_start_loc=torch.from_numpy(query_start_loc.astype(np.int32)),
            seq_lens=torch.from_numpy(seq_lens.astype(np.int32)),
            block_tables=torch.from_numpy(block_tables),
            slot_mapping=torch.from_numpy(slots),
            logits_indices=torch.from_numpy(query_start_loc[sampled + 1] - 1),
            max_query_len=int(num_scheduled.max()),
            max_seq_len=int(seq_lens.max()),
        )
        return StepRows(seq_ids, rows, num_scheduled, sampled, prompts, plan.bitmasks, batch.max_seq_len), batch

    def _decode_batch(self, step: StepRows) -> ForwardBatch:
        """What `build` makes of a step in which each row computes its last sampled token."""
        n, positions = len(step.rows), self._num_computed[step.rows]
        block_tables = self._block_tables[step.rows, : -(-step.longest // self.block_size)]
        column, offset = np.divmod(positions, self.block_size)
        slots = block_tables[step.sampled, column].astype(np.int64) * self.block_size + offset
        return ForwardBatch(
            input_ids=torch.from_numpy(self._last_token[step.rows]),
            positions=torch.from_numpy(positions),
            query_start_loc=torch.arange(n + 1, dtype=torch.int32),
            seq_lens=torch.from_numpy((positions + 1).astype(np.int32)),
            block_tables=torch.from_numpy(block_tables),
            slot_mapping=torch.from_numpy(slots),
            logits_indices=torch.from_numpy(step.sampled),
            max_query_len=1,
            max_seq_len=step.longest,
        )

    def sampling(self, step: StepRows) -> SamplingBatch:
        """How the step's sampling rows are to be sampled."""
        rows = step.rows[step.sampled]
        output_indices = self._num_tokens[rows] - self._num_prompt[rows]
        batch = SamplingBatch(
            temperature=self._temperature[rows],
            top_k=self._top_k[rows],
            top_p=self._top_p[rows],
            min_p=self._min_p[rows],
            uniforms=uniforms(self._seeds[rows], output_indices.astype(np.uint64)),
        )
        for i in np.flatnonzero(self._special[rows]).tolist():
            row = self._rows[rows[i]]
            assert row is not None
            params = row.new.params
            if row.counts is not None:
                batch.penalties[i] = Penalty(
                    row.counts, params.repetition_penalty, params.presence_penalty, params.frequency_penalty
                )
            if params.logit_bias is not None:
                batch.biases[i] = Bias.of(params.logit_bias)
            if row.allowed is not None:
                batch.masks[i] = row.allowed
            if banned := row.banned(output_indices[i]):
                batch.banned[i] = banned
            if params.logprobs is not None:
                batch.logprobs[i] = params.logprobs
        if step.bitmasks:
            for i, position in enumerate(step.sampled.tolist()):
                if (words := step.bitmasks.get(step.seq_ids[position])) is not None:
                    batch.masks[i] = words
        for i in list(batch.banned):
            if not _leaves_any(batch.masks.get(i), batch.banned[i], self.vocab_size):
                del batch.banned[i]
        return batch

    def commit(self, step: StepRows, token_ids: list[int] | None) -> None:
        """The step is done: its tokens are computed, and the sampling rows have one token more.

        token_ids: None if they are on the device only, which is in order unless `needs_tokens(step)`.
        """
        self._num_computed[step.rows] += step.num_scheduled
        rows = step.rows[step.sampled]
        self._num_tokens[rows] += 1
        if token_ids is None:
            return
        self._last_token[rows] = token_ids
        for i in np.flatnonzero(self._needs_tokens[rows]).tolist():
            row = self._rows[rows[i]]
            assert row is not None
            if row.counts is not None:
                row.counts.output[token_ids[i]] += 1
            if row.output_ids is not None:
                row.output_ids.append(token_ids[i])


def _prompt_part(new: NewSequence, ids: np.ndarray, first: int, computed: int, stop: int) -> Iterable[PromptPart]:
    """What a step that computes the tokens `computed` to `stop - 1`, from index `first` of the batch on, can tell."""
    assert new.prompt_logprobs is not None
    stop = min(stop, new.num_prompt_tokens - 1)
    if computed < stop:
        indices = torch.arange(first, first + stop - computed)
        yield PromptPart(
            new.seq_id, indices, torch.from_numpy(ids[computed + 1 : stop + 1].copy()), new.prompt_logprobs
        )


def _leaves_any(mask: np.ndarray | None, banned: list[int], vocab_size: int) -> bool:
    """Whether a token can still be drawn; the mask alone (None: all) allows at least one."""
    if mask is None:
        return len(set(banned)) < vocab_size
    return bool((mask & ~token_bitmask(banned, vocab_size)).any())
