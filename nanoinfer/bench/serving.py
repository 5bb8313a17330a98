"""Served throughput next to offline: the same requests through `LLM.generate` and, all at once, through a server.

`nanoinfer bench serve` has an engine in this process and `nanoinfer serve` as a process of its own, and runs a workload
in one and then as streams over loopback in the other, several times in changing order, since a machine's speed drifts
by more than what is measured. (A GPU has memory for one engine: there, all offline runs come first.) With --url it
measures a server that runs. The load comes from this process, on the server's cores; so while the clock runs it only
notes what comes and when, and all of it is read and checked after that. Seconds and tokens are sums over the rounds;
served_by_offline is the median of the rounds' ratios.

All requests come at once, so the k-th one's first token comes when the prompts up to its own have been read,
max_num_batched_tokens at a time. Next to the served times to first token stand those of the offline runs, whose steps
are known (what HTTP and the engine loop add is the difference), and their floor: the same steps at this machine's
matrix rate and reading speed.
"""

from __future__ import annotations

import argparse
import asyncio
import bisect
import contextlib
import itertools
import json
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanoinfer.bench.client import Client, Recording
from nanoinfer.bench.workload import MAX_TOKEN_ID, PRESETS, QWEN3_0_6B, Workload
from nanoinfer.demo import demo_model_path

if TYPE_CHECKING:
    from nanoinfer.bench.throughput import Timed
    from nanoinfer.config import EngineConfig
    from nanoinfer.llm import LLM

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
_START_SECONDS = 900


@dataclass
class Timing:
    """Of one request: seconds from its start to each event with tokens, and how many tokens there were."""

    event_seconds: list[float]
    num_tokens: int


def parse_args(argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """The benchmark's options, and what is left: the engine's flags, which go to `nanoinfer serve` as they are."""
    parser = argparse.ArgumentParser(
        prog="nanoinfer bench serve", description=(__doc__ or "").split("\n\n")[0], allow_abbrev=False,
        epilog="Further flags are the engine's, as for nanoinfer serve.",
    )  # fmt: skip
    parser.add_argument("--url", help="a server that runs, such as http://127.0.0.1:8000; offline is then not measured")
    parser.add_argument("--api-key", help="of that server")
    parser.add_argument("--workload", choices=PRESETS, default="w1")
    parser.add_argument("--num-seqs", type=int, help="fewer requests than the workload has")
    parser.add_argument(
        "--rounds", type=_at_least_one, default=3, help="runs of each, with other prompts every time; default: 3"
    )
    parser.add_argument("--max-concurrency", type=int, help="requests at once; default: all")
    parser.add_argument("--model", help="directory or hub id; default: Qwen3-0.6B's shape with random weights")
    parser.add_argument("--tokenizer", help="a directory with the tokenizer for the model without one")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="one line of JSON instead of the report")
    return parser.parse_known_args(argv)


def _at_least_one(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return value


def main(argv: Sequence[str] | None = None) -> None:
    args, engine_flags = parse_args(argv)
    preset = PRESETS[args.workload]
    num_seqs = args.num_seqs or preset.num_seqs
    # Other prompts every time, and on a server that runs in every run: one that was seen is in the prefix cache.
    rng = random.Random(f"{args.seed}, {time.time_ns() if args.url else 'a server of our own'}")
    workloads = [Workload.draw(args.workload, num_seqs, rng.getrandbits(64)) for _ in range(args.rounds)]
    report: dict[str, Any] = {"workload": args.workload, "num_seqs": num_seqs, "rounds": args.rounds}
    if args.url:
        client = Client(args.url, args.api_key)
        asyncio.run(warm_up(client))
        report |= served_report([asyncio.run(serve(client, one, args.max_concurrency)) for one in workloads])
    else:
        with tempfile.TemporaryDirectory() as directory:
            flags = [args.model or dummy_model(Path(directory), args.tokenizer), "--max-model-len"]
            flags += [str(preset.max_model_len), "--seed", str(args.seed), *engine_flags]
            flags += [] if args.model else ["--load-format", "dummy"]
            report |= measure_both(flags, workloads, args.max_concurrency)
    if args.json:
        print(json.dumps(report))
        return
    for name, value in report.items():
        print(f"{name:24}{value:.4g}" if isinstance(value, float) else f"{name:24}{value}")


def dummy_model(directory: Path, tokenizer: str | None) -> str:
    """Qwen3-0.6B's shape; with the demo's tokenizer if no other is named, whose texts are then short."""
    (directory / "config.json").write_text(json.dumps(QWEN3_0_6B))
    source = Path(tokenizer) if tokenizer else demo_model_path()
    for name in _TOKENIZER_FILES:
        shutil.copy(source / name, directory / name)
    return str(directory)


def measure_both(flags: list[str], workloads: list[Workload], max_concurrency: int | None) -> dict[str, Any]:
    from nanoinfer.bench.throughput import generate
    from nanoinfer.config import EngineConfig
    from nanoinfer.entrypoints.cli.flags import given
    from nanoinfer.entrypoints.cli.main import make_parser
    from nanoinfer.llm import LLM

    config = EngineConfig(**given(make_parser("serve")[0].parse_args(["serve", *flags]), EngineConfig))
    offline: list[Timed] = []
    served: list[Served] = []

    with contextlib.ExitStack() as engine, contextlib.ExitStack() as server:
        llm = engine.enter_context(LLM(**asdict(config)))
        generate(llm, [warm_up_prompt()], [8], 0.6)
        has_room_for_one = llm.capacity.device == "cuda"

        def run_offline(workload: Workload) -> None:
            offline.append(generate(llm, workload.prompts, workload.output_lens, 0.6))

        def run_served(workload: Workload) -> None:
            served.append(asyncio.run(serve(client, workload, max_concurrency)))

        if has_room_for_one:
            for workload in workloads:
                run_offline(workload)
            report = offline_report(llm, config, workloads, offline)
            engine.close()
        client = Client(server.enter_context(serving(flags)))
        asyncio.run(warm_up(client))
        for index, workload in enumerate(workloads):
            order = [run_served] if has_room_for_one else [run_offline, run_served]
            for run in order[:: -1 if index % 2 else 1]:
                run(workload)
        if not has_room_for_one:
            report = offline_report(llm, config, workloads, offline)
    ratios = [a.seconds / b.seconds for a, b in zip(offline, served, strict=True)]
    return report | served_report(served) | {"by_round": ratios, "served_by_offline": statistics.median(ratios)}


def offline_report(llm: LLM, config: EngineConfig, workloads: list[Workload], runs: list[Timed]) -> dict[str, Any]:
    import torch

    from nanoinfer.bench.floor import Floor
    from nanoinfer.bench.machine import measure_machine

    dtype = getattr(torch, llm.capacity.dtype)
    machine = measure_machine(llm.capacity.device, dtype, config.tensor_parallel_size)
    floor = Floor.of_model(llm.model_config, dtype.itemsize, config.quantization, config.kv_cache_dtype)
    seconds: list[float] = []
    least: list[float] = []
    for workload, run in zip(workloads, runs, strict=True):
        prompt_lens = [len(prompt) for prompt in workload.prompts]
        seconds += first_token_seconds(prompt_lens, [(step.num_prefill_tokens, step.seconds) for step in run.steps])
        floors = [(step.num_prefill_tokens, floor.seconds(step, machine)) for step in run.steps]
        least += first_token_seconds(prompt_lens, floors)
    total = sum(run.seconds for run in runs)
    return {
        "offline_seconds": total,
        "offline_tok_s": sum(run.output_tokens for run in runs) / total,
        "max_num_batched_tokens": llm.capacity.max_num_batched_tokens,
        "gemm_tflop_s": machine.gemm_tflop_s,
        **percentiles("ttft_floor", least),
        **percentiles("ttft_offline", seconds),
    }


def first_token_seconds(prompt_lens: list[int], steps: list[tuple[int, float]]) -> list[float]:
    """When each prompt's first token comes, if all wait from the start and are read in order, each once.

    steps: (prompt tokens read, seconds) of each. A prompt is read when those before it are, and it itself.
    """
    reads = list(itertools.accumulate(num_tokens for num_tokens, _ in steps))
    times = list(itertools.accumulate(seconds for _, seconds in steps))
    return [times[bisect.bisect_left(reads, end)] for end in itertools.accumulate(prompt_lens)]


def warm_up_prompt() -> list[int]:
    return [MAX_TOKEN_ID - i for i in range(128)]


@contextlib.contextmanager
def serving(flags: list[str]) -> Iterator[str]:
    """A server in a process of its own; gives its address, once it listens."""
    command = [sys.executable, "-m", "nanoinfer", "serve", *flags, "--port", "0", "--disable-access-log"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        deadline = time.monotonic() + _START_SECONDS
        for line in process.stderr:
            if match := re.search(r"Serving .* at (http://\S+) ", line):
                yield match[1]
                return
            if time.monotonic() > deadline:
                break
        raise RuntimeError(f"the server did not start (exit code {process.poll()})")
    finally:
        process.terminate()
        process.stderr.close()
        process.wait(30)


@dataclass
class Served:
    """A workload's streams. seconds: of all."""

    seconds: float
    timings: list[Timing]


async def warm_up(client: Client) -> None:
    timing_of(await send(client, warm_up_prompt(), 8), 8)


async def serve(client: Client, workload: Workload, max_concurrency: int | None) -> Served:
    limit = asyncio.Semaphore(max_concurrency or len(workload.prompts))

    async def limited(prompt: list[int], num_tokens: int) -> Recording:
        async with limit:
            return await send(client, prompt, num_tokens)

    start = time.perf_counter()
    recordings = await asyncio.gather(*map(limited, workload.prompts, workload.output_lens))
    seconds = time.perf_counter() - start
    return Served(seconds, list(map(timing_of, recordings, workload.output_lens)))


def served_report(runs: list[Served]) -> dict[str, Any]:
    timings = [timing for run in runs for timing in run.timings]
    num_tokens, seconds = sum(timing.num_tokens for timing in timings), sum(run.seconds for run in runs)
    gaps = [b - a for t in timings for a, b in zip(t.event_seconds, t.event_seconds[1:], strict=False)]
    return {
        "output_tokens": num_tokens,
        "served_seconds": seconds,
        "served_tok_s": num_tokens / seconds,
        **percentiles("ttft", [timing.event_seconds[0] for timing in timings]),
        **percentiles("itl", gaps),
    }


def percentiles(name: str, seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    return {f"{name}_ms_p{round(100 * q)}": 1e3 * percentile(ordered, q) for q in (0.5, 0.99)}


async def send(client: Client, prompt: list[int], num_tokens: int) -> Recording:
    """One stream, to its end."""
    body = {
        "prompt": prompt, "max_tokens": num_tokens, "temperature": 0.6, "top_p": 1, "top_k": 0, "ignore_eos": True,
        "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    return await client.record("/v1/completions", body)


def timing_of(recording: Recording, num_tokens: int) -> Timing:
    """RuntimeError unless the stream gave as many tokens as were asked for."""
    timing = Timing([], 0)
    for seconds, event in recording.events():
        if "error" in event:
            raise RuntimeError(f"the server says {event['error']['message']}")
        if event["choices"]:
            timing.event_seconds.append(seconds)
        if event.get("usage"):
            timing.num_tokens = event["usage"]["completion_tokens"]
    if timing.num_tokens != num_tokens:
        raise RuntimeError(f"asked for {num_tokens} tokens, got {timing.num_tokens}: the figures would be wrong")
    return timing


def percentile(ordered: list[float], fraction: float) -> float:
    return ordered[min(len(ordered) - 1, int(fraction * len(ordered)))] if ordered else float("nan")


if __name__ == "__main__":
    main()
