"""Everything that only a real GPU can say, in one run of at most five minutes: `python bench.py --gpu-check`.

Each part runs in a process of its own with a time limit: a part that fails, hangs or breaks its CUDA context leaves the
others alone. The figures stand in one table, each beside what the card could do at best, and in gpu-check.json.
Without a GPU there is nothing to check: it says so and exits with status 2. Status 1: a part failed, or a bound is
missed.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from nanoinfer.bench.machine import Machine, measure_machine

BUDGET_SECONDS = 290.0
OUTPUT = "gpu-check.json"
# The most important first, should the time not suffice.
PARTS = ("machine", "kernels", "equality", "attention", "workload", "steps", "host")


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


# Runs a part: its name, the machine if it is measured already, seconds that it may take.
RunPart = Callable[[str, Machine | None, float], list[Figure]]


def run_in_process(part: str, machine: Machine | None, seconds: float) -> list[Figure]:
    """Raises RuntimeError with the end of what the part said."""
    command = [sys.executable, "-m", "nanoinfer.bench.gpu_check", part, json.dumps(machine and asdict(machine))]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"it took more than the {seconds:.0f} s that were left") from error
    if done.returncode != 0:
        raise RuntimeError(" | ".join(done.stderr.strip().splitlines()[-3:]) or f"exit status {done.returncode}")
    return [Figure(**figure) for figure in json.loads(done.stdout.strip().splitlines()[-1])]


def check(
    run: RunPart = run_in_process, budget: float = BUDGET_SECONDS, clock: Callable[[], float] = time.monotonic
) -> tuple[list[Figure], dict[str, str]]:
    """All figures, and why parts have none."""
    deadline = clock() + budget
    figures: list[Figure] = []
    failures: dict[str, str] = {}
    machine: Machine | None = None
    for part in PARTS:
        left = deadline - clock()
        if left <= 0:
            failures[part] = "not run: the time was up"
            continue
        if machine is None and part != "machine":
            failures[part] = "not run: it is measured against the machine's rates, and these are not known"
            continue
        try:
            found = run(part, machine, left)
        except Exception as error:
            failures[part] = str(error)
            continue
        figures += found
        if part == "machine":
            rates = {figure.name: figure.value for figure in found}
            machine = Machine(rates["read"], rates["gemm"])
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
    figures, failures = check(run)
    print(table(figures, failures))
    report = {
        "device": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "cuda": torch.version.cuda},
        "figures": [asdict(figure) for figure in figures],
        "failures": failures,
    }
    Path(output).write_text(json.dumps(report, indent=1) + "\n")
    print(f"written to {output}")
    return 1 if failures or any(figure.passed is False for figure in figures) else 0


def machine_part(machine: Machine | None) -> list[Figure]:
    found = measure_machine("cuda", torch.bfloat16, 1)
    return [
        Figure("machine", "read", found.read_gb_s, "GB/s"),
        Figure("machine", "gemm", found.gemm_tflop_s, "TFLOP/s"),
    ]


def run_part(part: str, machine: Machine | None) -> list[Figure]:
    """In this process."""
    if part == "machine":
        return machine_part(machine)
    from nanoinfer.bench import gpu_parts

    assert machine is not None
    run: Callable[[Machine], list[Figure]] = getattr(gpu_parts, part)
    return run(machine)


if __name__ == "__main__":
    rates = json.loads(sys.argv[2])
    print(json.dumps([asdict(figure) for figure in run_part(sys.argv[1], Machine(**rates) if rates else None)]))
