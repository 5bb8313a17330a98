"""Everything that only a real GPU can say, in one run of at most five minutes: `python bench.py --gpu-check`.

Each part runs in a process of its own with a time limit: a part that fails, hangs or breaks its CUDA context leaves the
others alone, and keeps the figures that it had found. They stand in one table, each beside what the card could do at
best, and in gpu-check.json, which is written anew after each part.
Without a GPU there is nothing to check: it says so and exits with status 2. Status 1: a part failed, or a bound is
missed.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from nanoinfer.bench.machine import Machine, measure_machine

BUDGET_SECONDS = 290.0
OUTPUT = "gpu-check.json"
# The most important first, should the time not suffice; each with the seconds after which it is taken to hang. Together
# these are more than there are: most parts need far less.
PARTS = {
    "machine": 60.0,
    "kernels": 90.0,
    "equality": 110.0,
    "workload": 120.0,
    "attention": 70.0,
    "steps": 80.0,
    "host": 60.0,
}


@dataclass(frozen=True)
class Figure:
    """One line of the table. best: what the card could do, in the same unit, None where there is no such thing.

    fraction: of the best that was reached. passed: None where there is no bound to pass.
    """

    part: str
    name: str
    value: float
    unit: str
    best: float | None = None
    fraction: float | None = None
    passed: bool | None = None


# Runs a part: its name, the machine if it is measured already, seconds that it may take. Returns what was found, and
# why that may not be all.
RunPart = Callable[[str, Machine | None, float], tuple[list[Figure], str | None]]
# A line of a part's output that is a figure begins with this.
_MARK = "figure: "


def run_in_process(part: str, machine: Machine | None, seconds: float) -> tuple[list[Figure], str | None]:
    """What the part found, and the end of what it said if it failed."""
    command = [sys.executable, "-m", "nanoinfer.bench.gpu_check", part, json.dumps(machine and asdict(machine))]
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        # Where this package is found, wherever bench.py was called from.
        process = subprocess.Popen(command, stdout=out, stderr=err, cwd=Path(__file__).parents[2])
        failure = None
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            failure = f"it took more than {seconds:.0f} s"
        else:
            if status != 0:
                err.seek(0)
                failure = " | ".join(err.read().strip().splitlines()[-3:]) or f"exit status {status}"
        out.seek(0)
        found = [line.removeprefix(_MARK) for line in out if line.startswith(_MARK) and line.endswith("\n")]
    return [Figure(**json.loads(line)) for line in found], failure


def check(
    run: RunPart = run_in_process,
    budget: float = BUDGET_SECONDS,
    clock: Callable[[], float] = time.monotonic,
    on_part: Callable[[list[Figure], dict[str, str]], None] = lambda figures, failures: None,
) -> tuple[list[Figure], dict[str, str]]:
    """All figures, and why parts have none or not all. on_part: called after each part with what there is."""
    deadline = clock() + budget
    figures: list[Figure] = []
    failures: dict[str, str] = {}
    machine: Machine | None = None
    for part, limit in PARTS.items():
        left = min(limit, deadline - clock())
        if left <= 0:
            failures[part] = "not run: the time was up"
            continue
        if machine is None and part != "machine":
            failures[part] = "not run: it is measured against the machine's rates, and these are not known"
            continue
        found, failure = run(part, machine, left)
        figures += found
        if failure is not None:
            failures[part] = failure
        elif part == "machine":
            rates = {figure.name: figure.value for figure in found}
            machine = Machine(rates["read"], rates["gemm"])
        on_part(figures, failures)
    return figures, failures


def table(figures: list[Figure], failures: dict[str, str]) -> str:
    lines = [f"{'part':10} {'figure':38} {'value':>10} {'unit':8} {'best':>10} {'fraction':>9}"]
    for one in figures:
        best = "" if one.best is None else f"{one.best:.4g}"
        fraction = "" if one.fraction is None else f"{one.fraction:.1%}"
        verdict = {True: "ok", False: "MISSED", None: ""}[one.passed]
        lines.append(
            f"{one.part:10} {one.name:38} {one.value:10.4g} {one.unit:8} {best:>10} {fraction:>9} {verdict}".rstrip()
        )
    lines += [f"{part:10} FAILED: {reason}" for part, reason in failures.items()]
    return "\n".join(lines)


def main(run: RunPart = run_in_process, output: str = OUTPUT) -> int:
    """The exit status."""
    if not torch.cuda.is_available():
        print("--gpu-check: torch sees no GPU on this machine; nothing was checked", file=sys.stderr)
        return 2
    about = {
        "device": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "cuda": torch.version.cuda},
    }

    def write(figures: list[Figure], failures: dict[str, str]) -> None:
        report = about | {"figures": [asdict(figure) for figure in figures], "failures": failures}
        Path(output).write_text(json.dumps(report, indent=1) + "\n")

    figures, failures = check(run, on_part=write)
    print(table(figures, failures))
    print(f"written to {output}")
    return 1 if failures or any(figure.passed is False for figure in figures) else 0


def machine_part() -> Iterator[Figure]:
    found = measure_machine("cuda", torch.bfloat16, 1)
    yield Figure("machine", "read", found.read_gb_s, "GB/s")
    yield Figure("machine", "gemm", found.gemm_tflop_s, "TFLOP/s")


def run_part(part: str, machine: Machine | None) -> Iterator[Figure]:
    """In this process."""
    if part == "machine":
        return machine_part()
    from nanoinfer.bench import gpu_parts

    assert machine is not None
    run: Callable[[Machine], Iterator[Figure]] = getattr(gpu_parts, part)
    return run(machine)


if __name__ == "__main__":
    rates = json.loads(sys.argv[2])
    for figure in run_part(sys.argv[1], Machine(**rates) if rates else None):
        print(_MARK + json.dumps(asdict(figure)), flush=True)
