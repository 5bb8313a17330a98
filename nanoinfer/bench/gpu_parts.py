"""The parts of `--gpu-check`, each a function of what the card can do; gpu_check.py gives each a process of its own.

What raises within a part (a kernel that does not compile, a size that does not fit) leaves the rest of it alone.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from nanoinfer.attention.base import AttentionBackend
from nanoinfer.attention.select import BACKENDS
from nanoinfer.bench import gpu_kernels
from nanoinfer.bench.floor import Floor
from nanoinfer.bench.gpu_check import Figure
from nanoinfer.bench.host_time import host_milliseconds
from nanoinfer.bench.machine import Machine
from nanoinfer.bench.workload import PRESETS, QWEN3_0_6B, Workload
from nanoinfer.config import ModelConfig
from nanoinfer.demo import demo_model_path
from nanoinfer.llm import LLM
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.step import StepStats
from nanoinfer.worker.download import Download

ATTENTION_BATCHES, ATTENTION_CONTEXTS = (1, 8, 32, 64, 128, 256), (256, 800, 2048, 8192)
EQUAL_TOKENS, STEP_TOKENS = 24, 80
# Sequences and tokens of each.
STEPS = ((1, 512), (8, 512), (64, 800), (256, 800))
# Keys and values that one measurement of attention reads: many times what the L2 of a large GPU holds, 60 MB.
ATTENTION_BYTES = 512 << 20
HOST_BATCHES = (1, 256)
# Sequences and tokens of each; steps that are looked at, and kernels that are told, the longest first.
PROFILES, PROFILED_STEPS, PROFILED_KERNELS = ((1, 512), (256, 800)), 20, 14
PROFILED = (ProfilerActivity.CUDA, DeviceType.CUDA)
# Two logits closer than this are a tie: either token is right.
_TIE = 1e-3


def _each(finders: Iterable[tuple[str, Callable[[], Iterator[Figure]]]]) -> Iterator[Figure]:
    """What all of them find, by name; RuntimeError at the end if some raised, whose tracebacks stderr has."""
    errors = []
    for name, find in finders:
        try:
            yield from find()
        except Exception as error:
            traceback.print_exc()
            errors.append(f"{name}: {error!r}"[:300])
    if errors:
        raise RuntimeError("; ".join(errors))


def kernels(machine: Machine) -> Iterator[Figure]:
    """Every kernel against its twin, bf16, Qwen3-0.6B's shapes: the relative error, or the share of other tokens."""
    torch.manual_seed(0)

    def figures(errors: Callable[[], Iterator[tuple[str, float]]]) -> Iterator[Figure]:
        for name, error in errors():
            yield Figure("kernels", name, error, "error", passed=error < 0.02)

    return _each((group.__name__.strip("_"), partial(figures, group)) for group in gpu_kernels.GROUPS)


def equality(machine: Machine) -> Iterator[Figure]:
    """Greedy tokens in float32, with graphs and without, against transformers: the share that is not the best."""
    with tempfile.TemporaryDirectory() as directory:

        def tiny() -> Iterator[Figure]:
            _save_tiny_model(directory)
            yield from _model_equality("tiny", directory)

        yield from _each((("demo", lambda: _model_equality("demo", str(demo_model_path()))), ("tiny", tiny)))


def _model_equality(name: str, path: str) -> Iterator[Figure]:
    size = ModelConfig.from_directory(Path(path)).vocab_size
    prompts = [[(7 * i + j * j) % (size - 20) + 10 for j in range(5 + 9 * i)] for i in range(5)]
    outputs = {}
    for enforce_eager in (False, True):
        options: dict[str, Any] = {"dtype": "float32", "device": "cuda", "seed": 0, "max_model_len": 128}
        options |= {"enforce_eager": enforce_eager, "num_kvcache_blocks": 64, "max_num_seqs": 5}
        with LLM(path, **options) as llm:
            params = SamplingParams(temperature=0.0, max_tokens=EQUAL_TOKENS, ignore_eos=True)
            found = llm.generate(prompts, params, use_tqdm=False)
        outputs[enforce_eager] = [output.outputs[0].token_ids for output in found]
    differ = float(outputs[False] != outputs[True])
    yield Figure("equality", f"{name}, graph differs from eager", differ, "yes/no", passed=not differ)

    from transformers import Qwen3ForCausalLM

    model = Qwen3ForCausalLM.from_pretrained(path, dtype=torch.float32).eval().to("cuda")
    for enforce_eager, of_all in outputs.items():
        pairs = zip(prompts, of_all, strict=True)
        wrong = statistics.mean(_share_not_best(model, prompt, tokens) for prompt, tokens in pairs)
        label = f"{name}, {'eager' if enforce_eager else 'graphs'}, not transformers'"
        yield Figure("equality", label, wrong, "share", passed=wrong == 0)


def _save_tiny_model(directory: str) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    shape: dict[str, Any] = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}
    shape |= {"head_dim": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
    torch.manual_seed(0)
    tiny = Qwen3ForCausalLM(Qwen3Config(**shape, eos_token_id=2)).float()
    with torch.no_grad():
        for parameter in tiny.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.3)
    tiny.save_pretrained(directory)


@torch.no_grad()
def _share_not_best(model: torch.nn.Module, prompt: list[int], output: list[int]) -> float:
    logits = model(torch.tensor([prompt + output], device="cuda")).logits[0, len(prompt) - 1 : -1].float()
    chosen = logits.gather(1, torch.tensor(output, device="cuda").unsqueeze(1)).squeeze(1)
    return float((logits.amax(dim=1) - chosen > _TIE).double().mean())


def attention(machine: Machine) -> Iterator[Figure]:
    """GB/s of keys and values that decode attention reads, with every backend there is; a bound from batch 32 up."""
    config = ModelConfig.from_dict(QWEN3_0_6B)

    def measure(kind: type[AttentionBackend], batch_size: int, context: int) -> Iterator[Figure]:
        rate = _decode_rate(kind(16, 8, 128), batch_size, context)
        name, fraction = f"{kind.name}, batch {batch_size}, context {context}", rate / machine.read_gb_s
        bound = fraction >= 0.8 if batch_size >= 32 else None
        yield Figure("attention", name, rate, "GB/s", machine.read_gb_s, fraction, bound)

    return _each(
        (f"{kind.name}, batch {batch_size}, context {context}", partial(measure, kind, batch_size, context))
        for kind in BACKENDS
        if not kind.rejects(config, "cuda", torch.bfloat16)
        for batch_size in ATTENTION_BATCHES
        for context in ATTENTION_CONTEXTS
    )


@torch.inference_mode()
def _decode_rate(backend: AttentionBackend, batch_size: int, context: int) -> float:
    """GB/s, from a graph over as many layers as it takes to leave no cache any part in it."""
    block_size = backend.default_block_size
    columns = -(-context // block_size)
    num_bytes = batch_size * context * 2 * 8 * 128 * 2
    layers = max(2, -(-ATTENTION_BYTES // num_bytes))
    kv_cache = backend.allocate(layers, batch_size * columns, block_size, torch.bfloat16, "cuda")
    kv_cache.data.normal_()
    tables = torch.randperm(batch_size * columns, device="cuda").int().view(batch_size, columns)
    seq_lens = torch.full((batch_size,), context, dtype=torch.int32, device="cuda")
    q = torch.randn(batch_size, 16, 128, device="cuda").bfloat16()
    batch = _FixedPlan(backend.plan_decode(tables, seq_lens, context))

    def run() -> None:
        for layer in range(layers):
            backend.attend(q, kv_cache.layer(layer), batch)  # type: ignore[arg-type]

    return num_bytes * layers / _seconds_of(run) / 1e9


class _FixedPlan:
    """All that `attend` reads of a batch."""

    def __init__(self, plan: object) -> None:
        self.plan = plan


def _seconds_of(run: Callable[[], None], repeats: int = 9, replays: int = 4) -> float:
    """Of one replay of a graph of `run`, the median of several means over a few that follow each other.

    An idle card needs some time to be at its clock: the first few do not count.
    """
    from nanoinfer.worker.cuda_graph import CudaGraph

    graph = CudaGraph(None)
    graph.capture(run)
    for _ in range(10):
        graph.replay()
    times = []
    for _ in range(repeats):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(replays):
            graph.replay()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop) / 1e3 / replays)
    return statistics.median(times)


def steps(machine: Machine) -> Iterator[Figure]:
    """A decode step of the engine, host and all, against the floor of that step; and the host's share of it."""
    with _qwen3(max_model_len=2048) as llm:
        yield from _each((f"batch {size}", partial(_step, llm, machine, size, context)) for size, context in STEPS)


@contextmanager
def _qwen3(max_model_len: int) -> Iterator[LLM]:
    """An engine with Qwen3-0.6B's shape and random weights."""
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "config.json").write_text(json.dumps(QWEN3_0_6B))
        with LLM(directory, load_format="dummy", device="cuda", max_model_len=max_model_len, seed=0) as llm:
            yield llm


def _decode(llm: LLM, batch_size: int, context: int) -> None:
    """The first sequences decode while the last ones are still at their prompts, for 26 steps at 256 with 800 tokens;
    then all of them do."""
    prompts = [[(i * 31 + j) % 9000 + 100 for j in range(context)] for i in range(batch_size)]
    llm.generate(prompts, SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=STEP_TOKENS), use_tqdm=False)


def _is_full(step: StepStats, batch_size: int) -> bool:
    return step.num_decode_tokens == batch_size and not step.num_prefill_tokens


def _step(llm: LLM, machine: Machine, batch_size: int, context: int) -> Iterator[Figure]:
    floor, wait = Floor.of_model(llm.model_config, 2), _Wait()
    seen: list[tuple[StepStats, float]] = []
    llm.engine.on_step = lambda step: seen.append((step, wait.take()))
    with mock.patch.object(Download, "tolist", wait.around(Download.tolist)):
        _decode(llm, batch_size, context)
    full = [one for one in seen if _is_full(one[0], batch_size)][8:]
    took = statistics.median(step.seconds for step, _ in full)
    best = statistics.median(floor.seconds(step, machine) for step, _ in full)
    bound = took < 1.5e-3 if batch_size == 1 else None
    yield Figure(
        "steps", f"step, batch {batch_size}, context {context}", 1e3 * took, "ms", 1e3 * best, best / took, bound
    )
    # All but the wait for the device. Where it comes near the step's time, the device waits for the host.
    host = statistics.median(step.seconds - waited for step, waited in full)
    yield Figure("steps", f"of it host, batch {batch_size}", 1e3 * host, "ms")


class _Wait:
    """Adds up the time that calls take."""

    def __init__(self) -> None:
        self._seconds = 0.0

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*arguments)
            finally:
                self._seconds += time.perf_counter() - start

        return call

    def take(self) -> float:
        """Since it was last asked for."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds


def host(machine: Machine) -> Iterator[Figure]:
    """A decode step without a model, as `bench.py --host-only`."""
    for size, ms in host_milliseconds(HOST_BATCHES, as_on_gpu=True).items():
        yield Figure("host", f"host time, batch {size}", ms, "ms", passed=ms <= 1.0 if size == "256" else None)


def workload(machine: Machine) -> Iterator[Figure]:
    """nano-vllm's workload, Qwen3-0.6B's shape with random weights."""
    from nanoinfer.bench.throughput import run_workload, summarize

    drawn = Workload.draw("nano-vllm", PRESETS["nano-vllm"].num_seqs, 0)
    with _qwen3(max_model_len=4096) as llm:
        floor = Floor.of_model(llm.model_config, 2)
        run = run_workload(llm, drawn, 0)
    report = summarize(drawn, run, floor, machine)
    rate, best = report["output_tok_s"], report["floor_tok_s"]
    yield Figure("workload", "nano-vllm, output", rate, "tok/s", best, rate / best, rate >= 25_000)
    alone = report["batch1_tok_s"], report["batch1_fraction_of_floor"]
    yield Figure("workload", "one request alone", alone[0], "tok/s", alone[0] / alone[1], alone[1])
    for name in ("decode", "prefill"):
        # Steps with prefill tokens are prefill, whatever else is in them.
        of_kind = [step for step in run.workload.steps if bool(step.num_prefill_tokens) == (name == "prefill")]
        rate = report[f"{name}_tok_s"]
        took, least = sum(step.seconds for step in of_kind), sum(floor.seconds(step, machine) for step in of_kind)
        yield Figure("workload", name, rate, "tok/s", rate * took / least, least / took)
    fraction = report["prefill_512_fraction"]
    yield Figure("workload", "prefill of 512 tokens, rate of products", fraction, "of gemm", 1.0, fraction)
    yield Figure("workload", "engine's own time, a decode step", report["host_ms_per_step"], "ms")


def breakdown(machine: Machine) -> Iterator[Figure]:
    """Microseconds of a decode step by kernel, as the profiler sees them: where the time goes that is not the floor."""
    with _qwen3(max_model_len=2048) as llm:
        yield from _each((f"batch {size}", partial(_kernel_times, llm, size, context)) for size, context in PROFILES)


def _kernel_times(llm: LLM, batch_size: int, context: int) -> Iterator[Figure]:
    activity, device = PROFILED
    profiler, num_steps = profile(activities=[activity]), 0

    def observe(step: StepStats) -> None:
        nonlocal num_steps
        if not _is_full(step, batch_size) or num_steps > PROFILED_STEPS:
            return
        if num_steps == 0:
            profiler.start()
        elif num_steps == PROFILED_STEPS:
            torch.cuda.synchronize()
            profiler.stop()
        num_steps += 1

    llm.engine.on_step = observe
    _decode(llm, batch_size, context)
    if num_steps <= PROFILED_STEPS:
        raise RuntimeError(f"{num_steps} steps of {batch_size} sequences, and {PROFILED_STEPS} were to be looked at")
    times: dict[str, list[float]] = {}
    for event in profiler.events() or ():
        if event.device_type == device:
            times.setdefault(event.name, []).append(event.time_range.elapsed_us())
    if not times:
        raise RuntimeError("the profiler saw no kernels")
    whole = sum(map(sum, times.values())) / PROFILED_STEPS
    yield Figure("breakdown", f"batch {batch_size}, all kernels", whole, "us")
    longest = sorted(times.items(), key=lambda item: -sum(item[1]))[:PROFILED_KERNELS]
    for rank, (name, each) in enumerate(longest, 1):
        took, number = sum(each) / PROFILED_STEPS, len(each) / PROFILED_STEPS
        label = f"{batch_size}/{rank}: {number:.4g} x {name}"[:60]
        yield Figure("breakdown", label, took, "us", whole, took / whole)
