"""Everything that only a real GPU can say, in one run of at most five minutes: `python bench.py --gpu-check`.

Each part runs in a process of its own with a time limit: a part that fails, hangs or breaks its CUDA context leaves the
others alone, and keeps the figures that it had found. They stand in one table, each beside what the card could do at
best, and in gpu-check.json, which is written anew after each part, with what a failed part said. Progress goes to
stderr.
Without a GPU there is nothing to check: it says so and exits with status 2. Status 1: a part failed, or a bound is
missed.
"""

from __future__ import annotations

import faulthandler
import importlib.metadata
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from nanoinfer.bench.machine import Machine, best_rate, cuda_read_methods, measure_machine

# With the start of this process, and the end of a part that hangs, under five minutes.
BUDGET_SECONDS = 280.0
OUTPUT = "gpu-check.json"
# The most important first, should the time not suffice; each with the seconds after which it is taken to hang. Together
# these are more than there are: most parts need far less.
PARTS = {
    "machine": 60.0,
    "kernels": 70.0,
    "equality": 100.0,
    "workload": 100.0,
    "attention": 60.0,
    "steps": 70.0,
    "host": 45.0,
    "breakdown": 40.0,
}
# A process has hardly started after so long.
_LEAST_SECONDS = 10.0
# GB/s of memory and dense bf16 TFLOP/s by the vendor's datasheet: what measured rates are held against, and what stands
# for them where measuring fails.
DATASHEET = {"H200": (4800.0, 989.0), "H100": (3350.0, 989.0), "A100": (2039.0, 312.0)}


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


@dataclass(frozen=True)
class Failure:
    """said: the end of what the part wrote to stderr, tracebacks included."""

    reason: str
    said: str = ""


@dataclass
class Report:
    """What there is so far. failures: of the parts that have no figures or not all; seconds: that each part took."""

    figures: list[Figure] = field(default_factory=list)
    failures: dict[str, Failure] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)


# Runs a part: its name, what the machine can do, seconds that the part may take. Returns what was found, and why that
# may not be all.
RunPart = Callable[[str, Machine, float], tuple[list[Figure], Failure | None]]
# A line of a part's output that is a figure begins with this.
_MARK = "figure: "
_SAID_CHARACTERS = 6000


def run_in_process(part: str, machine: Machine, seconds: float) -> tuple[list[Figure], Failure | None]:
    """What the part found, and the end of what it said if it failed."""
    command = [sys.executable, "-m", "nanoinfer.bench.gpu_check", part, json.dumps(asdict(machine))]
    with tempfile.TemporaryFile("w+", errors="replace") as out, tempfile.TemporaryFile("w+", errors="replace") as err:
        # Where this package is found, wherever bench.py was called from. Nothing is fetched: all models are local.
        where, environment = Path(__file__).parents[2], os.environ | {"HF_HUB_OFFLINE": "1"}
        if part == "kernels":
            environment["CUDA_LAUNCH_BLOCKING"] = "1"  # the traceback names the kernel that is at fault
        process = subprocess.Popen(command, stdout=out, stderr=err, cwd=where, env=environment)
        reason = None
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            reason = f"it took more than {seconds:.0f} s"
            _end(process)
        err.seek(0)
        said = err.read().strip()
        if reason is None and status != 0:
            reason = said.splitlines()[-1] if said else f"exit status {status}"
        out.seek(0)
        found = [line.removeprefix(_MARK) for line in out if line.startswith(_MARK) and line.endswith("\n")]
    figures = [Figure(**json.loads(line)) for line in found]
    return figures, None if reason is None else Failure(reason, said[-_SAID_CHARACTERS:])


def _end(process: subprocess.Popen[bytes]) -> None:
    """On the first signal it says where it was. Its memory on the card is free once it is gone, hence the wait."""
    for stop in (process.terminate, process.kill):
        stop()
        try:
            process.wait(5)
            return
        except subprocess.TimeoutExpired:
            continue


def check(
    run: RunPart = run_in_process,
    datasheet: Machine | None = None,
    budget: float = BUDGET_SECONDS,
    clock: Callable[[], float] = time.monotonic,
    on_part: Callable[[Report, str], None] = lambda report, part: None,
) -> Report:
    """datasheet: what stands for the machine's rates until they are measured. on_part: called after each part."""
    deadline = clock() + budget
    report = Report()
    machine = datasheet or _datasheet("")
    for part, limit in PARTS.items():
        start = clock()
        left = min(limit, deadline - start)
        if left < _LEAST_SECONDS:
            report.failures[part] = Failure("not run: the time was up")
        else:
            found, failure = run(part, machine, left)
            report.figures += found
            if failure is not None:
                report.failures[part] = failure
            rates = {figure.name: figure.value for figure in found}
            if part == "machine" and {"read", "gemm"} <= set(rates):
                machine = Machine(rates["read"], rates["gemm"])
            elif part == "machine":
                note = f"; the others are held against the datasheet's {machine.read_gb_s:g} GB/s"
                reason, said = (failure.reason, failure.said) if failure else ("it found no rates", "")
                report.failures[part] = Failure(reason + note, said)
        report.seconds[part] = clock() - start
        on_part(report, part)
    return report


def table(report: Report) -> str:
    width = max((len(one.name) for one in report.figures), default=0)
    lines = [f"{'part':10} {'figure':{width}} {'value':>10} {'unit':8} {'best':>10} {'fraction':>9}"]
    for one in report.figures:
        best = "" if one.best is None else f"{one.best:.4g}"
        fraction = "" if one.fraction is None else f"{one.fraction:.1%}"
        verdict = {True: "ok", False: "MISSED", None: ""}[one.passed]
        line = f"{one.part:10} {one.name:{width}} {one.value:10.4g} {one.unit:8} {best:>10} {fraction:>9} {verdict}"
        lines.append(line.rstrip())
    lines += [f"{part:10} FAILED: {failure.reason[:400]}" for part, failure in report.failures.items()]
    return "\n".join(lines)


def main(run: RunPart = run_in_process, output: str = OUTPUT) -> int:
    """The exit status."""
    if not torch.cuda.is_available():
        print("--gpu-check: torch sees no GPU on this machine; nothing was checked", file=sys.stderr)
        return 2
    about = _about()

    def write(report: Report) -> None:
        whole = json.dumps(about | asdict(report))
        # NaN is no JSON.
        Path(output).write_text(json.dumps(json.loads(whole, parse_constant=lambda _: None), indent=1) + "\n")

    def on_part(report: Report, part: str) -> None:
        write(report)
        found = sum(figure.part == part for figure in report.figures)
        print(f"{part}: {found} figures in {report.seconds[part]:.1f} s", file=sys.stderr, flush=True)
        if (failure := report.failures.get(part)) is not None:
            print(f"{part} FAILED: {failure.reason}\n{failure.said[-2000:]}", file=sys.stderr, flush=True)

    write(Report())  # where it cannot be written, that is said now
    report = check(run, _datasheet(about["device"]), on_part=on_part)
    print(table(report))
    print(f"written to {output}")
    return 1 if report.failures or any(figure.passed is False for figure in report.figures) else 0


def _about() -> dict[str, str]:
    found = {
        "device": torch.cuda.get_device_name(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "python": platform.python_version(),
        "cuda": str(torch.version.cuda),
    }
    for package in ("torch", "triton", "transformers", "numpy", "flash-attn"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "absent"
    return found


def _datasheet(device: str) -> Machine:
    """Of the card with that name; of an H200 if it is another one."""
    rates = next((rates for name, rates in DATASHEET.items() if name in device), DATASHEET["H200"])
    return Machine(*rates, "datasheet", "datasheet")


def machine_part(datasheet: Machine) -> Iterator[Figure]:
    found = measure_machine("cuda", torch.bfloat16, 1)
    read, gemm = found.read_gb_s, found.gemm_tflop_s
    yield Figure("machine", "read", read, "GB/s", datasheet.read_gb_s, read / datasheet.read_gb_s)
    yield Figure("machine", "gemm", gemm, "TFLOP/s", datasheet.gemm_tflop_s, gemm / datasheet.gemm_tflop_s)
    for name, method in cuda_read_methods().items():
        rate = best_rate({name: method}, 5, "cuda")[0] / 1e9
        yield Figure("machine", name, rate, "GB/s", datasheet.read_gb_s, rate / datasheet.read_gb_s)


def run_part(part: str, machine: Machine) -> Iterator[Figure]:
    """In this process."""
    if part == "machine":
        return machine_part(machine)
    from nanoinfer.bench import gpu_parts

    run: Callable[[Machine], Iterator[Figure]] = getattr(gpu_parts, part)
    return run(machine)


if __name__ == "__main__":
    # What it was doing is told when it is ended because it hangs, and when it crashes.
    faulthandler.enable()
    faulthandler.register(signal.SIGTERM, chain=True)
    for figure in run_part(sys.argv[1], Machine(**json.loads(sys.argv[2]))):
        print(_MARK + json.dumps(asdict(figure)), flush=True)
