"""The token embedding and the head, both split over the vocabulary.

    VocabParallelEmbedding  each rank looks up the ids it owns, zeros the others; an all-reduce sums
    ParallelLMHead          each rank computes its slice of the logits; slices are concatenated, not summed

A vocabulary that does not divide by the number of ranks is padded: the last rank's surplus rows belong to no token.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

from nanoinfer.distributed.group import ParallelGroups
from nanoinfer.layers.linear import LinearMethod, select_linear_method
from nanoinfer.layers.shard import ShardSpec, split


class _VocabParallel(nn.Module):
    """A rank's rows of a [vocab_size, hidden_size] table: ids `first_id` to `first_id + num_rows - 1`.

    The first `num_owned` rows are tokens; the rest, on the last ranks, is padding and stays zero.
    """

    weight: nn.Parameter

    def __init__(self, vocab_size: int, hidden_size: int, *, groups: ParallelGroups, options: dict) -> None:
        super().__init__()
        self.tp = groups.tp
        self.vocab_size = vocab_size
        self.num_rows = -(-vocab_size // groups.tp.size)
        self.first_id = min(groups.tp.rank * self.num_rows, vocab_size)
        self.num_owned = min(self.num_rows, vocab_size - self.first_id)
        self.weight = nn.Parameter(torch.empty(self.num_rows, hidden_size, **options), requires_grad=False)
        self.weight[self.num_owned :].zero_()

    def shards(self, name: str) -> Iterator[ShardSpec]:
        yield split(f"{name}.weight", self.weight[: self.num_owned], 0, self.vocab_size, self.first_id)


class VocabParallelEmbedding(_VocabParallel):
    """input_ids: [T] int64, each in 0 .. vocab_size - 1 (the caller's duty). Returns [T, hidden_size]."""

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        if self.tp.size == 1:
            return F.embedding(input_ids, self.weight)
        local_ids = input_ids - self.first_id
        is_mine = (local_ids >= 0) & (local_ids < self.num_owned)
        rows = F.embedding(local_ids.where(is_mine, 0), self.weight)
        return self.tp.all_reduce(rows * is_mine.unsqueeze(-1))


class ParallelLMHead(_VocabParallel):
    """hidden: [num_sampled, hidden_size]. Returns this rank's logits, [num_sampled, num_rows]; padding is -inf."""

    gated: bool = False

    def __init__(self, vocab_size: int, hidden_size: int, *, groups: ParallelGroups, options: dict) -> None:
        super().__init__(vocab_size, hidden_size, groups=groups, options=options)
        self.method = LinearMethod()

    def tie_weights(self, embedding: VocabParallelEmbedding) -> None:
        """Uses the embedding's table, which is split the same way."""
        self.weight = embedding.weight

    def pack(self, quantization: str | None = None) -> None:
        """Once, when the weights are loaded. A tied table may then be held twice: the embedding needs it as it is."""
        # Chosen now and not before: a tied head gets its weight, and so its device, late.
        self.method = select_linear_method(self.weight.dtype, self.weight.device.type, quantization)
        self.method.pack(self)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self.method.apply(self, hidden, None)
        if self.num_owned < self.num_rows:
            logits[:, self.num_owned :] = float("-inf")
        return logits
