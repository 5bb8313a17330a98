"""`TensorParallelGroup`: a rank's place among those that share each layer, and the collectives between them.

Handed to the constructor of every sharded layer (inside a `ParallelGroups` record, so that another kind of parallelism
needs no new signature). No layer asks a process-wide singleton: two ranks of a layer can be built side by side in one
process and their parts merged by hand, which is how the sharding is proven.
"""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter

import torch
import torch.distributed as dist

# Its name from torch 2.13 on, and before.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class TensorParallelGroup:
    """Rank `rank` of `size`. This class is the group of one, where every collective is the identity.

    Groups of several ranks override the collectives. All of them are called by every rank in the same order.
    """

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        if not 0 <= rank < size:
            raise ValueError(f"rank is {rank}; it must be from 0 to {size - 1}, the size of the group being {size}")
        self.rank = rank
        self.size = size
        # Seconds that this rank has spent in collectives, waiting for the others included (on a CPU; on a GPU they
        # are only launched here).
        self.seconds = 0.0

    @classmethod
    def single(cls) -> TensorParallelGroup:
        return TensorParallelGroup(0, 1)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks, on every rank. May overwrite `tensor` and return it."""
        self._require_single("all_reduce")
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """The ranks' tensors, [n, columns] each, side by side in the order of the ranks: [n, size * columns]."""
        self._require_single("all_gather")
        return tensor

    def _require_single(self, name: str) -> None:
        if self.size != 1:
            raise NotImplementedError(f"{name} between {self.size} ranks needs a group with processes behind it")


class ProcessGroup(TensorParallelGroup):
    """Ranks that are processes, joined by torch.distributed (NCCL on GPUs, gloo on CPUs)."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group.rank(), group.size())
        self._group = group

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        start = perf_counter()
        tensor = tensor.contiguous()
        dist.all_reduce(tensor, group=self._group)
        self.seconds += perf_counter() - start
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        start = perf_counter()
        n, columns = tensor.shape
        # One after the other in one tensor: NCCL writes it as it is, where a list costs it a copy for each rank.
        gathered = tensor.new_empty(self.size * n, columns)
        _all_gather_single(gathered, tensor.contiguous(), group=self._group)
        self.seconds += perf_counter() - start
        return gathered.view(self.size, n, columns).transpose(0, 1).reshape(n, self.size * columns)


@dataclass(frozen=True)
class ParallelGroups:
    """The groups that a rank belongs to."""

    tp: TensorParallelGroup

    @classmethod
    def single(cls) -> ParallelGroups:
        return cls(tp=TensorParallelGroup.single())
