"""The sampler: logits in, one token id per row out, with raw log-probabilities where asked.

Each row spends one uniform number, turned into a token by the inverse of the cumulative distribution in the order of
the vocabulary. The number is a function of the request's seed and the output index alone, so draws do not depend on
batch, position, chunking or preemption. Filters are thresholds: tokens tied with the last one kept are kept, which
makes them independent of any sorting order.

The order is vLLM's: penalties, min_tokens, temperature, min_p, top_k, top_p.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from nanoinfer.step import TokenLogprobs

# Rows worked on at once: bounds the float32 and float64 copies (about 25 MB for Qwen3's vocabulary).
_CHUNK_ROWS = 16
# Candidates looked at before a whole row is sorted for top_p.
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
class Penalty:
    counts: TokenCounts
    repetition: float
    presence: float
    frequency: float


@dataclass
class SamplingBatch:
    """How to sample the rows of a batch of logits. Arrays have one entry per row; dicts are keyed by row.

    temperature: 0 is greedy; top_k: 0 is off; uniforms: [0, 1), float64.
    banned: ids that min_tokens keeps out; logprobs: the number of best tokens to report.
    """

    temperature: np.ndarray
    top_k: np.ndarray
    top_p: np.ndarray
    min_p: np.ndarray
    uniforms: np.ndarray
    penalties: dict[int, Penalty] = field(default_factory=dict)
    banned: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, int] = field(default_factory=dict)


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


def sample(logits: torch.Tensor, batch: SamplingBatch) -> tuple[list[int], dict[int, TokenLogprobs]]:
    """logits: [num_rows, vocab_size], any float dtype, not modified. Returns ids and, by row, log-probabilities.

    Raises FloatingPointError if a row has NaN: then the model has overflowed, and any token would be noise.
    """
    token_ids: list[int] = []
    logprobs: dict[int, TokenLogprobs] = {}
    for start in range(0, len(logits), _CHUNK_ROWS):
        rows = range(start, min(start + _CHUNK_ROWS, len(logits)))
        raw = logits[start : rows.stop].float()
        processed = _apply_penalties(raw, rows, batch)
        best, greedy = processed.max(dim=-1)
        if bool(best.isnan().any()):
            raise FloatingPointError(
                f"the model's logits contain NaN (logits are {logits.dtype}); float16 overflows on models trained in "
                "bfloat16: use dtype='bfloat16' or 'float32'"
            )
        chosen = greedy
        is_random = torch.from_numpy(batch.temperature[start : rows.stop] > 0)
        if bool(is_random.any()):
            chosen = torch.where(is_random, _draw(processed, rows, batch), greedy)
        token_ids += chosen.tolist()
        for row in rows:
            if row in batch.logprobs:
                logprobs[row] = _logprobs(raw[row - start], token_ids[row], batch.logprobs[row])
    return token_ids, logprobs


def _apply_penalties(raw: torch.Tensor, rows: range, batch: SamplingBatch) -> torch.Tensor:
    """Penalties and bans on the rows that have them; `raw` itself if none has."""
    affected = [row for row in rows if row in batch.penalties or row in batch.banned]
    if not affected:
        return raw
    processed = raw.clone()
    for row in affected:
        x = processed[row - rows.start]
        if (penalty := batch.penalties.get(row)) is not None:
            counts = penalty.counts
            seen = counts.in_prompt | (counts.output > 0)
            scaled = torch.where(x > 0, x / penalty.repetition, x * penalty.repetition)
            x.copy_(torch.where(seen, scaled, x))
            x -= penalty.frequency * counts.output
            x -= penalty.presence * (counts.output > 0)
        if (banned := batch.banned.get(row)) is not None:
            x[banned] = float("-inf")
    return processed


def _draw(processed: torch.Tensor, rows: range, batch: SamplingBatch) -> torch.Tensor:
    """One token per row by inverse CDF; meaningless for greedy rows. processed: [n, vocab_size] float32."""

    def column(values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values[rows.start : rows.stop])).unsqueeze(1)

    temperature = column(batch.temperature).float()
    x = processed / temperature.where(temperature > 0, 1.0)
    x -= x.amax(dim=-1, keepdim=True)
    probs = x.exp_()
    # The best token has weight 1, so min_p is a threshold as it stands. Weights are normalized by the draw.
    min_p = column(batch.min_p).float()
    if bool((min_p > 0).any()):
        probs.masked_fill_(probs < min_p, 0.0)
    top_k = column(batch.top_k)
    if bool((top_k > 0).any()):
        _keep_top_k(probs, top_k)
    top_p = column(batch.top_p)
    if bool((top_p < 1).any()):
        _keep_top_p(probs, top_p)
    cumulative = probs.cumsum(dim=-1, dtype=torch.float64)
    target = column(batch.uniforms) * cumulative[:, -1:]
    # The first entry above the target has itself a weight above zero.
    return torch.searchsorted(cumulative, target, right=True).squeeze(1)


def _keep_top_k(weights: torch.Tensor, top_k: torch.Tensor) -> None:
    """Zeros what is below each row's k-th largest weight. top_k: [n, 1]; 0 keeps all."""
    vocab_size = weights.shape[1]
    kth = top_k.clamp(1, vocab_size)
    largest = weights.topk(int(kth.max()), dim=-1).values
    threshold = largest.gather(1, kth - 1).where(top_k > 0, 0.0)
    weights.masked_fill_(weights < threshold, 0.0)


def _keep_top_p(weights: torch.Tensor, top_p: torch.Tensor) -> None:
    """Zeros what is not in the smallest set of largest weights whose share reaches top_p. top_p: [n, 1] float64."""
    goal = weights.sum(dim=-1, keepdim=True, dtype=torch.float64) * top_p
    candidates = min(_TOP_P_CANDIDATES, weights.shape[1])
    largest = weights.topk(candidates, dim=-1).values
    if bool((largest.sum(dim=-1, keepdim=True, dtype=torch.float64) < goal)[top_p < 1].any()):
        largest = weights.sort(dim=-1, descending=True).values
    # The first position where the cumulative sum reaches the goal is the last one kept.
    reached = torch.searchsorted(largest.cumsum(dim=-1, dtype=torch.float64), goal)
    threshold = largest.gather(1, reached.clamp(max=largest.shape[1] - 1)).where(top_p < 1, 0.0)
    weights.masked_fill_(weights < threshold, 0.0)


def _logprobs(raw: torch.Tensor, token_id: int, num_best: int) -> TokenLogprobs:
    """Of the raw distribution. raw: [vocab_size] float32."""
    logprobs = raw.log_softmax(dim=-1)
    own = logprobs[token_id]
    best = logprobs.topk(num_best) if num_best else None
    token_ids = [token_id] + (best.indices.tolist() if best else [])
    values = [own.item()] + (best.values.tolist() if best else [])
    ranks = [int((logprobs > own).sum()) + 1, *range(1, num_best + 1)]
    return TokenLogprobs(token_ids, values, ranks)
