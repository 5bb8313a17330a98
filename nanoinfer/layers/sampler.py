"""The sampler: logits in, one token id per row out, with raw log-probabilities where asked.

Each row spends one uniform number, turned into a token by the inverse of the cumulative distribution in the order of
the vocabulary. The number is a function of the request's seed and the output index alone, so draws do not depend on
batch, position, chunking or preemption. Filters are thresholds: tokens tied with the last one kept are kept, which
makes them independent of any sorting order.

The order is vLLM's: masks, bans, biases, penalties, temperature, min_p, top_k, top_p.

Under tensor parallelism each rank works on its slice of the vocabulary. Per row the ranks exchange the slice's maximum,
its sum of weights and the winner, and all end with the same ids (ties to the lower one); for top_k and top_p also the
largest weights of each slice. Whole rows are gathered only where top_p keeps more tokens than those.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from nanoinfer.distributed.group import TensorParallelGroup
from nanoinfer.kernels import reference
from nanoinfer.kernels.cpu.ops import kernels_for
from nanoinfer.step import TokenLogprobs

# Rows worked on at once: bounds the float32 copies (20 MB each for Qwen3's vocabulary).
_CHUNK_ROWS = 32
# The distribution is summed by segments of so many tokens; only the segment that is hit is looked at token by token.
SEGMENT = 512
# Largest weights of each slice looked at before whole rows are, for top_p.
_TOP_P_CANDIDATES = 512


@dataclass
class TokenCounts:
    """What penalties need to know of one row. in_prompt: [vocab_size] bool; output: [vocab_size] int32."""

    in_prompt: torch.Tensor
    output: torch.Tensor

    @classmethod
    def of(cls, vocab_size: int, prompt: np.ndarray, output: np.ndarray) -> TokenCounts:
        in_prompt = torch.zeros(vocab_size, dtype=torch.bool)
        in_prompt[torch.from_numpy(prompt)] = True
        counts = torch.bincount(torch.from_numpy(output), minlength=vocab_size).to(torch.int32)
        return cls(in_prompt, counts)


@dataclass(frozen=True)
class VocabShard:
    """The ids of this rank's logits: `first_id` and following ones. Ranks hold equal numbers of columns."""

    tp: TensorParallelGroup = field(default_factory=TensorParallelGroup.single)
    first_id: int = 0


@dataclass(frozen=True)
class Penalty:
    counts: TokenCounts
    repetition: float
    presence: float
    frequency: float


@dataclass(frozen=True)
class Bias:
    """token_ids: [n] int64, no two alike; values: [n] float32, added to their logits."""

    token_ids: torch.Tensor
    values: torch.Tensor

    @classmethod
    def of(cls, biases: Mapping[int, float]) -> Bias:
        return cls(torch.tensor(list(biases)), torch.tensor(list(biases.values()), dtype=torch.float32))


@dataclass
class SamplingBatch:
    """How to sample the rows of a batch of logits. Arrays have one entry per row; dicts are keyed by row.

    temperature: 0 is greedy; top_k: 0 is off; uniforms: [0, 1), float64.
    masks: which ids may be drawn, at least one: [ceil(vocab_size / 32)] int32, a set bit allows.
    banned: ids that min_tokens or bad_words keep out.
    logprobs: the number of best tokens to report.
    """

    temperature: np.ndarray
    top_k: np.ndarray
    top_p: np.ndarray
    min_p: np.ndarray
    uniforms: np.ndarray
    penalties: dict[int, Penalty] = field(default_factory=dict)
    masks: dict[int, np.ndarray] = field(default_factory=dict)
    banned: dict[int, list[int]] = field(default_factory=dict)
    biases: dict[int, Bias] = field(default_factory=dict)
    logprobs: dict[int, int] = field(default_factory=dict)

    def filtered(self, rows: range) -> np.ndarray:
        """Which of those rows draw from what a filter leaves, counted from the first of them: [n] int64."""
        own = slice(rows.start, rows.stop)
        has_filter = (self.min_p[own] > 0) | (self.top_k[own] > 0) | (self.top_p[own] < 1)
        return np.flatnonzero(has_filter & (self.temperature[own] > 0))

    @property
    def adjusts_logits(self) -> bool:
        """Whether any row has more than temperature and filters."""
        return bool(self.masks or self.banned or self.biases or self.penalties)


def uniforms(seeds: np.ndarray, output_indices: np.ndarray) -> np.ndarray:
    """One number in [0, 1) per (seed, output index), both uint64: two rounds of SplitMix64 (Steele et al., 2014)."""

    def mix(z: np.ndarray) -> np.ndarray:
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))

    golden = np.uint64(0x9E3779B97F4A7C15)
    with np.errstate(over="ignore"):
        z = mix(mix(seeds + golden) + output_indices * golden + golden)
    # 32 bits: below 1 by more than any rounding of the products that follow.
    return (z >> np.uint64(32)).astype(np.float64) * 2.0**-32


def checked(token_ids: list[int]) -> list[int]:
    """The ids; FloatingPointError if one of them is none."""
    if min(token_ids, default=0) < 0:
        raise FloatingPointError(
            "the model's logits contain NaN or infinity; float16 overflows on models trained in bfloat16: use "
            "dtype='bfloat16' or 'float32'"
        )
    return token_ids


def sample(
    logits: torch.Tensor, batch: SamplingBatch, shard: VocabShard | None = None
) -> tuple[list[int], dict[int, TokenLogprobs]]:
    """logits: [num_rows, columns], any float dtype, not modified; the rank's slice of the vocabulary (default: all).

    Returns ids and, by row, log-probabilities; the same on every rank. Raises FloatingPointError if a row has NaN or no
    finite maximum: then the model has overflowed, and any token would be noise.
    """
    shard = shard or VocabShard()
    token_ids: list[int] = []
    logprobs: dict[int, TokenLogprobs] = {}
    for start in range(0, len(logits), _CHUNK_ROWS):
        rows = range(start, min(start + _CHUNK_ROWS, len(logits)))
        raw = logits[start : rows.stop]
        chosen = _choose(_adjust(raw, rows, batch, shard), rows, batch, shard)
        token_ids += checked(chosen.tolist())
        wanted = [row for row in rows if row in batch.logprobs]
        if wanted:
            local = [row - start for row in wanted]
            logprobs |= row_logprobs(raw[local].float(), chosen[local], wanted, batch.logprobs, shard)
    return token_ids, logprobs


def token_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, num_best: int, shard: VocabShard
) -> list[TokenLogprobs]:
    """Raw log-probabilities of given tokens, [n], and of the best ones beside them. logits: [n, columns] as above."""
    found: list[TokenLogprobs] = []
    for start in range(0, len(logits), _CHUNK_ROWS):
        raw = logits[start : start + _CHUNK_ROWS].float()
        rows = list(range(len(raw)))
        chunk = row_logprobs(raw, token_ids[start : start + _CHUNK_ROWS], rows, dict.fromkeys(rows, num_best), shard)
        found += [chunk[row] for row in rows]
    return found


def _adjust(raw: torch.Tensor, rows: range, batch: SamplingBatch, shard: VocabShard) -> torch.Tensor:
    """Masks, bans, biases and penalties on the rows that have them, in float32; `raw` itself, as it is, if none has."""
    if not batch.adjusts_logits:
        return raw
    tables = (batch.masks, batch.banned, batch.biases, batch.penalties)
    affected = [row for row in rows if any(row in table for table in tables)]
    if not affected:
        return raw
    processed = raw.float() if raw.dtype != torch.float32 else raw.clone()
    for row in affected:
        x = processed[row - rows.start]
        if row in batch.masks:
            _apply_mask(x, batch.masks[row], shard)
        x[_own_columns(batch.banned.get(row, ()), shard, len(x))] = float("-inf")
        if row in batch.biases:
            columns = batch.biases[row].token_ids - shard.first_id
            is_mine = (columns >= 0) & (columns < len(x))
            x[columns[is_mine]] += batch.biases[row].values[is_mine]
        if row in batch.penalties:
            _apply_penalty(x, batch.penalties[row], shard)
    return processed


def _apply_mask(x: torch.Tensor, words: np.ndarray, shard: VocabShard) -> None:
    """x: one row of this rank's columns. Columns beyond the words are padding, and -inf as they are."""
    bits = np.unpackbits(words.astype("<i4", copy=False).view(np.uint8), bitorder="little")
    allowed = torch.from_numpy(bits[shard.first_id : shard.first_id + len(x)]).to(x.device)
    x[: len(allowed)].masked_fill_(allowed == 0, float("-inf"))


def _own_columns(token_ids: Sequence[int], shard: VocabShard, num_columns: int) -> list[int]:
    columns = [token_id - shard.first_id for token_id in token_ids]
    return [column for column in columns if 0 <= column < num_columns]


def _apply_penalty(x: torch.Tensor, penalty: Penalty, shard: VocabShard) -> None:
    counts = penalty.counts
    mine = slice(shard.first_id, min(shard.first_id + len(x), len(counts.output)))
    output = counts.output[mine]
    x = x[: len(output)]
    seen = counts.in_prompt[mine] | (output > 0)
    scaled = torch.where(x > 0, x / penalty.repetition, x * penalty.repetition)
    x.copy_(torch.where(seen, scaled, x))
    x -= penalty.frequency * output
    x -= penalty.presence * (output > 0)


def inverse_temperatures(temperature: np.ndarray) -> np.ndarray:
    """float32; 0 for greedy rows, else neither infinite nor 0, so that a masked logit times it stays at -inf."""
    is_random = temperature > 0
    limits = np.finfo(np.float32)
    inverse = (1.0 / np.where(is_random, temperature, 1.0)).clip(limits.tiny, limits.max)
    return np.where(is_random, inverse, 0.0).astype(np.float32)


def _choose(logits: torch.Tensor, rows: range, batch: SamplingBatch, shard: VocabShard) -> torch.Tensor:
    """One id per row, [n] int64; -1 where no logit is the largest. logits: [n, columns], penalties applied."""
    kernels = kernels_for(logits.dtype, logits.device.type)
    inverse = torch.from_numpy(inverse_temperatures(batch.temperature[rows.start : rows.stop]))
    uniforms = torch.from_numpy(np.ascontiguousarray(batch.uniforms[rows.start : rows.stop]))
    filtered = batch.filtered(rows)
    # Torch's operators take 20 to 60 us each when a step's weights have gone through the caches.
    if kernels is not None and shard.tp.size == 1 and not len(filtered):
        return kernels.choose(logits, inverse, uniforms, SEGMENT)
    maxima, winners = (kernels or reference).row_argmax(logits)
    best, greedy = _best_of_ranks(maxima, winners, shard)
    if not bool(best.isfinite().all()):
        return greedy.where(best.isfinite(), -1)
    if not bool(inverse.any()):
        return greedy
    is_random, inverse = inverse > 0, inverse.where(inverse > 0, 1.0)
    if len(filtered):
        logits = _filter(logits, best, inverse, torch.from_numpy(filtered), batch, rows, shard)
    return torch.where(is_random, _draw(logits, best, inverse, uniforms, shard), greedy)


def _best_of_ranks(maxima: torch.Tensor, winners: torch.Tensor, shard: VocabShard) -> tuple[torch.Tensor, torch.Tensor]:
    """(best logit, its id) of each row over the whole vocabulary, from this rank's columns."""
    if shard.tp.size == 1:
        return maxima, winners
    summary = torch.stack((maxima.double(), (winners + shard.first_id).double()), dim=1)
    summary = shard.tp.all_gather(summary).unflatten(1, (-1, 2))
    # argmax takes NaN for the largest and the first of equals for the winner, within a shard and between shards.
    best_rank = summary[:, :, 0].argmax(dim=1, keepdim=True)
    best = summary[:, :, 0].gather(1, best_rank).squeeze(1).float()
    greedy = summary[:, :, 1].gather(1, best_rank).squeeze(1).long()
    return best, greedy


def _filter(
    logits: torch.Tensor,
    best: torch.Tensor,
    inverse: torch.Tensor,
    filtered: torch.Tensor,
    batch: SamplingBatch,
    rows: range,
    shard: VocabShard,
) -> torch.Tensor:
    """The logits, in float32, with what min_p, top_k and top_p drop of the `filtered` ones of the rows at -inf."""
    settings = (batch.min_p, batch.top_k, batch.top_p)
    min_p, top_k, top_p = (torch.from_numpy(x[rows.start : rows.stop])[filtered].unsqueeze(1) for x in settings)
    mine = reference.sampling_weights(logits[filtered], best[filtered], inverse[filtered])
    # The best token has weight 1, so min_p is a threshold as it stands.
    threshold = min_p.float()
    if bool(((top_k > 0) | (top_p < 1)).any()):
        threshold = _threshold(mine, threshold, top_k, top_p, shard)
    logits = logits.float().clone()
    logits[filtered] = logits[filtered].masked_fill_(mine < threshold, float("-inf"))
    return logits


def _threshold(
    mine: torch.Tensor, least: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, shard: VocabShard
) -> torch.Tensor:
    """The weight, [n, 1], below which top_k and then top_p drop; at least `least` [n, 1].

    mine: [n, columns], this rank's weights. The ranks exchange their largest ones, and look at whole rows only where
    top_p alone would keep more than those.
    """
    count = max(int(top_k.max()), _TOP_P_CANDIDATES if bool((top_p < 1).any()) else 0)
    local = mine.topk(min(count, mine.shape[1]), dim=-1).values
    largest = shard.tp.all_gather(local).sort(dim=-1, descending=True).values
    kth = largest.gather(1, (top_k - 1).clamp(0, largest.shape[1] - 1))
    least = torch.maximum(least, kth.where(top_k > 0, 0.0))
    if not bool((top_p < 1).any()):
        return least
    kept = mine.where(mine >= least, 0.0).sum(dim=-1, keepdim=True, dtype=torch.float64)
    goal = shard.tp.all_gather(kept).sum(dim=-1, keepdim=True) * top_p
    # Out of reach of the candidates: all others that are kept are ties at `least`, or top_p wants the tail as well.
    short = largest.where(largest >= least, 0.0).sum(dim=-1, keepdim=True, dtype=torch.float64) < goal
    if bool((short & (top_p < 1) & (largest[:, -1:] > least)).any()):
        largest = shard.tp.all_gather(mine).sort(dim=-1, descending=True).values
    # The first position where the cumulative sum reaches the goal is the last one kept.
    cumulative = largest.where(largest >= least, 0.0).cumsum(dim=-1, dtype=torch.float64)
    reached = torch.searchsorted(cumulative, goal).clamp(max=largest.shape[1] - 1)
    return torch.maximum(least, largest.gather(1, reached).where(top_p < 1, 0.0))


def _draw(
    logits: torch.Tensor, best: torch.Tensor, inverse: torch.Tensor, uniforms: torch.Tensor, shard: VocabShard
) -> torch.Tensor:
    """Ids, [n], at which the cumulative weight over the whole vocabulary passes `uniforms` [n] of its total.

    A token's weight is exp((logit - best) / temperature). logits: [n, columns], this rank's.
    """
    kernels = kernels_for(logits.dtype, logits.device.type)
    if kernels is not None and shard.tp.size == 1:
        return kernels.choose(logits, inverse, uniforms, SEGMENT)
    sums = (kernels or reference).segment_sums(logits, best, inverse, SEGMENT)
    cumulative = sums.cumsum(dim=-1)
    rank_ends = shard.tp.all_gather(cumulative[:, -1:].contiguous()).cumsum(dim=-1)
    target = uniforms.unsqueeze(1) * rank_ends[:, -1:]
    # The first end above the target: what it belongs to has itself a weight above zero.
    owner = torch.searchsorted(rank_ends, target, right=True)
    if shard.tp.rank > 0:
        target = target - rank_ends[:, shard.tp.rank - 1 : shard.tp.rank]
    # Sums in another order may differ in the last bit: stay on the last segment, and token, that can be drawn.
    last_segment = torch.where(sums > 0, torch.arange(sums.shape[1]), 0).amax(dim=-1, keepdim=True)
    segment = torch.minimum(torch.searchsorted(cumulative, target, right=True), last_segment)
    before = torch.where(segment > 0, cumulative.gather(1, (segment - 1).clamp(min=0)), 0.0)
    # Only the segment that is hit is looked at token by token; columns beyond the last one weigh nothing.
    columns = segment * SEGMENT + torch.arange(SEGMENT)
    inside = logits.gather(1, columns.clamp(max=logits.shape[1] - 1))
    weights = reference.sampling_weights(inside, best, inverse).masked_fill_(columns >= logits.shape[1], 0.0)
    offset = torch.searchsorted(weights.cumsum(dim=-1, dtype=torch.float64), target - before, right=True)
    last = torch.where(weights > 0, torch.arange(SEGMENT), 0).amax(dim=-1, keepdim=True)
    token_ids = shard.first_id + segment * SEGMENT + torch.minimum(offset, last)
    return shard.tp.all_reduce(token_ids.where(owner == shard.tp.rank, 0)).squeeze(1)


def row_logprobs(
    raw: torch.Tensor, chosen: torch.Tensor, rows: list[int], num_best: dict[int, int], shard: VocabShard
) -> dict[int, TokenLogprobs]:
    """Of the raw distribution, for the rows of `raw` [n, columns], whose keys are `rows`. chosen: [n] ids."""
    found: dict[int, TokenLogprobs] = {}
    # A few rows at a time, since the normalizer is summed in float64.
    for start in range(0, len(rows), _CHUNK_ROWS):
        chunk = slice(start, start + _CHUNK_ROWS)
        found |= _chunk_logprobs(raw[chunk].float(), chosen[chunk], rows[chunk], num_best, shard)
    return found


def _chunk_logprobs(
    raw: torch.Tensor, chosen: torch.Tensor, rows: list[int], num_best: dict[int, int], shard: VocabShard
) -> dict[int, TokenLogprobs]:
    tp = shard.tp
    normalizer = tp.all_gather(raw.double().logsumexp(dim=-1, keepdim=True)).logsumexp(dim=-1, keepdim=True)
    column = (chosen - shard.first_id).unsqueeze(1)
    is_mine = (column >= 0) & (column < raw.shape[1])
    own = tp.all_reduce(raw.gather(1, column.clamp(0, raw.shape[1] - 1)).where(is_mine, 0.0))
    ranks = tp.all_reduce((raw > own).sum(dim=-1)) + 1
    k = min(max(num_best[row] for row in rows), raw.shape[1])
    local = raw.topk(k, dim=-1)
    values = tp.all_gather(local.values)
    ids = tp.all_gather(local.indices + shard.first_id)
    best = values.topk(k, dim=-1)
    best_ids = ids.gather(1, best.indices).tolist()
    # Whole tensors, not their elements: on a GPU each transfer is a wait.
    token_ids, own_ranks = chosen.tolist(), ranks.flatten().tolist()
    own_logprobs = (own.double() - normalizer).flatten().tolist()
    best_logprobs = (best.values.double() - normalizer).tolist()
    return {
        row: TokenLogprobs(
            token_ids=[token_ids[i], *best_ids[i][: num_best[row]]],
            logprobs=[own_logprobs[i], *best_logprobs[i][: num_best[row]]],
            ranks=[own_ranks[i], *range(1, min(num_best[row], k) + 1)],
        )
        for i, row in enumerate(rows)
    }
