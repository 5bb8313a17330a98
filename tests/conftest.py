"""Shared by all tests: one torch thread, because tiny models run faster on one and CI's two cores are shared."""

import os

# Before torch is imported, and inherited by rank processes.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
