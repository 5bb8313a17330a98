"""One rank of a gloo group: checks each collective of `ProcessGroup` against arithmetic. Run by test_ranks.py as

python collective_program.py RANK SIZE RENDEZVOUS_FILE
"""

from __future__ import annotations

import os
import sys

import torch

from nanoinfer.distributed import launch
from nanoinfer.distributed.group import ProcessGroup

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64)


def part_of(rank: int, dtype: torch.dtype, shape: tuple[int, int]) -> torch.Tensor:
    """Small integers: every dtype adds them exactly, in any order."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(-20, 21, shape, generator=generator).to(dtype)


def layouts(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """The same [rows, columns], laid out in memory in different ways."""
    wide = torch.zeros(tensor.shape[0], 2 * tensor.shape[1], dtype=tensor.dtype)
    wide[:, ::2] = tensor
    found = {
        "contiguous": tensor.clone(),
        "every second column": wide[:, ::2],
        "transposed": tensor.t().clone(memory_format=torch.contiguous_format).t(),
        "the right half": torch.cat((tensor, tensor), dim=1)[:, tensor.shape[1] :],
    }
    assert all(torch.equal(view, tensor) for view in found.values())
    return found


def check(tp: ProcessGroup) -> list[str]:
    wrong = []
    for dtype in DTYPES:
        for shape in ((1, 1), (3, 5), (64, 33), (0, 4)):
            parts = [part_of(rank, dtype, shape) for rank in range(tp.size)]
            total, side_by_side = sum(parts[1:], parts[0]), torch.cat(parts, dim=1)
            for layout, mine in layouts(parts[tp.rank]).items():
                case = f"of {dtype} {shape}, {layout}"
                gathered = tp.all_gather(mine)
                if not torch.equal(mine, parts[tp.rank]):
                    wrong.append(f"all_gather {case}: its input was changed")
                if gathered.dtype != dtype or not torch.equal(gathered, side_by_side):
                    wrong.append(f"all_gather {case}: {gathered}, not {side_by_side}")
                reduced = tp.all_reduce(mine)
                if reduced.dtype != dtype or not torch.equal(reduced, total):
                    wrong.append(f"all_reduce {case}: {reduced}, not {total}")
    for i in range(500):
        if (value := int(tp.all_reduce(torch.tensor([i * (tp.rank + 1)])))) != i * tp.size * (tp.size + 1) // 2:
            wrong.append(f"all_reduce number {i} of many gave {value}")
    return wrong


rank, size = int(sys.argv[1]), int(sys.argv[2])
group = launch.join(rank, size, sys.argv[3], "cpu").tp
assert isinstance(group, ProcessGroup)
assert (group.rank, group.size) == (rank, size)
faults = check(group)
assert group.seconds > 0
launch.leave()
print("\n".join(faults) or "all right", flush=True)
os._exit(bool(faults))  # as ranks do: gloo's threads may not survive the interpreter's shutdown
