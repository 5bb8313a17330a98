"""Served throughput next to offline: the same requests through `LLM.generate` and then, all at once, through a server.

`nanoinfer bench serve` loads the model in this process, runs the workload, closes it, starts `nanoinfer serve` as a
process of its own and runs the workload again as streams over loopback. With --url it measures a server that runs.
The load comes from this process, on the server's cores; so while the clock runs it only notes what comes and when, and
all of it is read and checked after that.

All requests come at once, so the k-th one's first token comes when the prompts up to its own have been read,
max_num_batched_tokens at a time. Next to the served times to first token stand those of the offline run, whose steps
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
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nanoinfer.bench.client import Client, Recording
from nanoinfer.bench.workload import MAX_TOKEN_ID, PRESETS, QWEN3_0_6B, Workload
from nanoinfer.demo import demo_model_path

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
    parser.add_argument("--max-concurrency", type=int, help="requests at once; default: all")
    parser.add_argument("--model", help="directory or hub id; default: Qwen3-0.6B's shape with random weights")
    parser.add_argument("--tokenizer", help="a directory with the tokenizer for the model without one")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="one line of JSON instead of the report")
    return parser.parse_known_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args, engine_flags = parse_args(argv)
    preset = PRESETS[args.workload]
    workload = Workload.draw(args.workload, args.num_seqs or preset.num_seqs, args.seed)
    report: dict[str, Any] = {"workload": args.workload, "num_seqs": len(workload.prompts)}
    if args.url:
        report |= asyncio.run(measure(Client(args.url, args.api_key), workload, args.max_concurrency))
    else:
        with tempfile.TemporaryDirectory() as directory:
            flags = [args.model or dummy_model(Path(directory), args.tokenizer), "--max-model-len"]
            flags += [str(preset.max_model_len), "--seed", str(args.seed), *engine_flags]
            flags += [] if args.model else ["--load-format", "dummy"]
            report |= measure_offline(flags, workload)
            with serving(flags) as url:
                report |= asyncio.run(measure(Client(url), workload, args.max_concurrency))
        report["served_by_offline"] = report["served_tok_s"] / report["offline_tok_s"]
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


def measure_offline(flags: list[str], workload: Workload) -> dict[str, Any]:
    import torch

    from nanoinfer.bench.floor import Floor
    from nanoinfer.bench.machine import measure_machine
    from nanoinfer.bench.throughput import generate
    from nanoinfer.config import EngineConfig
    from nanoinfer.entrypoints.cli.flags import given
    from nanoinfer.entrypoints.cli.main import make_parser
    from nanoinfer.llm import LLM

    config = EngineConfig(**given(make_parser("serve")[0].parse_args(["serve", *flags]), EngineConfig))
    with LLM(**asdict(config)) as llm:
        generate(llm, [warm_up_prompt()], [8], 0.6)
        timed = generate(llm, workload.prompts, workload.output_lens, 0.6)
        capacity, model_config = llm.capacity, llm.model_config
    dtype = getattr(torch, capacity.dtype)
    machine = measure_machine(capacity.device, dtype, config.tensor_parallel_size)
    floor = Floor.of_model(model_config, dtype.itemsize, config.quantization, config.kv_cache_dtype)
    prompt_lens = [len(prompt) for prompt in workload.prompts]
    offline = first_token_seconds(prompt_lens, [(step.num_prefill_tokens, step.seconds) for step in timed.steps])
    least = [(step.num_prefill_tokens, floor.seconds(step, machine)) for step in timed.steps]
    return {
        "offline_seconds": timed.seconds,
        "offline_tok_s": timed.output_tokens / timed.seconds,
        "max_num_batched_tokens": capacity.max_num_batched_tokens,
        "gemm_tflop_s": machine.gemm_tflop_s,
        **percentiles("ttft_floor", first_token_seconds(prompt_lens, least)),
        **percentiles("ttft_offline", offline),
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


async def measure(client: Client, workload: Workload, max_concurrency: int | None) -> dict[str, Any]:
    timing_of(await send(client, warm_up_prompt(), 8), 8)
    limit = asyncio.Semaphore(max_concurrency or len(workload.prompts))

    async def limited(prompt: list[int], num_tokens: int) -> Recording:
        async with limit:
            return await send(client, prompt, num_tokens)

    start = time.perf_counter()
    recordings = await asyncio.gather(*map(limited, workload.prompts, workload.output_lens))
    seconds = time.perf_counter() - start
    timings = list(map(timing_of, recordings, workload.output_lens))
    num_tokens = sum(timing.num_tokens for timing in timings)
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
