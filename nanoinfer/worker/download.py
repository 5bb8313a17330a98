"""`Download`: a small tensor on its way from the device to the host, which can do other things meanwhile.

The copy runs behind what was launched before it, and before what is launched after it: the tensor may be overwritten
from then on.
"""

from __future__ import annotations

import torch


class Download:
    """source: on any device; there is no waiting for the copy but in `tolist`."""

    def __init__(self, source: torch.Tensor) -> None:
        if source.device.type == "cpu":
            self._copy, self._event = source.clone(), None
            return
        # Pinned memory comes from torch's caching allocator, which hands it out again only when the copy is over.
        self._copy = torch.empty(source.shape, dtype=source.dtype, device="cpu", pin_memory=True)
        self._copy.copy_(source, non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record()

    def is_over(self) -> bool:
        return self._event is None or self._event.query()

    def tolist(self) -> list[int]:
        """Waits for the copy."""
        if self._event is not None:
            self._event.synchronize()
        return self._copy.tolist()
