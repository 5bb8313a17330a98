"""Offline throughput, next to the floor that this machine sets for the very steps that ran.

The protocol is nano-vllm's (github.com/GeeeekExplorer/nano-vllm, bench.py): random ids, mixed lengths, end-of-sequence
ignored, one warm-up request, tokens counted from what came back. Order: choose the workload, measure the machine
(before the engine takes its memory), load the engine, warm up, run the workload, run one request alone, run prompts of
512 tokens for their first output token, report.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from nanoinfer.bench import gpu_check
from nanoinfer.bench.floor import Floor
from nanoinfer.bench.growth import markdown, measure_growth, plot
from nanoinfer.bench.host_time import measure_host_time
from nanoinfer.bench.kernels import measure_kernels
from nanoinfer.bench.machine import Machine, measure_machine
from nanoinfer.bench.memory import reset_peak_rss, rss_beyond
from nanoinfer.bench.quality import measure_quality, quality_markdown
from nanoinfer.bench.step_overhead import measure_step_overhead
from nanoinfer.bench.workload import MAX_TOKEN_ID, PRESETS, QWEN3_0_6B, SHAPE_ONLY, Workload, open_llm
from nanoinfer.config import ATTENTION_BACKENDS, DTYPES, KV_CACHE_DTYPES, QUANTIZATIONS, EngineConfig, ModelConfig
from nanoinfer.llm import LLM
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.step import StepStats
from nanoinfer.version import __version__
from nanoinfer.worker.kv_cache import GIB
from nanoinfer.worker.model_runner import cpu_has_bf16, resolve_device

BATCH1_INPUT, BATCH1_OUTPUT = 128, 64
PREFILL_INPUT, PREFILL_PROMPTS, PREFILL_PASSES = 512, 8, 3


@dataclass(frozen=True)
class Timed:
    """One call of `generate`. seconds: from the requests handed over to the last token back."""

    seconds: float
    output_tokens: int
    steps: list[StepStats]

    def floor_seconds(self, floor: Floor, machine: Machine) -> float:
        return sum(floor.seconds(step, machine) for step in self.steps)


@dataclass(frozen=True)
class Run:
    """The workload, one request alone, and, in the best pass, prompts of 512 tokens of which only the first output
    token is wanted.

    rss_beyond: peak bytes of the process in all three, without weights and resident KV; None where it cannot be told.
    """

    workload: Timed
    batch1: Timed
    prefill: Timed
    rss_beyond: int | None


def generate(llm: LLM, prompts: list[list[int]], output_lens: list[int], temperature: float) -> Timed:
    """RuntimeError unless each request got as many tokens as it asked for, and each prompt was computed in full."""
    params = [SamplingParams(temperature=temperature, ignore_eos=True, max_tokens=n) for n in output_lens]
    steps: list[StepStats] = []
    llm.engine.on_step = steps.append
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    llm.engine.on_step = None
    produced = [len(output.outputs[0].token_ids) for output in outputs]
    if produced != output_lens:
        raise RuntimeError(f"asked for {output_lens} output tokens, produced {produced}: the figures would be wrong")
    given, computed = sum(map(len, prompts)), sum(step.num_prefill_tokens for step in steps)
    if computed < given:
        raise RuntimeError(f"{computed} of {given} prompt tokens were computed: a cache has helped")
    return Timed(seconds, sum(produced), steps)


def run_workload(llm: LLM, workload: Workload, seed: int) -> Run:
    # Prefix caching stays as shipped, since users pay for its index, too. It cannot help, which `generate` checks: the
    # prompts are random, and those outside the workload are drawn apart from it.
    rng = random.Random(f"apart from the workload, {seed}")

    def draw(num_tokens: int) -> list[int]:
        return [rng.randint(0, MAX_TOKEN_ID) for _ in range(num_tokens)]

    warm_up, single = draw(BATCH1_INPUT), draw(BATCH1_INPUT)
    reset_peak_rss()
    generate(llm, [warm_up], [8], 0.6)
    timed = generate(llm, workload.prompts, workload.output_lens, 0.6)
    batch1 = generate(llm, [single], [BATCH1_OUTPUT], 0.0)
    passes = [
        generate(llm, [draw(PREFILL_INPUT) for _ in range(PREFILL_PROMPTS)], [1] * PREFILL_PROMPTS, 0.0)
        for _ in range(PREFILL_PASSES)
    ]
    # It is held against the machine's best of several, too.
    prefill = min(passes, key=lambda timed: timed.seconds)
    return Run(timed, batch1, prefill, rss_beyond(llm.engine.executor))


def _rate(amount: float, seconds: float) -> float:
    return amount / seconds if seconds else 0.0


def summarize(workload: Workload, run: Run, floor: Floor, machine: Machine) -> dict[str, Any]:
    # A step with any prefill tokens is prefill with all of its time, also if other rows decode in it: their share
    # cannot be told apart. So decode is counted, tokens and time, over the steps that do nothing else.
    whole, alone, first_tokens = run.workload, run.batch1, run.prefill
    prefill = [step for step in whole.steps if step.num_prefill_tokens]
    decode = [step for step in whole.steps if not step.num_prefill_tokens]
    floor_seconds = whole.floor_seconds(floor, machine)
    prefill_flops = sum(floor.flops(step) for step in first_tokens.steps)
    decode_seconds = sum(step.seconds for step in decode)
    return {
        "workload": workload.name,
        "num_seqs": len(workload.prompts),
        "prompt_tokens": sum(map(len, workload.prompts)),
        "output_tokens": whole.output_tokens,
        "seconds": whole.seconds,
        "output_tok_s": whole.output_tokens / whole.seconds,
        "prefill_tok_s": _rate(sum(step.num_prefill_tokens for step in prefill), sum(s.seconds for s in prefill)),
        "decode_tok_s": _rate(sum(step.num_decode_tokens for step in decode), decode_seconds),
        "batch1_tok_s": BATCH1_OUTPUT / alone.seconds,
        "mean_batch": _rate(whole.output_tokens, len(whole.steps)),  # tokens produced per step, of any kind
        "steps": len(whole.steps),
        "preemptions": sum(step.num_preemptions for step in whole.steps),
        "host_ms_per_step": 1e3 * _rate(decode_seconds - sum(s.execute_seconds for s in decode), len(decode)),
        **asdict(machine),
        "floor_seconds": floor_seconds,
        "floor_tok_s": whole.output_tokens / floor_seconds,
        "fraction_of_floor": floor_seconds / whole.seconds,
        "batch1_fraction_of_floor": alone.floor_seconds(floor, machine) / alone.seconds,
        "prefill_512_fraction": prefill_flops / (machine.gemm_tflop_s * 1e12) / first_tokens.seconds,
        "rss_beyond_gib": None if run.rss_beyond is None else run.rss_beyond / GIB,
    }


def environment(device: str) -> dict[str, Any]:
    packages = {dist.metadata["Name"]: dist.version for dist in importlib.metadata.distributions()}
    versions = {name: packages.get(name, "absent") for name in ("torch", "transformers", "triton")}
    return {
        "device": device,
        "device_name": torch.cuda.get_device_name() if device == "cuda" else platform.machine(),
        "threads": torch.get_num_threads(),
        "cpus": os.cpu_count(),
        "versions": {"nanoinfer": __version__, "python": platform.python_version(), **versions},
    }


def parse_args(argv: Sequence[str] | None) -> tuple[argparse.Namespace, EngineConfig]:
    """The benchmark's options, and the engine's; the model in the latter is a placeholder if none was given."""
    parser = argparse.ArgumentParser(
        description="Offline throughput, next to the floor that this machine sets for the very steps that ran. "
        "batch1_tok_s is 64 / seconds of one greedy request, 128 tokens in and 64 out, prefill included; "
        "batch1_fraction_of_floor is of the same request. prefill_512_fraction is the rate of 8 prompts of 512 tokens, "
        "in the best of three passes, as a share of gemm_tflop_s, which is the best of several, too. rss_beyond_gib is "
        "the process's peak in these runs without weights and KV cache.",
        allow_abbrev=False,
    )
    parser.add_argument("--workload", choices=PRESETS, help="default: w1 on a CPU, nano-vllm on a GPU")
    parser.add_argument("--num-seqs", type=int, help="fewer requests than the workload has")
    parser.add_argument("--seed", type=int, default=0, help="of the workload and of the engine")
    parser.add_argument("--model", help="directory or hub id; default: Qwen3-0.6B's shape with random weights")
    parser.add_argument("--load-format", choices=("auto", "dummy"), help="default: auto if --model is given")
    parser.add_argument("--dtype", choices=DTYPES, help="default: bfloat16 where the processor has it, else float32")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument(
        "--step-overhead", action="store_true", help="measure what rank processes add to a step instead"
    )
    parser.add_argument("--host-only", action="store_true", help="measure a decode step without the model instead")
    parser.add_argument("--quality", action="store_true", help="measure what number formats do to outputs instead")
    parser.add_argument("--kernels", action="store_true", help="measure the CPU kernels alone instead")
    parser.add_argument(
        "--growth", action="store_true", help="measure decode steps over sequences and contexts instead"
    )
    parser.add_argument("--plot", help="with --growth: the SVG file to write; default: growth.svg")
    parser.add_argument(
        "--gpu-check", action="store_true", help="check and measure all that needs a GPU instead; writes gpu-check.json"
    )
    parser.add_argument("--json", action="store_true", help="one line of JSON instead of the report")
    engine = parser.add_argument_group("options of nanoinfer.LLM, which has the defaults where none is stated")
    engine.add_argument("--max-model-len", type=int, help="default: 2048 for w1, 4096 for nano-vllm")
    for name in ("tensor-parallel-size", "max-num-seqs", "max-num-batched-tokens", "num-kvcache-blocks"):
        engine.add_argument(f"--{name}", type=int)
    engine.add_argument("--kvcache-block-size", type=int)
    engine.add_argument("--gpu-memory-utilization", type=float)
    engine.add_argument("--cpu-kvcache-gib", type=float)
    engine.add_argument("--kv-cache-dtype", choices=KV_CACHE_DTYPES, help="of keys and values")
    engine.add_argument("--quantization", choices=QUANTIZATIONS, help="of the weights, when they are loaded")
    engine.add_argument("--enforce-eager", action="store_true", default=None)
    engine.add_argument("--attention-backend", choices=ATTENTION_BACKENDS)
    args = parser.parse_args(argv)
    try:
        settle(args)
        names = [field.name for field in fields(EngineConfig) if getattr(args, field.name, None) is not None]
        return args, EngineConfig(**{"model": SHAPE_ONLY} | {name: getattr(args, name) for name in names})
    except ValueError as error:
        parser.error(str(error))


def settle(args: argparse.Namespace) -> None:
    """Fills in the defaults that depend on other options; ValueError on options that could only be ignored."""
    if args.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch sees no GPU")
    # As the engine would choose, so that what is measured is what runs.
    args.device = resolve_device(args.device, ModelConfig.from_dict(QWEN3_0_6B))
    args.dtype = args.dtype or ("bfloat16" if args.device == "cuda" or cpu_has_bf16() else "float32")
    idle = "gpu_memory_utilization" if args.device == "cpu" else "cpu_kvcache_gib"
    if getattr(args, idle) is not None:
        raise ValueError(f"--{idle.replace('_', '-')} means nothing on the device {args.device!r}")
    if args.load_format == "auto" and args.model is None:
        raise ValueError("--load-format auto needs --model: without it there are no weights to load")
    args.load_format = args.load_format or ("dummy" if args.model is None else "auto")
    args.workload = args.workload or ("nano-vllm" if args.device == "cuda" else "w1")
    preset = PRESETS[args.workload]
    args.num_seqs = preset.num_seqs if args.num_seqs is None else args.num_seqs
    if not 1 <= args.num_seqs <= preset.num_seqs:
        raise ValueError(f"--num-seqs {args.num_seqs}: {args.workload} runs with 1 to {preset.num_seqs}")
    args.max_model_len = preset.max_model_len if args.max_model_len is None else args.max_model_len
    settle_growth(args)
    longest = max(preset.input_range[1] + preset.output_range[1], PREFILL_INPUT + 1)
    if args.max_model_len < longest:
        raise ValueError(f"--max-model-len {args.max_model_len}: {args.workload} needs up to {longest} tokens")


def settle_growth(args: argparse.Namespace) -> None:
    if not args.growth:
        if args.plot is not None:
            raise ValueError("--plot belongs to --growth")
        return
    if args.model is not None:
        raise ValueError("--growth runs Qwen3-0.6B's shape with random weights; leave --model out")
    if args.tensor_parallel_size not in (None, 1):
        raise ValueError(f"--tensor-parallel-size {args.tensor_parallel_size}: --growth measures one rank")
    args.plot = Path(args.plot or "growth.svg")
    if not args.plot.parent.is_dir():
        raise ValueError(f"--plot {args.plot}: there is no folder {args.plot.parent}")


def main(argv: Sequence[str] | None = None) -> None:
    args, config = parse_args(argv)
    if args.gpu_check:
        sys.exit(gpu_check.main())
    others: dict[str, Callable[[], dict[str, Any]]] = {
        "step_overhead": measure_step_overhead,
        "host_only": measure_host_time,
        "kernels": measure_kernels,
    }
    for name, measure in others.items():
        if getattr(args, name):
            show(measure(), as_json=args.json)
            return
    if args.quality:
        report = measure_quality()
        print(json.dumps(report) if args.json else quality_markdown(report))
        return
    load = os.getloadavg()[0]  # others at work lower the machine's rates and the throughput, not always alike
    machine = measure_machine(args.device, getattr(torch, args.dtype), config.tensor_parallel_size)
    about = environment(args.device) | {"load_average_before": load, "settings": asdict(config)}
    if args.growth:
        report = measure_growth(config, machine)
        args.plot.write_text(plot(report))
        print(json.dumps(report | about) if args.json else markdown(report))
        return
    workload = Workload.draw(args.workload, args.num_seqs, args.seed)
    with open_llm(config) as llm:
        itemsize = getattr(torch, llm.capacity.dtype).itemsize
        floor = Floor.of_model(llm.model_config, itemsize, config.quantization, config.kv_cache_dtype)
        report = summarize(workload, run_workload(llm, workload, args.seed), floor, machine)
        report |= about | {"kv_cache": asdict(llm.capacity)}
    show(report, as_json=args.json)


def show(report: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(report))
        return
    for name, value in report.items():
        if isinstance(value, dict) and all(isinstance(part, float | int) for part in value.values()):
            value = "  ".join(f"{part:.4g} {unit}" for unit, part in value.items())
        print(f"{name:19} {value:.4g}" if isinstance(value, float) else f"{name:19} {value}")
