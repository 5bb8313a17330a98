"""`TensorParallelGroup`: a rank's place among those that share each layer, and the collectives between them.

Handed to the constructor of every sharded layer (inside a `ParallelGroups` record, so that another kind of parallelism
needs no new signature). No layer asks a process-wide singleton: two ranks of a layer can be built side by side in one
process and their parts merged by hand, which is how the sharding is proven.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


class TensorParallelGroup:
    """Rank `rank` of `size`. This class is the group of one, where every collective is the identity.

    Groups of several ranks override the collectives. All of them are called by every rank in the same order.
    """

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        if not 0 <= rank < size:
            raise ValueError(f"rank is {rank}; it must be from 0 to {size - 1}, the size of the group being {size}")
        self.rank = rank
        self.size = size

    @classmethod
    def single(cls) -> TensorParallelGroup:
        return TensorParallelGroup(0, 1)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks, on every rank. May overwrite `tensor`."""
        self._require_single("all_reduce")
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """The ranks' tensors concatenated along the last dimension in the order of the ranks, on every rank."""
        self._require_single("all_gather")
        return tensor

    def _require_single(self, name: str) -> None:
        if self.size != 1:
            raise NotImplementedError(f"{name} between {self.size} ranks needs a group with processes behind it")


@dataclass(frozen=True)
class ParallelGroups:
    """The groups that a rank belongs to."""

    tp: TensorParallelGroup

    @classmethod
    def single(cls) -> ParallelGroups:
        return cls(tp=TensorParallelGroup.single())
