"""bench.py --gpu-check without a GPU: failing parts, time, the report. The parts themselves: triton_launch_cases.py."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from functools import partial
from pathlib import Path
from typing import IO, Any

import pytest
import torch
from kit import wait_until

from nanoinfer.bench import gpu_check, throughput
from nanoinfer.bench.gpu_check import Failure, Figure
from nanoinfer.bench.machine import Machine

RATES = [Figure("machine", "read", 4000.0, "GB/s"), Figure("machine", "gemm", 800.0, "TFLOP/s")]


def test_the_check_survives_failing_parts_and_stops_in_time() -> None:
    now = [0.0]
    limits: dict[str, float] = {}
    told: list[tuple[str, int]] = []

    def run(part: str, machine: Machine, seconds: float) -> tuple[list[Figure], Failure | None]:
        limits[part] = seconds
        now[0] += 90
        if part == "machine":
            return RATES, None
        assert machine == Machine(4000.0, 800.0)
        found = [Figure(part, "something", 3000.0, "GB/s", 4000.0, 0.75, False)]
        return found, Failure("an illegal memory access was encountered") if part == "kernels" else None

    report = gpu_check.check(
        run, budget=290, clock=lambda: now[0], on_part=lambda report, part: told.append((part, len(report.figures)))
    )
    # What a part had found before it failed stays.
    assert [figure.part for figure in report.figures] == ["machine", "machine", "kernels", "equality", "workload"]
    # Also after those that were not run: the report must have them.
    assert told == list(zip(gpu_check.PARTS, (2, 3, 4, 5, 5, 5, 5, 5), strict=True))
    assert report.failures["kernels"].reason == "an illegal memory access was encountered"
    not_run = ["attention", "steps", "host", "breakdown"]
    assert list(report.failures) == ["kernels", *not_run]
    assert "time was up" in report.failures["steps"].reason
    # No part may take all of the time, and none more than is left.
    assert limits == {"machine": 60, "kernels": 70, "equality": 100, "workload": 20}
    assert report.seconds == dict.fromkeys(limits, 90.0) | dict.fromkeys(not_run, 0.0)
    lines = gpu_check.table(report).splitlines()
    assert any(line.startswith("kernels") and "illegal memory access" in line for line in lines)
    assert any("75.0%" in line and "4000" in line and "MISSED" in line for line in lines)


def test_the_whole_run_ends_within_five_minutes() -> None:
    """With ten seconds to end what hangs, and as many for a process that imports torch on a machine just started."""
    assert gpu_check.BUDGET_SECONDS + 20 <= 300
    assert sum(list(gpu_check.PARTS.values())[:2]) + 90 < gpu_check.BUDGET_SECONDS, "equality and workload never run"


@pytest.mark.parametrize("found", [[], RATES[:1]])
def test_without_the_machine_s_rates_the_others_are_held_against_the_datasheet(found: list[Figure]) -> None:
    asked = []

    def run(part: str, machine: Machine, seconds: float) -> tuple[list[Figure], Failure | None]:
        asked.append((part, machine.read_gb_s, machine.gemm_tflop_s))
        return (found, Failure("no cuBLAS", "a traceback")) if part == "machine" else ([], None)

    report = gpu_check.check(run, Machine(3350.0, 989.0))
    assert asked == [(part, 3350.0, 989.0) for part in gpu_check.PARTS]
    assert list(report.failures) == ["machine"]
    failure = report.failures["machine"]
    assert "no cuBLAS" in failure.reason and "3350 GB/s" in failure.reason and failure.said == "a traceback"


def test_a_part_that_dies_in_its_process_is_a_failure_with_its_last_words() -> None:
    figures, failure = gpu_check.run_in_process("no_such_part", Machine(1.0, 1.0), 60)
    assert not figures and failure is not None and "no_such_part" in failure.reason
    assert failure.said.startswith("Traceback") and failure.said.endswith(failure.reason)


PART = """
import signal
from nanoinfer.bench import gpu_check, gpu_parts
from nanoinfer.bench.gpu_check import Failure, Figure
def part(machine):
    print("a library says something")
    yield Figure("steps", "first", 1.5, "ms", passed=True)
    print("figure: cut sho", end="", flush=True)
    raise RuntimeError("no kernel image")
def stuck(machine):
    yield Figure("attention", "first", 1.5, "GB/s")
    print("stuck", flush=True)
    signal.pause()
gpu_parts.steps, gpu_parts.attention = part, stuck
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
    assert failure is not None and reason in failure.reason and "no kernel image" in failure.said


class Stuck(subprocess.Popen):  # type: ignore[type-arg]
    """Its time is up as soon as it says that it is stuck."""

    made: Stuck

    def __init__(self, *arguments: Any, stdout: IO[str], **options: Any) -> None:
        super().__init__(*arguments, stdout=stdout, **options)
        self.out, self.is_first, Stuck.made = stdout, True, self

    def wait(self, timeout: float | None = None) -> int:
        if self.is_first:
            self.is_first = False
            wait_until(lambda: b"stuck" in os.pread(self.out.fileno(), 9999, 0), "stuck", seconds=60)
            raise subprocess.TimeoutExpired(self.args, 60)
        return super().wait(timeout)


def test_a_part_that_hangs_says_where_and_is_gone_before_the_next(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """While it lives it holds its share of the card's memory."""
    (tmp_path / "sitecustomize.py").write_text(PART)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(gpu_check.__file__).parents[2]}")
    monkeypatch.setattr(subprocess, "Popen", Stuck)
    figures, failure = gpu_check.run_in_process("attention", Machine(1.0, 1.0), 60)
    assert [figure.name for figure in figures] == ["first"]
    assert failure is not None and "more than 60 s" in failure.reason and "in stuck" in failure.said
    assert Stuck.made.returncode == -signal.SIGTERM


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")


def test_the_report_is_written_and_the_status_tells(card: None, tmp_path: Path, capsys: Any) -> None:
    def run(missed: str, part: str, machine: Machine, seconds: float) -> tuple[list[Figure], Failure | None]:
        if part == "machine":
            assert (machine.read_gb_s, machine.gemm_tflop_s) == (3350.0, 989.0)
            return RATES, None
        if part == "host":
            return [], Failure("no compiler", "Traceback\nno compiler") if missed == "host" else None
        return [Figure(part, "x", 1.0, "ms", passed=part != missed)], None

    for missed, status in (("", 0), ("steps", 1), ("host", 1)):
        assert gpu_check.main(partial(run, missed), str(tmp_path / "out.json")) == status
    report = json.loads((tmp_path / "out.json").read_text())
    assert "H100" in report["device"] and report["torch"].startswith(torch.__version__.split("+")[0])
    assert len(report["figures"]) == 2 + len(gpu_check.PARTS) - 2 and set(report["seconds"]) == set(gpu_check.PARTS)
    assert report["failures"] == {"host": {"reason": "no compiler", "said": "Traceback\nno compiler"}}
    said = capsys.readouterr()
    assert "host FAILED: no compiler\nTraceback" in said.err and "steps: 1 figures in" in said.err
    assert "host       FAILED: no compiler" in said.out


def test_the_report_is_json_whatever_was_found(card: None, tmp_path: Path) -> None:
    """It is one before the first part is over, too: who ends the whole run has something then."""
    output, read = tmp_path / "out.json", []

    def strictly(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    def run(part: str, machine: Machine, seconds: float) -> tuple[list[Figure], Failure | None]:
        read.append(json.loads(output.read_text(), parse_constant=strictly))
        return [Figure(part, "error", float("nan"), "error", passed=False)], None

    assert gpu_check.main(run, str(output)) == 1
    assert read[0]["figures"] == [] and read[1]["figures"][0]["value"] is None
    with pytest.raises(OSError):
        gpu_check.main(lambda *_: pytest.fail("a part ran whose figures cannot be kept"), str(tmp_path))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to check")
def test_without_a_gpu_the_check_says_so_and_fails(capsys: Any, tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as exit_:
        throughput.main(["--gpu-check"])
    assert exit_.value.code == 2
    captured = capsys.readouterr()
    assert "no GPU" in captured.err and captured.out == ""
