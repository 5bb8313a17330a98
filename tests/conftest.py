"""Shared by all tests: one torch thread, because tiny models run faster on one and CI's two cores are shared."""

import os

import pytest

# Before torch is imported, and inherited by rank processes.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--load-requests", type=int, default=150, help="requests of the server's load test")
