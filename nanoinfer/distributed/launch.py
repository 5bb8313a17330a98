"""How a rank process joins the others. Called by `executor/worker_main.py`, once per process."""

from __future__ import annotations

import os
import socket
from datetime import timedelta

import torch
import torch.distributed as dist

from nanoinfer.distributed.group import ParallelGroups, ProcessGroup

# The engine watches its ranks and kills them when one fails; this only has to be longer than any step.
_NEVER = timedelta(days=7)


def check_devices(size: int, num_devices: int) -> None:
    """Raises ValueError unless there is a GPU for every one of `size` ranks."""
    if size > num_devices:
        raise ValueError(
            f"tensor_parallel_size is {size}, and torch sees {num_devices} CUDA device(s); each rank needs one of its "
            "own: lower tensor_parallel_size, or let the process see more (CUDA_VISIBLE_DEVICES)"
        )


def join(rank: int, size: int, rendezvous_file: str, device: str) -> ParallelGroups:
    """Meets the other ranks through a file that is new for every engine, and speaks over the loopback interface.

    Neither the hostname nor any network is looked at, and no port is chosen: any number of engines run side by side.
    """
    if device == "cuda":
        check_devices(size, torch.cuda.device_count())
    if size == 1:
        return ParallelGroups.single()
    # Over what the user may have set for programs that span machines: this is a process of ours, and spans none.
    loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = loopback
    if device == "cuda":
        torch.cuda.set_device(rank)
    store = dist.FileStore(rendezvous_file, size)
    # NCCL meets at the first collective, so that a rank with its weights waits here for one without.
    store.set_timeout(_NEVER)
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=_NEVER)
    world = dist.group.WORLD
    assert world is not None
    return ParallelGroups(tp=ProcessGroup(world))


def leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
