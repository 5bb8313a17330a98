"""Chooses the attention backend: the first of the preference list that does not reject the model and the device."""

from __future__ import annotations

from nanoinfer.attention.base import AttentionBackend
from nanoinfer.attention.cpu import CPUAttention
from nanoinfer.config import ModelConfig

# In the order of preference.
BACKENDS: tuple[type[AttentionBackend], ...] = (CPUAttention,)


def select_backend(model_config: ModelConfig, device: str) -> type[AttentionBackend]:
    """Raises ValueError with every backend's reason if none fits."""
    reasons = []
    for backend in BACKENDS:
        reason = backend.rejects(model_config, device)
        if reason is None:
            return backend
        reasons.append(f"{backend.name}: {reason}")
    raise ValueError(f"no attention backend can run this model on {device!r} ({'; '.join(reasons)})")
