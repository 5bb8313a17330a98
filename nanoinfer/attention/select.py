"""Chooses the attention backend: the first of the preference list that does not reject the model and the device.

Triton stands before flash-attn: its small blocks make for more prefix hits, Triton kernels of this kind were published
at 98.6 to 105.9 % of FlashAttention 3 end to end (one request, H100, arXiv 2511.11581), and we have measured neither.
`bench.py --gpu-check` measures both where flash-attn is installed; `attention_backend` chooses.
"""

from __future__ import annotations

import logging

import torch

from nanoinfer.attention.base import AttentionBackend
from nanoinfer.attention.cpu import CPUAttention
from nanoinfer.attention.flash_attn import FlashAttention
from nanoinfer.attention.triton import TritonAttention
from nanoinfer.config import ModelConfig

logger = logging.getLogger(__name__)

# In the order of preference.
BACKENDS: tuple[type[AttentionBackend], ...] = (TritonAttention, FlashAttention, CPUAttention)


def select_backend(
    model_config: ModelConfig,
    device: str,
    dtype: torch.dtype | None = None,
    block_size: int | None = None,
    requested: str = "auto",
) -> type[AttentionBackend]:
    """Raises ValueError with every backend's reason if none fits, or with the requested one's if that does not.

    block_size: the user's, None if a backend may choose. requested: a backend's name, or "auto" for the first fit.
    """
    reasons: list[str] = []
    for backend in BACKENDS:
        if requested not in ("auto", backend.name):
            continue
        reason = backend.rejects(model_config, device, dtype, block_size)
        if reason is None:
            logger.info("attention backend %s%s", backend.name, f" ({'; '.join(reasons)})" if reasons else "")
            return backend
        reasons.append(f"{backend.name}: {reason}")
    what = "no attention backend" if requested == "auto" else "the requested attention backend"
    verb = "can" if requested == "auto" else "cannot"
    raise ValueError(f"{what} {verb} run this model on {device!r} ({'; '.join(reasons)})")
