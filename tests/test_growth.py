"""`bench.py --growth` and what the process holds: plans, neighbours, chart and bytes. Nothing here is timed."""

from __future__ import annotations

import json
import platform
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_bench import TINY

from nanoinfer import LLM, SamplingParams
from nanoinfer.bench import growth, memory, throughput
from nanoinfer.bench.floor import Floor
from nanoinfer.bench.growth import GrowthPoint
from nanoinfer.bench.machine import Machine
from nanoinfer.bench.svg import line_chart
from nanoinfer.config import ModelConfig
from nanoinfer.executor.uniproc import UniprocExecutor
from nanoinfer.worker.kv_cache import return_freed_memory

SVG = "{http://www.w3.org/2000/svg}"


def point(num_seqs: int, context: int, fraction: float) -> GrowthPoint:
    return GrowthPoint(num_seqs, context, step_ms=1.0, tok_s=1.0, floor_ms=1.0, fraction_of_floor=fraction)


def test_the_grid_is_all_pairs_up_to_131072_tokens() -> None:
    assert growth.grid() == [
        (8, 256), (8, 1024), (8, 4096), (8, 16384),
        (32, 256), (32, 1024), (32, 4096),
        (64, 256), (64, 1024),
        (128, 256), (128, 1024),
    ]  # fmt: skip


def test_the_largest_fall_is_between_neighbours_in_sequences_or_context() -> None:
    points = [
        point(8, 256, 0.9), point(8, 1024, 0.8), point(8, 4096, 0.72),
        point(32, 256, 0.45), point(32, 1024, 0.6),
    ]  # fmt: skip
    assert growth.largest_fall(points) == (pytest.approx(0.5), points[0], points[3])
    points[3] = point(32, 256, 0.85)
    # Now 0.85 to 0.6 along the context; the larger 0.9 to 0.6 is two steps away.
    assert growth.largest_fall(points) == (pytest.approx(1 - 0.6 / 0.85), points[3], points[4])
    # A point that is missing is not stepped over.
    assert growth.largest_fall([point(8, 256, 0.9), point(8, 4096, 0.1), point(64, 256, 0.2)]) is None
    fall, _, _ = growth.largest_fall([point(8, 256, 0.5), point(8, 1024, 0.6)]) or pytest.fail("no neighbours")
    assert fall == pytest.approx(-0.2)


def test_plans_start_at_the_context_and_use_their_own_blocks() -> None:
    first, *others = list(growth.decode_plans(8, 100, num_steps=5, num_blocks=64, block_size=16))
    assert len(others) == 4 and first.forget_all and all(plan.num_tokens == 8 for plan in (first, *others))
    blocks = [block for new in first.new for block in new.block_ids]
    assert len(set(blocks)) == len(blocks) == 8 * 7 and max(blocks) < 64
    for new in first.new:
        # The first step's token included, the fifth makes it 100.
        assert len(new.token_ids) == new.num_computed_tokens + 1 == 96


def test_points_are_measured_through_the_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    with LLM(tmp_path, load_format="dummy", dtype="float32", device="cpu", num_kvcache_blocks=40, seed=0) as llm:
        executor = llm.engine.executor
        assert isinstance(executor, UniprocExecutor)
        runner = executor.runner
        lengths: list[list[int]] = []
        forward = runner.forward

        def watched(batch: Any) -> torch.Tensor:
            lengths.append(batch.seq_lens.tolist())
            hidden = forward(batch)
            assert torch.isfinite(hidden).all()
            return hidden

        monkeypatch.setattr(runner, "forward", watched)
        monkeypatch.setattr(growth, "_ROUNDS", 1)
        floor, rates = Floor.of_model(ModelConfig.from_dict(TINY), itemsize=4), Machine(10.0, 1.0)
        found = growth.measure_points(runner, [(2, 100), (3, 50)], llm.capacity.num_blocks, floor, rates)
        assert lengths == [[95 + i] * 2 for i in range(6)] + [[45 + i] * 3 for i in range(6)]
        for layer in range(TINY["num_hidden_layers"]):
            for cache in runner.kv_cache.layer(layer):
                assert torch.isfinite(cache).all() and (cache != 0).float().mean() > 0.99
    for one, (num_seqs, context) in zip(found, [(2, 98), (3, 48)], strict=True):
        # Of five steps that end at the context, the third has two tokens less.
        least = floor.seconds(growth.decode_step(num_seqs, context), rates)
        assert one.floor_ms == pytest.approx(1e3 * least)
        assert one.fraction_of_floor == pytest.approx(one.floor_ms / one.step_ms)
        assert one.tok_s == pytest.approx(1e3 * one.num_seqs / one.step_ms)


def test_growth_writes_table_plot_and_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(throughput, "measure_machine", lambda device, dtype, ranks: Machine(10.0, 1.0))
    small = {name: value for name, value in TINY.items() if name != "torch_dtype"}
    monkeypatch.setattr("nanoinfer.bench.workload.QWEN3_0_6B", small)
    monkeypatch.setattr("nanoinfer.bench.growth.QWEN3_0_6B", small)
    monkeypatch.setattr(growth, "NUM_SEQS", (2, 4))
    monkeypatch.setattr(growth, "CONTEXTS", (32, 64))
    monkeypatch.setattr(growth, "MAX_TOKENS", 128)
    path = tmp_path / "chart.svg"
    command = ["--growth", "--device", "cpu", "--dtype", "float32", "--plot", str(path)]
    # Four blocks of 32 hold 4 x 32 and 2 x 64 tokens, three do not.
    throughput.main([*command, "--num-kvcache-blocks", "3", "--kvcache-block-size", "32", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert [(p["num_seqs"], p["context"]) for p in report["points"]] == [(2, 32)]
    assert [(p["num_seqs"], p["context"]) for p in report["left_out"]] == [(2, 64), (4, 32)]
    # With memory for three blocks and a half beside the weights, too; and with none, that is said.
    floor = Floor.of_model(ModelConfig.from_dict(small), itemsize=4)
    weights = 4 * (floor.linear_weights + 2 * floor.head_weights) + growth._SPARE_BYTES
    monkeypatch.setattr(growth, "available_memory", lambda: weights + 112 * floor.kv_bytes)
    throughput.main([*command, "--kvcache-block-size", "32", "--json"])
    assert json.loads(capsys.readouterr().out)["left_out"] == report["left_out"]
    monkeypatch.setattr(growth, "available_memory", lambda: weights - 10)
    with pytest.raises(SystemExit, match="free 11 bytes"):
        throughput.main(command)
    monkeypatch.setattr(growth, "available_memory", lambda: 1 << 60)
    throughput.main(command)
    table = capsys.readouterr().out
    assert [line.split("|")[1:3] for line in table.splitlines()[2:5]] == [
        [" 2 ", " 32 "],
        [" 2 ", " 64 "],
        [" 4 ", " 32 "],
    ]
    assert "Largest fall" in table and "Left out" not in table
    assert len(ElementTree.fromstring(path.read_text()).findall(f".//{SVG}circle")) == 3


names = st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Cs", "Cn")), min_size=1, max_size=8)
coordinates = st.tuples(st.floats(1, 1e6), st.floats(0, 3))


@given(st.dictionaries(names, st.lists(coordinates, min_size=1, max_size=5), min_size=1, max_size=4))
def test_the_chart_is_well_formed_and_has_every_point_in_its_place(
    series: dict[str, list[tuple[float, float]]],
) -> None:
    root = ElementTree.fromstring(line_chart("a < b", "x & y", '"y"', series))
    assert root.tag == f"{SVG}svg"
    circles = root.findall(f".//{SVG}circle")
    lines = root.findall(f".//{SVG}polyline")
    points = [point for line in series.values() for point in line]
    assert len(circles) == len(points) and len(lines) == len(series)
    placed = [(float(circle.attrib["cx"]), float(circle.attrib["cy"])) for circle in circles]
    for (x, y), (across, down) in zip(points, placed, strict=True):
        assert 0 <= across <= float(root.attrib["width"]) and 0 <= down <= float(root.attrib["height"])
        for (other_x, other_y), (other_across, other_down) in zip(points, placed, strict=True):
            assert other_x <= x or other_across >= across - 0.1
            assert other_y <= y or other_down <= down + 0.1


def test_a_chart_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="no point"):
        line_chart("", "", "", {"empty": []})


def test_resident_bytes_are_those_that_were_touched() -> None:
    import mmap

    region = mmap.mmap(-1, 64 * mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    tensor = torch.frombuffer(region, dtype=torch.uint8)
    before = memory.resident_bytes(tensor)
    tensor[: 10 * mmap.PAGESIZE].fill_(1)
    assert memory.resident_bytes(tensor) - before == 10 * mmap.PAGESIZE


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="what is tested is glibc's")
def test_holes_in_the_heap_are_given_back() -> None:
    def anonymous_kib() -> int:
        found = re.search(r"RssAnon:\s*(\d+) kB", Path("/proc/self/status").read_text())
        assert found is not None
        return int(found[1])

    # Too small to be mapped one by one; those that stay keep the heap from shrinking at its end.
    chunks = [torch.ones(64 << 10, dtype=torch.uint8) for _ in range(2000)]
    kept = chunks[9::10]
    full = anonymous_kib()
    del chunks
    return_freed_memory()
    assert full - anonymous_kib() > 0.8 * 64 * (2000 - len(kept))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_and_kv_cache_are_not_counted_as_beyond(tmp_path: Path, dtype: str) -> None:
    shape = TINY | {"vocab_size": 50_000, "hidden_size": 512}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    with LLM(tmp_path, load_format="dummy", dtype=dtype, device="cpu", cpu_kvcache_gib=1, seed=0) as llm:
        executor = llm.engine.executor
        assert isinstance(executor, UniprocExecutor)
        model = executor.runner.model
        floor = Floor.of_model(llm.model_config, getattr(torch, dtype).itemsize)
        table, weights = floor.head_bytes, floor.linear_bytes + floor.head_bytes
        # Held twice where the head is packed; norms and padding are little.
        copies = 0 if hasattr(model.model.layers[0].self_attn.o_proj, "weight") else 1
        assert weights + copies * table <= memory.weight_bytes(model) < 1.01 * weights + copies * table
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=False)
        memory.reset_peak_rss()
        beyond = memory.rss_beyond(executor)
        assert beyond is not None
        extra = torch.ones(200 << 20, dtype=torch.uint8)
        more = memory.rss_beyond(executor)
        assert more is not None and more - beyond == pytest.approx(extra.nbytes, rel=0.1)
        growth.fill_kv_cache(executor.runner, llm.capacity.num_blocks // 2)
        filled = memory.rss_beyond(executor)
        assert filled is not None and abs(filled - more) < 64 << 20
