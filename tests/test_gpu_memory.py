"""How large the KV pool on a GPU is, by made-up numbers, and what is said where a GPU cannot hold what is asked for.

How the numbers are measured is in triton_launch_cases.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import kit
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_cuda_graph import StandInGraph

from nanoinfer.attention.cpu import CPUAttention
from nanoinfer.config import EngineConfig, ModelConfig
from nanoinfer.distributed.group import ParallelGroups
from nanoinfer.executor.uniproc import UniprocExecutor
from nanoinfer.worker import model_runner
from nanoinfer.worker.gpu_memory import GPUMemory, graph_bytes, num_gpu_blocks
from nanoinfer.worker.model_runner import ModelRunner

GIB = 2**30


def config(**options: Any) -> EngineConfig:
    return EngineConfig("somewhere", **options)


def test_blocks_fill_the_budget_less_what_is_measured() -> None:
    """80 GiB, of which 1 to the context: 0.9 * 80 = 72, less 16 of weights, 3 and 0.75 measured, 0.25 of reserve."""
    memory = GPUMemory(80 * GIB, 16 * GIB, 63 * GIB, 3 * GIB, GIB * 3 // 4)
    assert num_gpu_blocks(config(), GIB, memory) == 52
    assert num_gpu_blocks(config(gpu_memory_utilization=0.5), GIB, memory) == 20


def test_what_others_hold_is_not_counted_as_ours() -> None:
    alone = GPUMemory(80 * GIB, 16 * GIB, 63 * GIB, GIB, GIB)
    beside = GPUMemory(80 * GIB, 16 * GIB, 33 * GIB, GIB, GIB)
    small = config(gpu_memory_utilization=0.4)
    # The share that was asked for fits beside the other's 30 GiB, so these change nothing.
    assert num_gpu_blocks(small, GIB, alone) == num_gpu_blocks(small, GIB, beside) == 13
    # What does not fit on the card cannot be had: 33 free, less 2.25.
    assert num_gpu_blocks(config(), GIB, beside) == 30


@pytest.mark.parametrize(
    ("max_num_seqs", "others", "expected"),
    [
        (6, (0, 0), GIB + 3 * 5 + 4 * 7),
        (2, (0, 0), GIB + 5 + 2 * 7),
        (1, (0,), GIB + 7),
        (6, (30, 0), GIB + 3 * 5 + 4 * 7),
        (6, (0, 30), GIB + 3 * 5 + 4 * 7),
        # The driver's share is lost in what others give back; the reserve is for such.
        (6, (-30, 0), GIB + 3 * 5),
    ],
)
def test_graphs_are_measured_by_two_whatever_others_take_meanwhile(
    max_num_seqs: int, others: tuple[int, ...], expected: int
) -> None:
    """Four graphs for six sequences. The largest takes a GiB of the allocator's, which the others share but for 5 bytes
    each; the driver keeps 7 for each. others: the GiB that they take while the first is captured, and the second."""
    free, reserved, left = 60 * GIB, 10 * GIB, list(others)

    class Capture(StandInGraph):
        def capture(self, function: Callable[[], None]) -> None:
            nonlocal free, reserved
            super().capture(function)
            size = GIB if reserved == 10 * GIB else 5
            reserved += size
            free -= size + 7 + left.pop(0) * GIB

    runner: Any = SimpleNamespace(decode=lambda inputs: (inputs, inputs), device=torch.device("cpu"))
    assert graph_bytes(runner, Capture, lambda: (free, reserved), max_num_seqs) == expected
    assert not left


@given(
    st.integers(0, 60), st.integers(0, 40), st.integers(0, 20), st.integers(0, 8), st.floats(0.05, 1.0),
    st.integers(1, 64),
)  # fmt: skip
def test_the_pool_never_exceeds_the_card_or_the_budget(
    others: int, loaded: int, activations: int, graphs: int, fraction: float, block: int
) -> None:
    free = max(0, 80 - others - loaded)
    memory = GPUMemory(80 * GIB, loaded * GIB, free * GIB, activations * GIB, graphs * GIB)
    bytes_per_block = block * 2**20
    try:
        pool = num_gpu_blocks(config(gpu_memory_utilization=fraction), bytes_per_block, memory) * bytes_per_block
    except ValueError as error:
        assert str(bytes_per_block) in str(error) and str(memory.loaded) in str(error)
        assert "gpu_memory_utilization" in str(error) and "max_num_batched_tokens" in str(error)
        return
    assert pool >= bytes_per_block
    assert pool + memory.activations + memory.graphs < memory.free
    assert pool + memory.loaded + memory.activations + memory.graphs < fraction * memory.total


def test_too_little_memory_says_what_to_change() -> None:
    full_card = GPUMemory(80 * GIB, 16 * GIB, 4 * GIB, 3 * GIB, GIB)
    with pytest.raises(ValueError, match="free memory on the card"):
        num_gpu_blocks(config(), 2**20, full_card)
    tight_budget = GPUMemory(80 * GIB, 16 * GIB, 63 * GIB, 3 * GIB, GIB)
    with pytest.raises(ValueError, match="raise gpu_memory_utilization"):
        num_gpu_blocks(config(gpu_memory_utilization=0.2), 2**20, tight_budget)


def test_a_given_number_of_blocks_may_pass_the_budget_but_not_the_card() -> None:
    memory = GPUMemory(80 * GIB, 16 * GIB, 63 * GIB, 3 * GIB, GIB * 3 // 4)
    assert num_gpu_blocks(config(num_kvcache_blocks=58, gpu_memory_utilization=0.3), GIB, memory) == 58
    with pytest.raises(ValueError, match="num_kvcache_blocks=60 needs 64424509440 bytes, and 63350767616 are left"):
        num_gpu_blocks(config(num_kvcache_blocks=60), GIB, memory)


@pytest.mark.parametrize(
    ("where", "advice"),
    [
        ("the weights", "free memory on the card, or use more GPUs"),
        ("the largest step", "lower max_num_batched_tokens"),
        ("the KV cache and the CUDA graphs", "lower gpu_memory_utilization or num_kvcache_blocks"),
    ],
)
def test_running_out_of_memory_while_starting_is_told_with_bytes_and_advice(
    where: str, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a card of which torch's own error tells the figures; the advice is what helps there."""

    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("Tried to allocate 30.00 GiB. GPU 0 has a total capacity of 79.10 GiB")

    def start() -> None:
        runner = ModelRunner(config, ModelConfig.from_directory(directory), directory, 0, ParallelGroups.single())
        runner.device = "cuda"
        runner.capacity()

    directory = kit.checkpoint("tied").directory
    config = EngineConfig(str(directory), dtype="float32")
    if where == "the weights":
        monkeypatch.setattr(model_runner, "load_weights", full)
    elif where == "the largest step":
        monkeypatch.setattr(ModelRunner, "_measure_memory", full)
    else:
        monkeypatch.setattr(CPUAttention, "allocate", full)
    with pytest.raises(ValueError, match=f"for {where} .*30.00 GiB.*79.10 GiB.*{advice}"):
        kit.make_llm(directory) if where.startswith("the KV") else start()


class Reached(Exception):
    """What comes before has not raised."""


def test_a_gpu_runs_no_more_sequences_than_a_grid_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """Said before weights are loaded; on a CPU there may be more. A grid of the most is in test_triton.py."""
    for name in ("is_available", "empty_cache", "memory_reserved"):
        monkeypatch.setattr(torch.cuda, name, Mock())
    monkeypatch.setattr(model_runner, "select_backend", Mock(side_effect=Reached))
    directory = kit.checkpoint("tied").directory

    def start(device: str, max_num_seqs: int) -> None:
        config = EngineConfig(str(directory), device=device, max_num_seqs=max_num_seqs)
        ModelRunner(config, ModelConfig.from_directory(directory), directory, 0, ParallelGroups.single())

    for device, max_num_seqs in (("cpu", 65536), ("cuda", 65535)):
        with pytest.raises(Reached):
            start(device, max_num_seqs)
    with pytest.raises(ValueError, match="max_num_seqs is 65536; on a GPU it must be at most 65535"):
        start("cuda", 65536)


@pytest.mark.parametrize(("device", "option"), [("cpu", "cpu_kvcache_gib"), ("cuda", "gpu_memory_utilization")])
def test_where_the_pool_limits_the_length_it_is_said_how_to_make_it_larger(
    device: str, option: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    capacity = UniprocExecutor.capacity
    monkeypatch.setattr(UniprocExecutor, "capacity", lambda self: replace(capacity(self), device=device))
    kit.make_llm(kit.checkpoint("tied").directory, num_kvcache_blocks=4, kvcache_block_size=8)
    assert "max_model_len is lowered from 256 to 32" in caplog.text and f"{option} or num_kvcache_blocks" in caplog.text
