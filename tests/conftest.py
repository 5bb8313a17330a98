"""Shared by all tests: one torch thread, because tiny models run faster on one and CI's two cores are shared."""

import os
from collections import Counter

import pytest

# Before torch is imported, and inherited by rank processes.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# About a minute or more each; pytest-xdist begins them first, so that no worker is left with one at the end.
LONG_FILES = ("test_triton", "test_generate", "test_ranks", "test_tensor_parallel", "test_serving_load")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--load-requests", type=int, default=150, help="requests of the server's load test")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {name: place for place, name in enumerate(LONG_FILES)}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))
    counts = Counter(item.nodeid for item in items)
    if doubles := [nodeid for nodeid, count in counts.items() if count > 1]:
        raise pytest.UsageError(f"pytest-xdist runs one of several tests with the same id: {doubles}")
