"""bench.py --gpu-check without a GPU: failing parts, time, the report. The parts themselves: triton_launch_cases.py."""

from __future__ import annotations

import json
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from nanoinfer.bench import gpu_check, throughput
from nanoinfer.bench.gpu_check import Figure
from nanoinfer.bench.machine import Machine


def test_the_check_survives_failing_parts_and_stops_in_time() -> None:
    now = [0.0]
    limits: dict[str, float] = {}
    parts: list[int] = []

    def run(part: str, machine: Machine | None, seconds: float) -> tuple[list[Figure], str | None]:
        limits[part] = seconds
        now[0] += 90
        if part == "machine":
            return [Figure(part, "read", 4000.0, "GB/s"), Figure(part, "gemm", 800.0, "TFLOP/s")], None
        assert machine == Machine(4000.0, 800.0)
        found = [Figure(part, "something", 3000.0, "GB/s", 4000.0, 0.75, False)]
        return found, "an illegal memory access was encountered" if part == "kernels" else None

    figures, failures = gpu_check.check(
        run, budget=290, clock=lambda: now[0], on_part=lambda figures, failures: parts.append(len(figures))
    )
    # What a part had found before it failed stays.
    assert [figure.part for figure in figures] == ["machine", "machine", "kernels", "equality", "workload"]
    assert parts == [2, 3, 4, 5], "the report is written after each part"
    assert failures["kernels"] == "an illegal memory access was encountered"
    assert set(failures) == {"kernels", "attention", "steps", "host"} and "time was up" in failures["steps"]
    # No part may take all of the time, and none more than is left.
    assert limits == {"machine": 60, "kernels": 90, "equality": 110, "workload": 20}
    lines = gpu_check.table(figures, failures).splitlines()
    assert any(line.startswith("kernels") and "illegal memory access" in line for line in lines)
    assert any("75.0%" in line and "4000" in line and "MISSED" in line for line in lines)


def test_without_the_machine_s_rates_nothing_else_runs() -> None:
    figures, failures = gpu_check.check(lambda part, machine, seconds: ([], f"no {part}"))
    assert not figures and failures["machine"] == "no machine" and "rates" in failures["workload"]


def test_a_part_that_dies_in_its_process_is_a_failure_with_its_last_words() -> None:
    figures, failure = gpu_check.run_in_process("no_such_part", Machine(1.0, 1.0), 60)
    assert not figures and failure is not None and "no_such_part" in failure


PART = """
from nanoinfer.bench import gpu_check, gpu_parts
from nanoinfer.bench.gpu_check import Figure
def part(machine):
    print("a library says something")
    yield Figure("steps", "first", 1.5, "ms", passed=True)
    print("figure: cut sho", end="", flush=True)
    raise RuntimeError("no kernel image")
gpu_parts.steps = part
"""


class Hanging(subprocess.Popen):  # type: ignore[type-arg]
    """As good as never done: by the time that the limit is told to be over, all has been said."""

    def wait(self, timeout: float | None = None) -> int:
        super().wait()
        if timeout is None:
            return 0
        raise subprocess.TimeoutExpired(self.args, timeout)


@pytest.mark.parametrize(("kind", "reason"), [(subprocess.Popen, "no kernel image"), (Hanging, "more than 60 s")])
def test_what_a_part_found_before_it_failed_is_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: Any, reason: str
) -> None:
    """A part that raises, and one that hangs."""
    (tmp_path / "sitecustomize.py").write_text(PART)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(gpu_check.__file__).parents[2]}")
    monkeypatch.setattr(subprocess, "Popen", kind)
    figures, failure = gpu_check.run_in_process("steps", Machine(1.0, 1.0), 60)
    assert figures == [Figure("steps", "first", 1.5, "ms", passed=True)]
    assert failure is not None and reason in failure


def test_the_report_is_written_and_the_status_tells(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a card")

    def run(missed: str, part: str, machine: Machine | None, seconds: float) -> tuple[list[Figure], str | None]:
        rates = [Figure(part, "read", 4000.0, "GB/s"), Figure(part, "gemm", 800.0, "TFLOP/s")]
        return (rates if part == "machine" else [Figure(part, "x", 1.0, "ms", passed=part != missed)]), None

    for missed, status in (("", 0), ("steps", 1)):
        assert gpu_check.main(partial(run, missed), str(tmp_path / "out.json")) == status
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["device"] == "a card" and len(report["figures"]) == 2 + len(gpu_check.PARTS) - 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to check")
def test_without_a_gpu_the_check_says_so_and_fails(capsys: Any, tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as exit_:
        throughput.main(["--gpu-check"])
    assert exit_.value.code == 2
    captured = capsys.readouterr()
    assert "no GPU" in captured.err and captured.out == ""
