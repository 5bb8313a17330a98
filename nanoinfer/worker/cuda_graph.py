"""CUDA graphs of the decode step: a few sizes, the batch padded up to the next one.

A graph holds the whole step, from the rows kept on the device to the sampled tokens. A padding row is row -1: the
kernels give it an empty context and a slot below zero, so that it reads nothing and cannot write into any block,
whoever owns it. All graphs share one memory pool, and the largest is captured first.
"""

from __future__ import annotations

import functools
import logging
from bisect import bisect_left
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from tqdm import tqdm

from nanoinfer.attention.upload import upload_to

logger = logging.getLogger(__name__)

# [2, n] int32 (row, tokens computed) to (token ids [n], logits [n, columns]).
Decode = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
_SMALL_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)


class Graph(Protocol):
    def capture(self, function: Callable[[], None]) -> None:
        """Records what `function` launches, after a run that compiles and allocates what only the first one does."""

    def replay(self) -> None: ...


class CudaGraph:
    """torch.cuda.CUDAGraph; `pool`: a memory pool shared with other graphs that never run at the same time."""

    def __init__(self, pool: Any) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self._pool = pool

    def capture(self, function: Callable[[], None]) -> None:
        stream = _capture_stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            function()
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(self._graph, pool=self._pool, stream=stream):
            function()

    def replay(self) -> None:
        self._graph.replay()


@functools.cache
def _capture_stream() -> torch.cuda.Stream:
    """One for all: cuBLAS keeps a workspace, 32 MiB on Hopper, for each stream that it was ever called on."""
    return torch.cuda.Stream()


class CudaGraphFactory:
    """Makes graphs over one memory pool."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self) -> Graph:
        return CudaGraph(self._pool)


def graph_factory(device: str, enforce_eager: bool) -> Callable[[], Graph] | None:
    """None where there are to be no graphs."""
    return CudaGraphFactory() if device == "cuda" and not enforce_eager else None


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Ascending; the last is max_num_seqs, so that every batch fits. From 512 on every 256."""
    sizes = [*_SMALL_SIZES, *range(768, max_num_seqs, 256)]
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


class DecodeGraphs:
    """sizes: ascending. decode: the step to capture."""

    def __init__(self, decode: Decode, sizes: list[int], device: torch.device, make_graph: Callable[[], Graph]) -> None:
        self.sizes = sizes
        self._decode = decode
        self._device = device
        self._make_graph = make_graph
        self._graphs: dict[int, Graph] = {}
        self._inputs: dict[int, torch.Tensor] = {}
        self._outputs: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def capture(self, *, show_progress: bool = False) -> None:
        # None: where there is a terminal to show it on.
        hidden = None if show_progress else True
        for size in tqdm(self.sizes[::-1], desc="Capturing CUDA graphs", leave=False, disable=hidden):
            self.capture_size(size)

    def capture_size(self, size: int) -> None:
        # Of padding alone: what is captured runs once for real, before.
        inputs = torch.full((2, size), -1, dtype=torch.int32, device=self._device)

        def run() -> None:
            self._outputs[size] = self._decode(inputs)

        graph = self._make_graph()
        graph.capture(run)
        self._graphs[size], self._inputs[size] = graph, inputs

    def run(self, rows: np.ndarray, num_computed: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """(token ids [n], logits [n, columns]) of rows [n]; both are overwritten by the next run."""
        n = len(rows)
        size = self.size_for(n)
        padded = np.full((2, size), -1, np.int32)
        padded[0, :n], padded[1, :n] = rows, num_computed
        upload_to(self._inputs[size], padded)
        self._graphs[size].replay()
        tokens, logits = self._outputs[size]
        return tokens[:n], logits[:n]

    def size_for(self, num_seqs: int) -> int:
        """The smallest captured size that holds so many."""
        return self.sizes[bisect_left(self.sizes, num_seqs)]
