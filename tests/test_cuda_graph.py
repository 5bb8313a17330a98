"""The manager of CUDA graphs over stand-ins: sizes, padding, order, streams."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nanoinfer.worker import cuda_graph
from nanoinfer.worker.cuda_graph import DecodeGraphs, graph_factory, graph_sizes


@given(st.integers(1, 2000))
def test_every_batch_has_a_graph_and_few_sizes_suffice(max_num_seqs: int) -> None:
    sizes = graph_sizes(max_num_seqs)
    assert sizes == sorted(set(sizes)) and sizes[-1] == max_num_seqs and len(sizes) <= 22
    graphs = DecodeGraphs(lambda inputs: (inputs, inputs), sizes, torch.device("cpu"), StandInGraph)
    for n in {1, 2, 3, max_num_seqs // 2 + 1, max_num_seqs - 1, max_num_seqs} & set(range(1, max_num_seqs + 1)):
        size = graphs.size_for(n)
        assert size == min(s for s in sizes if s >= n)
        assert size <= max(2 * n, n + 256)


def test_seventeen_of_twenty() -> None:
    graphs = DecodeGraphs(lambda inputs: (inputs, inputs), graph_sizes(20), torch.device("cpu"), StandInGraph)
    assert graph_sizes(20) == [1, 2, 4, 8, 16, 20] and graphs.size_for(17) == 20


class StandInGraph:
    def capture(self, function: Callable[[], None]) -> None:
        function()
        self.function = function

    def replay(self) -> None:
        self.function()


def test_graphs_are_captured_largest_first_and_see_padding_as_row_minus_one() -> None:
    seen: list[torch.Tensor] = []

    def decode(inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        seen.append(inputs.clone())
        return inputs[0].long() * 100 + inputs[1], inputs.T.float()

    graphs = DecodeGraphs(decode, graph_sizes(20), torch.device("cpu"), StandInGraph)
    graphs.capture()
    assert [inputs.shape[1] for inputs in seen] == [20, 16, 8, 4, 2, 1]
    assert all(bool((inputs == -1).all()) for inputs in seen), "capturing must touch no sequence"
    rows = np.array([3, 0, 7, 5, 1])
    tokens, logits = graphs.run(rows, np.array([10, 11, 12, 13, 14]))
    assert seen[-1].tolist() == [[3, 0, 7, 5, 1, -1, -1, -1], [10, 11, 12, 13, 14, -1, -1, -1]]
    assert tokens.tolist() == [310, 11, 712, 513, 114] and logits.shape == (5, 2)
    # Rows of an earlier, larger batch do not stay behind as padding.
    graphs.run(rows[:3], np.array([1, 2, 3]))
    graphs.run(rows, np.array([1, 2, 3, 4, 5]))
    assert seen[-1][0].tolist() == [3, 0, 7, 5, 1, -1, -1, -1]


@pytest.mark.parametrize(("asked", "disable"), [(True, None), (False, True)])
def test_a_bar_counts_the_graphs_where_there_is_a_terminal(
    asked: bool, disable: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    bars: list[tuple[list[int], object]] = []

    def tqdm(sizes: list[int], *, disable: bool | None, **_: object) -> list[int]:
        bars.append((sizes, disable))
        return sizes

    monkeypatch.setattr(cuda_graph, "tqdm", tqdm)
    graphs = DecodeGraphs(lambda inputs: (inputs, inputs), [1, 2, 3], torch.device("cpu"), StandInGraph)
    graphs.capture(show_progress=asked)
    assert bars == [([3, 2, 1], disable)]


def test_all_graphs_are_warmed_up_and_captured_on_one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """In that order, and behind what the engine's own stream has to do. Each stream more would cost 32 MiB."""
    made: list[str] = []
    current = ["main"]
    log: list[str] = []

    class Stream:
        def __init__(self, name: str = "") -> None:
            self.name = name or f"stream {len(made)}"
            made.extend([] if name else [self.name])

        def wait_stream(self, other: Stream) -> None:
            log.append(f"{self.name} waits for {other.name}")

    @contextlib.contextmanager
    def on(stream: Stream, what: str = "run") -> Iterator[None]:
        current.append(f"{what} on {stream.name}")
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: Stream("main"))
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: None)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, pool, stream: on(stream, f"capture into {pool}"))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
    cuda_graph._capture_stream.cache_clear()
    for _ in range(2):
        factory = graph_factory("cuda", enforce_eager=False)
        assert factory is not None
        for _ in range(3):
            factory().capture(lambda: log.append(current[-1]))
    cuda_graph._capture_stream.cache_clear()
    assert made == ["stream 0"]
    assert log == 6 * [
        "stream 0 waits for main", "run on stream 0", "main waits for stream 0", "capture into pool on stream 0",
    ]  # fmt: skip


def test_enforce_eager_means_no_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    assert graph_factory("cuda", enforce_eager=True) is None and graph_factory("cpu", enforce_eager=False) is None
    assert graph_factory("cuda", enforce_eager=False) is not None
