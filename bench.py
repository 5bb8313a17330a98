"""Offline throughput, next to the floor that this machine sets for the very steps that ran. Run `bench.py --help`.

The protocol is nano-vllm's (github.com/GeeeekExplorer/nano-vllm, bench.py): random ids, mixed lengths, end-of-sequence
ignored, one warm-up request, tokens counted from what came back. Order: choose the workload, measure the machine
(before the engine takes its memory), load the engine, warm up, run the workload, run one request alone, report.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.metadata
import json
import mmap
import os
import platform
import random
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from nanoinfer.config import DTYPES, EngineConfig, ModelConfig
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.step import StepStats
from nanoinfer.version import __version__

if TYPE_CHECKING:
    from nanoinfer import LLM

QWEN3_0_6B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "torch_dtype": "bfloat16", "attention_bias": False,
    "attention_dropout": 0.0, "hidden_act": "silu", "hidden_size": 1024, "intermediate_size": 3072, "head_dim": 128,
    "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-06, "rope_theta": 1000000, "rope_scaling": None, "use_sliding_window": False, "use_cache": True,
    "tie_word_embeddings": True, "vocab_size": 151936, "bos_token_id": 151643, "eos_token_id": 151645,
}  # fmt: skip
MAX_TOKEN_ID = 10000
BATCH1_INPUT, BATCH1_OUTPUT = 128, 64
# About the bytes of Qwen3-0.6B's weights, so that a large shared cache flatters this reading as much as the model's.
READ_BYTES = 1280 << 20
GEMM_SHAPES = ((1024, 1024, 6144), (4096, 4096, 4096))  # rows, input width, output width

READ_LOOP = """
#include <stdint.h>
uint64_t read_all(const uint64_t *words, uint64_t n) {
    uint64_t sum = 0;
    for (uint64_t i = 0; i < n; ++i) sum += words[i];
    return sum;
}
"""


@dataclass(frozen=True)
class Preset:
    """Ranges are inclusive, in tokens."""

    num_seqs: int
    input_range: tuple[int, int]
    output_range: tuple[int, int]
    max_model_len: int


PRESETS = {
    "w1": Preset(32, (100, 512), (64, 256), 2048),
    "nano-vllm": Preset(256, (100, 1024), (100, 1024), 4096),
}


@dataclass(frozen=True)
class Workload:
    name: str
    prompts: list[list[int]]
    output_lens: list[int]

    @classmethod
    def draw(cls, name: str, num_seqs: int, seed: int) -> Workload:
        """All prompts first, then all output lengths: the order in which nano-vllm's script draws them."""
        preset, rng = PRESETS[name], random.Random(seed)
        prompts = [
            [rng.randint(0, MAX_TOKEN_ID) for _ in range(rng.randint(*preset.input_range))] for _ in range(num_seqs)
        ]
        return cls(name, prompts, [rng.randint(*preset.output_range) for _ in prompts])


@dataclass(frozen=True)
class Machine:
    """What the device (or, with one per rank, the devices) can do, per second, and how that was measured."""

    read_gb_s: float
    gemm_tflop_s: float
    read_method: str = ""
    gemm_method: str = ""


@dataclass(frozen=True)
class Floor:
    """The least a step can cost: its linear layers by the roofline, plus reading its KV cache. Norms are left out."""

    linear_weights: int  # all layers, without the head
    head_weights: int  # a tied table is the head; what the embedding looks up in it is negligible
    pair_flops: int  # per query-key pair of prefill: QK^T and PV, all layers
    kv_bytes: int  # per token of context, keys and values of all layers
    itemsize: int

    @classmethod
    def of_model(cls, config: ModelConfig, itemsize: int) -> Floor:
        layers, hidden, head_dim = config.num_hidden_layers, config.hidden_size, config.head_dim
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        # qkv and o projections, then gate, up and down.
        per_layer = hidden * head_dim * (2 * heads + 2 * kv_heads) + 3 * hidden * config.intermediate_size
        return cls(
            linear_weights=layers * per_layer,
            head_weights=config.vocab_size * hidden,
            pair_flops=4 * layers * heads * head_dim,
            kv_bytes=2 * layers * kv_heads * head_dim * itemsize,
            itemsize=itemsize,
        )

    def seconds(self, step: StepStats, machine: Machine) -> float:
        """Products and weight reads can overlap; the KV cache is read on top. Decode's attention FLOPs hide in that."""
        tokens = step.num_prefill_tokens + step.num_decode_tokens
        flops = 2 * (self.linear_weights * tokens + self.head_weights * step.num_sampled)
        flops += self.pair_flops * step.num_attention_pairs
        # A step in which no row samples (a part of a long prompt) does not touch the head.
        weight_bytes = self.itemsize * (self.linear_weights + (self.head_weights if step.num_sampled else 0))
        read_rate, gemm_rate = machine.read_gb_s * 1e9, machine.gemm_tflop_s * 1e12
        return max(flops / gemm_rate, weight_bytes / read_rate) + self.kv_bytes * step.num_context_tokens / read_rate


def best_rate(methods: dict[str, tuple[float, Callable[[], object]]], repeats: int, device: str) -> tuple[float, str]:
    """Amount per second of the fastest of `methods`, name -> (amount per call, call), in its best repeat; and its name.

    On a GPU one repeat is ten calls, so that launching them does not count.
    """
    calls, synchronize = (10, torch.cuda.synchronize) if device == "cuda" else (1, lambda: None)
    rates: dict[str, float] = {}
    for name, (amount, call) in methods.items():
        for repeat in range(repeats + 1):
            synchronize()
            start = time.perf_counter()
            for _ in range(calls):
                call()
            synchronize()
            if repeat:  # the first one warms up
                rates[name] = max(rates.get(name, 0.0), amount * calls / (time.perf_counter() - start))
    best = max(rates, key=lambda name: rates[name])
    return rates[best], best


def compiled_read(memory: torch.Tensor, directory: str) -> Callable[[], object] | None:
    """A C loop over `memory`, split among as many threads as torch uses; None where no C compiler works."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    library = f"{directory}/read.so"
    command = [compiler or "", "-O3", "-march=native", "-fPIC", "-shared", "-xc", "-", "-o", library]
    if compiler is None or subprocess.run(command, input=READ_LOOP.encode(), capture_output=True).returncode != 0:
        return None
    read = ctypes.CDLL(library).read_all
    read.restype, read.argtypes = ctypes.c_uint64, [ctypes.c_void_p, ctypes.c_uint64]
    threads = torch.get_num_threads()
    words = memory.nbytes // 8 // threads
    starts = [memory.data_ptr() + 8 * words * i for i in range(threads)]
    pool = ThreadPoolExecutor(threads)  # ctypes releases the GIL
    return lambda: list(pool.map(lambda start: read(start, words), starts))


def huge_page_bytes() -> int:
    rollup = Path("/proc/self/smaps_rollup")  # Linux only
    found = re.search(r"AnonHugePages:\s*(\d+) kB", rollup.read_text() if rollup.exists() else "")
    return 1024 * int(found[1]) if found else 0


def measure_cpu_read() -> tuple[float, str]:
    """Bytes per second and the method. What is fastest differs between machines, so several are tried."""
    before = huge_page_bytes()
    region = mmap.mmap(-1, READ_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared ones get no huge pages
    if hasattr(mmap, "MADV_HUGEPAGE"):
        region.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(region, dtype=torch.float32)
    memory.fill_(1.0)  # maps the pages
    share = (huge_page_bytes() - before) / READ_BYTES
    calls: dict[str, Callable[[], object]] = {
        "torch.sum int64": memory.view(torch.int64).sum,
        "torch.sum float32": memory.sum,
        "torch.dot float32 with itself": lambda: torch.dot(memory, memory),
    }
    with tempfile.TemporaryDirectory() as directory:
        if loop := compiled_read(memory, directory):
            calls["C loop"] = loop
        rate, name = best_rate({name: (READ_BYTES, call) for name, call in calls.items()}, 5, "cpu")
    return rate, f"{name}, {share:.0%} on huge pages"


def measure_cuda_read() -> tuple[float, str]:
    source = torch.ones(2 * READ_BYTES // 4, dtype=torch.float32, device="cuda")
    target, size = torch.empty_like(source), source.nbytes
    methods: dict[str, tuple[float, Callable[[], object]]] = {
        "torch.sum float32": (size, source.sum),
        "torch.dot float32 with itself": (size, lambda: torch.dot(source, source)),
        "copy, read plus write": (2 * size, lambda: target.copy_(source)),
    }
    return best_rate(methods, 5, "cuda")


def measure_gemm(device: str, dtype: torch.dtype) -> tuple[float, str]:
    """FLOPs per second of x @ w.T in the dtype of the run: a float32 run is not held to the bf16 units' rate."""
    found: list[tuple[float, str]] = []
    for rows, width, out in GEMM_SHAPES:
        x, weight = (torch.randn(n, width, device=device).to(dtype) for n in (rows, out))
        calls: dict[str, Callable[[], object]] = {"F.linear": partial(F.linear, x, weight)}
        if device == "cpu" and dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported():
            # Up to 10 % faster than F.linear, and what an engine that packs its weights at load reaches.
            packed = torch.ops.mkldnn._reorder_linear_weight(weight, rows)
            calls["prepacked linear"] = partial(torch.ops.mkldnn._linear_pointwise, x, packed, None, "none", [], "")
        flops = 2.0 * rows * width * out
        methods = {f"{name} {rows}x{width}x{out}": (flops, call) for name, call in calls.items()}
        found.append(best_rate(methods, 20 if flops < 5e10 else 5, device))
    return max(found)


def measure_machine(device: str, dtype: torch.dtype, ranks: int) -> Machine:
    read_rate, read_method = measure_cuda_read() if device == "cuda" else measure_cpu_read()
    gemm_rate, gemm_method = measure_gemm(device, dtype)
    devices = ranks if device == "cuda" else 1  # ranks on a CPU share what was measured
    if device == "cuda":
        torch.cuda.empty_cache()
    return Machine(devices * read_rate / 1e9, devices * gemm_rate / 1e12, read_method, gemm_method)


@dataclass(frozen=True)
class Run:
    """Times in seconds, from the requests handed over to the last token back."""

    seconds: float
    batch1_seconds: float
    output_tokens: int
    steps: list[StepStats]


def generate(llm: LLM, prompts: list[list[int]], output_lens: list[int], temperature: float) -> tuple[float, int]:
    """Seconds, and the number of tokens that came back; RuntimeError unless each request got what it asked for."""
    params = [SamplingParams(temperature=temperature, ignore_eos=True, max_tokens=n) for n in output_lens]
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    produced = [len(output.outputs[0].token_ids) for output in outputs]
    if produced != output_lens:
        raise RuntimeError(f"asked for {output_lens} output tokens, produced {produced}: the figures would be wrong")
    return seconds, sum(produced)


def run_workload(llm: LLM, workload: Workload, seed: int) -> Run:
    # Prefix caching stays as shipped, since users pay for its index, too. It cannot help, which is checked below: the
    # prompts are random, and the warm-up and the single request are drawn apart from them.
    rng = random.Random(f"apart from the workload, {seed}")
    warm_up, single = ([rng.randint(0, MAX_TOKEN_ID) for _ in range(BATCH1_INPUT)] for _ in range(2))
    generate(llm, [warm_up], [8], 0.6)
    steps: list[StepStats] = []
    llm.engine.on_step = steps.append
    seconds, output_tokens = generate(llm, workload.prompts, workload.output_lens, 0.6)
    llm.engine.on_step = None
    batch1_seconds, _ = generate(llm, [single], [BATCH1_OUTPUT], 0.0)
    given, computed = sum(map(len, workload.prompts)), sum(step.num_prefill_tokens for step in steps)
    if computed < given:
        raise RuntimeError(f"{computed} of {given} prompt tokens were computed: a cache has helped")
    return Run(seconds, batch1_seconds, output_tokens, steps)


def _rate(amount: float, seconds: float) -> float:
    return amount / seconds if seconds else 0.0


def summarize(workload: Workload, run: Run, floor: Floor, machine: Machine) -> dict[str, Any]:
    # A step with any prefill tokens is prefill with all of its time, also if other rows decode in it: their share
    # cannot be told apart. So decode is counted, tokens and time, over the steps that do nothing else.
    prefill = [step for step in run.steps if step.num_prefill_tokens]
    decode = [step for step in run.steps if not step.num_prefill_tokens]
    floor_seconds = sum(floor.seconds(step, machine) for step in run.steps)
    decode_seconds = sum(step.seconds for step in decode)
    return {
        "workload": workload.name,
        "num_seqs": len(workload.prompts),
        "prompt_tokens": sum(map(len, workload.prompts)),
        "output_tokens": run.output_tokens,
        "seconds": run.seconds,
        "output_tok_s": run.output_tokens / run.seconds,
        "prefill_tok_s": _rate(sum(step.num_prefill_tokens for step in prefill), sum(s.seconds for s in prefill)),
        "decode_tok_s": _rate(sum(step.num_decode_tokens for step in decode), decode_seconds),
        "batch1_tok_s": BATCH1_OUTPUT / run.batch1_seconds,
        "mean_batch": _rate(run.output_tokens, len(run.steps)),  # tokens produced per step, of any kind
        "steps": len(run.steps),
        "preemptions": sum(step.num_preemptions for step in run.steps),
        "host_ms_per_step": 1e3 * _rate(decode_seconds - sum(s.execute_seconds for s in decode), len(decode)),
        **asdict(machine),
        "floor_seconds": floor_seconds,
        "floor_tok_s": run.output_tokens / floor_seconds,
        "fraction_of_floor": floor_seconds / run.seconds,
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
        "batch1_tok_s is 64 / seconds of one greedy request, 128 tokens in and 64 out, prefill included.",
        allow_abbrev=False,
    )
    parser.add_argument("--workload", choices=PRESETS, help="default: w1 on a CPU, nano-vllm on a GPU")
    parser.add_argument("--num-seqs", type=int, help="fewer requests than the workload has")
    parser.add_argument("--seed", type=int, default=0, help="of the workload and of the engine")
    parser.add_argument("--model", help="directory or hub id; default: Qwen3-0.6B's shape with random weights")
    parser.add_argument("--load-format", choices=("auto", "dummy"), help="default: auto if --model is given")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--json", action="store_true", help="one line of JSON instead of the report")
    engine = parser.add_argument_group("options of nanoinfer.LLM, which has the defaults where none is stated")
    engine.add_argument("--max-model-len", type=int, help="default: 2048 for w1, 4096 for nano-vllm")
    for name in ("tensor-parallel-size", "max-num-seqs", "max-num-batched-tokens", "num-kvcache-blocks"):
        engine.add_argument(f"--{name}", type=int)
    engine.add_argument("--kvcache-block-size", type=int)
    engine.add_argument("--gpu-memory-utilization", type=float)
    engine.add_argument("--cpu-kvcache-gib", type=float)
    engine.add_argument("--enforce-eager", action="store_true", default=None)
    args = parser.parse_args(argv)
    try:
        settle(args)
        names = [field.name for field in fields(EngineConfig) if getattr(args, field.name, None) is not None]
        return args, EngineConfig(**{"model": "Qwen3-0.6B, shape only"} | {name: getattr(args, name) for name in names})
    except ValueError as error:
        parser.error(str(error))


def settle(args: argparse.Namespace) -> None:
    """Fills in the defaults that depend on other options; ValueError on options that could only be ignored."""
    if args.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch sees no GPU")
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
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
    longest = preset.input_range[1] + preset.output_range[1]
    if args.max_model_len < longest:
        raise ValueError(f"--max-model-len {args.max_model_len}: {args.workload} needs up to {longest} tokens")


def main(argv: Sequence[str] | None = None) -> None:
    args, config = parse_args(argv)
    load = os.getloadavg()[0]  # others at work lower the machine's rates and the throughput, not always alike
    workload = Workload.draw(args.workload, args.num_seqs, args.seed)
    machine = measure_machine(args.device, getattr(torch, args.dtype), config.tensor_parallel_size)
    from nanoinfer import LLM  # only now: nothing of the engine runs while the machine is measured

    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "config.json").write_text(json.dumps(QWEN3_0_6B))
        with LLM(**asdict(config) | {"model": args.model or directory}) as llm:
            floor = Floor.of_model(llm.model_config, getattr(torch, llm.capacity.dtype).itemsize)
            report = summarize(workload, run_workload(llm, workload, args.seed), floor, machine)
            report |= environment(args.device) | {"load_average_before": load}
            report |= {"settings": asdict(config), "kv_cache": asdict(llm.capacity)}
    if args.json:
        print(json.dumps(report))
        return
    for name, value in report.items():
        print(f"{name:19} {value:.4g}" if isinstance(value, float) else f"{name:19} {value}")


if __name__ == "__main__":
    main()
