"""`ShardSpec`: one tensor of a checkpoint and the part that a rank holds. Layers state them, the loader reads them.

This is the one description of who holds what: loading, dummy weights and the tests of the sharding all go by it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class ShardSpec:
    """name, shape: as in the checkpoint, unsharded. index: the part this rank reads. dest: where that part is written.

    `dest` has the part's shape; it may be a view of a larger parameter (q, k and v lie in one matrix).
    """

    name: str
    shape: tuple[int, ...]
    index: tuple[slice, ...]
    dest: torch.Tensor

    def __post_init__(self) -> None:
        part = tuple(len(range(*s.indices(size))) for s, size in zip(self.index, self.shape, strict=True))
        assert part == tuple(self.dest.shape), f"{self.name}: part {part} does not fit dest {tuple(self.dest.shape)}"


def whole(name: str, dest: torch.Tensor) -> ShardSpec:
    """A tensor that every rank holds in full."""
    return ShardSpec(name, tuple(dest.shape), (slice(None),) * dest.dim(), dest)


def split(name: str, dest: torch.Tensor, dim: int, size: int, start: int) -> ShardSpec:
    """Rows (dim 0) or columns (dim 1) from `start` on of a tensor that has `size` of them; `dest` is a rank's part."""
    shape = list(dest.shape)
    shape[dim] = size
    index = [slice(None)] * dest.dim()
    index[dim] = slice(start, start + dest.shape[dim])
    return ShardSpec(name, tuple(shape), tuple(index), dest)
