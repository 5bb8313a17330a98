"""`upload`: what a step needs of the host's arrays, to the device in one transfer."""

from __future__ import annotations

import numpy as np
import torch


def upload_to(target: torch.Tensor, array: np.ndarray) -> None:
    """Overwrites `target`, whose dtype and number of elements the array has, as `upload` would: without a wait."""
    staging = torch.empty(target.shape, dtype=target.dtype, pin_memory=target.device.type == "cuda")
    staging.numpy().reshape(-1)[:] = array.reshape(-1)
    target.copy_(staging, non_blocking=True)


def upload(arrays: list[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """The arrays on the device, in one transfer that the host does not wait for. Shapes become flat.

    Pinned memory comes from torch's caching allocator, which hands it out again only when the transfer is over.
    """
    sizes = [-(-array.nbytes // 16) * 16 for array in arrays]
    staging = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=device.type == "cuda")
    flat, start, spans = staging.numpy(), 0, []
    for array, size in zip(arrays, sizes, strict=True):
        flat[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        spans.append((start, array.nbytes, torch.from_numpy(np.empty(0, array.dtype)).dtype))
        start += size
    on_device = staging.to(device, non_blocking=True)
    return [on_device[first : first + count].view(dtype) for first, count, dtype in spans]
