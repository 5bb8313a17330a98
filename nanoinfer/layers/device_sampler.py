"""The sampler on a GPU: the contract of layers/sampler.py, in Triton kernels and without a wait for the device.

One uniform number per row, turned into a token by the inverse of the cumulative distribution in the order of the
vocabulary, summed by the same segments: the same seed gives the same token whatever the batch, and (but for rounding in
the last bit of float64) on whatever number of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from nanoinfer.attention.upload import upload
from nanoinfer.layers.sampler import Bias, Penalty, SamplingBatch, VocabShard


@dataclass(frozen=True)
class DeviceSampling:
    """How to sample each row, [n] each, on the device.

    inverse: 1 / temperature, 0 for greedy; min_p, top_p: float32; top_k: int32; uniforms: float64.
    has_filters: whether any row may have min_p, top_k or top_p; False saves the look.
    """

    inverse: torch.Tensor
    min_p: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    uniforms: torch.Tensor
    has_filters: bool = True


def sample_on_device(logits: torch.Tensor, sampling: DeviceSampling, shard: VocabShard) -> torch.Tensor:
    """[n] int64, on every rank the same: ids, or -1 where a row has NaN or no finite maximum.

    logits: [n, columns], the rank's slice of the vocabulary, any float dtype, not modified. Nothing here waits for the
    device, so a CUDA graph can hold it.
    """
    from nanoinfer.kernels.triton import sampler as kernels
    from nanoinfer.kernels.triton import threshold

    tp = shard.tp
    best, winners = kernels.row_argmax(logits)
    greedy = winners
    if tp.size > 1:
        greedy = winners + shard.first_id
        summary = tp.all_gather(torch.stack((best.double(), greedy.double()), dim=1)).unflatten(1, (-1, 2))
        # The first of equals: ties go to the lower id.
        rank = summary[:, :, 0].argmax(dim=1, keepdim=True)
        best = summary[:, :, 0].gather(1, rank).squeeze(1).float()
        greedy = summary[:, :, 1].gather(1, rank).squeeze(1).long()
    inverse = sampling.inverse
    if sampling.has_filters:
        # A filter looks at the whole row, so the ranks put it together.
        whole = tp.all_gather(logits.contiguous()) if tp.size > 1 else logits
        least = threshold.sampling_threshold(whole, best, inverse, sampling.min_p, sampling.top_k, sampling.top_p)
    else:
        least = torch.full_like(best, float("-inf"))
    sums = kernels.segment_sums(logits, best, inverse, least)
    if tp.size == 1:
        tokens: torch.Tensor = kernels.choose(logits, best, greedy, inverse, least, sums, sampling.uniforms)
        return tokens
    ends = tp.all_gather(sums.sum(dim=1, keepdim=True)).cumsum(dim=1)
    target = sampling.uniforms.unsqueeze(1) * ends[:, -1:]
    owner = (ends <= target).sum(dim=1).clamp(max=tp.size - 1)
    before = ends[:, tp.rank - 1] if tp.rank > 0 else torch.zeros_like(target[:, 0])
    drawn = kernels.draw(logits, best, inverse, least, sums, target.squeeze(1) - before) + shard.first_id
    drawn = tp.all_reduce(drawn.where(owner == tp.rank, 0))
    return torch.where(best.isfinite(), torch.where(inverse > 0, drawn, greedy), -1)


def adjusted(logits: torch.Tensor, batch: SamplingBatch, shard: VocabShard) -> torch.Tensor:
    """Masks, bans, biases and penalties on the rows that have them, in float32; the logits as they are if none has.

    What the host knows of those rows is sent over: 4 bytes per token of the vocabulary and row with penalties, for
    which it waits, a bit per token and row with a mask.
    """
    if not batch.adjusts_logits:
        return logits
    # A copy also where the logits are float32 already: those of a CUDA graph are its own.
    processed = logits.to(torch.float32, copy=True)
    _mask(processed, batch.masks, shard)
    _ban(processed, batch.banned, shard)
    _add_biases(processed, batch.biases, shard)
    _penalize(processed, batch.penalties, shard)
    return processed


def _mask(logits: torch.Tensor, masks: dict[int, np.ndarray], shard: VocabShard) -> None:
    """Columns beyond the words are padding, and -inf as they are."""
    if not masks:
        return
    host_words = np.stack(list(masks.values())).astype(np.int32, copy=False)
    (flat,) = upload([host_words], logits.device)
    words = flat.view(host_words.shape)
    num_columns = max(0, min(logits.shape[1], 32 * words.shape[1] - shard.first_id))
    ids = torch.arange(shard.first_id, shard.first_id + num_columns, device=logits.device)
    # Row by row: bits as wide as words would be as large as the logits.
    for row, of_row in zip(masks, words, strict=True):
        bits = of_row[ids // 32] >> (ids % 32).int() & 1
        logits[row, :num_columns].masked_fill_(bits == 0, float("-inf"))


def _ban(logits: torch.Tensor, banned: dict[int, list[int]], shard: VocabShard) -> None:
    ids = ((row, token_id - shard.first_id) for row, token_ids in banned.items() for token_id in token_ids)
    if pairs := [(row, column) for row, column in ids if 0 <= column < logits.shape[1]]:
        rows, columns = upload(list(np.array(pairs, np.int64).T), logits.device)
        logits.index_put_((rows, columns), logits.new_full((), float("-inf")))


def _add_biases(logits: torch.Tensor, biases: dict[int, Bias], shard: VocabShard) -> None:
    if not biases:
        return
    ids, added = zip(*((bias.token_ids.numpy(), bias.values.numpy()) for bias in biases.values()), strict=True)
    rows = np.repeat(list(biases), [len(of_row) for of_row in ids])
    columns, values = np.concatenate(ids) - shard.first_id, np.concatenate(added)
    is_mine = (columns >= 0) & (columns < logits.shape[1])
    row_index, column_index, mine = upload([x[is_mine] for x in (rows, columns, values)], logits.device)
    logits.index_put_((row_index, column_index), mine, accumulate=True)


def _penalize(logits: torch.Tensor, penalties: dict[int, Penalty], shard: VocabShard) -> None:
    from nanoinfer.kernels.triton import sampler as kernels

    if not penalties:
        return
    columns, device = logits.shape[1], logits.device
    counts = torch.stack([p.counts.output + p.counts.in_prompt.int() * kernels.IN_PROMPT for p in penalties.values()])
    counts = counts[:, shard.first_id : shard.first_id + columns].contiguous().to(device)
    factors = [[p.repetition, p.presence, p.frequency] for p in penalties.values()]
    arrays = [np.array(list(penalties), np.int32), *np.array(factors, np.float32).T]
    rows, repetition, presence, frequency = upload(arrays, device)
    kernels.penalize(logits, rows, counts, repetition, presence, frequency)
