"""The parts of `--gpu-check`, each a function of what the card can do; gpu_check.py gives each a process of its own."""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from nanoinfer.attention.base import AttentionBackend
from nanoinfer.attention.select import BACKENDS
from nanoinfer.bench.floor import Floor
from nanoinfer.bench.gpu_check import Figure
from nanoinfer.bench.host_time import measure_host_time
from nanoinfer.bench.machine import Machine
from nanoinfer.bench.workload import QWEN3_0_6B, Workload
from nanoinfer.config import ModelConfig
from nanoinfer.demo import demo_model_path
from nanoinfer.kernels import reference
from nanoinfer.llm import LLM
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.step import StepStats

_BLOCK = 32
# Two logits closer than this are a tie: either token is right.
_TIE = 1e-3


def _relative_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    return float((out.double() - expected.double()).norm() / expected.double().norm())


def kernels(machine: Machine) -> list[Figure]:
    """Every kernel against its twin, bf16, Qwen3-0.6B's shapes: the relative error, or the share of other tokens."""
    from nanoinfer.kernels.triton import activation, kv_store, norm, sampler

    torch.manual_seed(0)

    def randn(*size: int) -> torch.Tensor:
        return torch.randn(size, device="cuda").bfloat16()

    x, residual, weight = randn(300, 1024), randn(300, 1024), randn(1024)
    expected, total = reference.add_rms_norm(x, residual, weight, 1e-6)
    out = norm.add_rms_norm(x, residual, weight, 1e-6)
    errors = {"add_rms_norm": _relative_error(out, expected), "its residual": _relative_error(residual, total)}
    errors["rms_norm"] = _relative_error(norm.rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6))
    gate_up = randn(300, 6144)
    errors["silu_and_mul"] = _relative_error(activation.silu_and_mul(gate_up), reference.silu_and_mul(gate_up))

    qkv, q_weight, k_weight = randn(300, 32, 128), randn(128), randn(128)
    cos, sin = randn(300, 64), randn(300, 64)
    caches = [torch.zeros(20, 8, _BLOCK, 128, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    slots = torch.randperm(20 * _BLOCK, device="cuda")[:300]
    q = kv_store.norm_rotate_store(qkv, q_weight, k_weight, cos, sin, caches[0], caches[1], slots, 1e-6)
    first, k, v = qkv.split([16, 8, 8], dim=1)
    reference.store_kv(caches[2], reference.apply_rotary(reference.rms_norm(k, k_weight, 1e-6), cos, sin), slots)
    reference.store_kv(caches[3], v, slots)
    rotated = reference.apply_rotary(reference.rms_norm(first, q_weight, 1e-6), cos, sin)
    errors["norm_rotate_store: q"] = _relative_error(q, rotated)
    errors["norm_rotate_store: k"] = _relative_error(caches[0], caches[2])
    errors["norm_rotate_store: v"] = _relative_error(caches[1], caches[3])
    errors |= _attention_errors()

    logits = randn(64, 151936) * 4
    best, winners = sampler.row_argmax(logits)
    inverse, numbers = torch.full((64,), 1.5, device="cuda"), torch.rand(64, device="cuda", dtype=torch.float64)
    errors["row_argmax"] = float((winners != reference.row_argmax(logits)[1]).double().mean())
    filters = (torch.full((64,), 0.001, device="cuda"), torch.full((64,), 50, device="cuda").int(), numbers.float())
    least = sampler.sampling_threshold(logits, best, inverse, *filters)
    expected_least = reference.sampling_threshold(logits, best, inverse, *filters)
    errors["sampling_threshold"] = float((least != expected_least).double().mean())
    sums = sampler.segment_sums(logits, best, inverse, least)
    targets = numbers * sums.sum(dim=1)
    drawn = sampler.draw(logits, best, inverse, least, sums, targets)
    expected_drawn = reference.draw(logits, best, inverse, least, targets)
    errors["draw"] = float((drawn != expected_drawn).double().mean())
    return [Figure("kernels", name, error, "error", passed=error < 0.02) for name, error in errors.items()]


def _attention_errors() -> dict[str, float]:
    """Decode, split and not, and prefill with a cached prefix; against the twin."""
    from nanoinfer.kernels.triton import decode, prefill

    seq_lens = torch.tensor([1, 31, 700, 2049], dtype=torch.int32, device="cuda")
    tables = torch.randperm(4 * 70, device="cuda").int().view(4, 70)
    k, v = (torch.randn(280, 8, _BLOCK, 128, device="cuda").bfloat16() for _ in range(2))
    q, scale = torch.randn(4, 16, 128, device="cuda").bfloat16(), 128**-0.5
    rows = torch.arange(4, dtype=torch.int32, device="cuda")
    expected = reference.paged_attention(q, k, v, tables, torch.arange(5), seq_lens, scale)
    errors = {}
    for splits in (1, 8):
        out = torch.empty_like(q)
        decode.paged_decode(q, k, v, tables, seq_lens, rows, out, scale, splits)
        errors[f"paged_decode, {splits} split(s)"] = _relative_error(out, expected)
    starts = torch.tensor([0, 1, 20, 320, 900], dtype=torch.int32)
    q = torch.randn(900, 16, 128, device="cuda").bfloat16()
    num_queries = prefill.queries_per_tile(q.dtype, 2)
    items = torch.from_numpy(prefill.work_items(starts.numpy(), torch.arange(4).numpy(), num_queries)).cuda()
    out = torch.empty_like(q)
    prefill.paged_prefill(q, k, v, tables, seq_lens, starts.cuda(), items, out, scale)
    expected = reference.paged_attention(q, k, v, tables, starts, seq_lens, scale)
    return errors | {"paged_prefill": _relative_error(out, expected)}


def equality(machine: Machine) -> list[Figure]:
    """Greedy tokens in float32, with graphs and without, against transformers: the share that is not the best."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    figures = []
    with tempfile.TemporaryDirectory() as directory:
        shape: dict[str, Any] = {
            "vocab_size": 320,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 3,
            "head_dim": 32,
        }
        shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
        torch.manual_seed(0)
        tiny = Qwen3ForCausalLM(Qwen3Config(**shape, eos_token_id=2)).float()
        with torch.no_grad():
            for parameter in tiny.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(std=0.3)
        tiny.save_pretrained(directory)
        for name, path in (("demo", str(demo_model_path())), ("tiny", directory)):
            model = Qwen3ForCausalLM.from_pretrained(path, dtype=torch.float32).eval().to("cuda")
            size = model.config.vocab_size
            prompts = [[(7 * i + j * j) % (size - 20) + 10 for j in range(5 + 9 * i)] for i in range(5)]
            outputs = {}
            for enforce_eager in (False, True):
                options: dict[str, Any] = {"dtype": "float32", "device": "cuda", "seed": 0, "max_model_len": 128}
                options |= {"enforce_eager": enforce_eager, "num_kvcache_blocks": 64, "max_num_seqs": 5}
                with LLM(path, **options) as llm:
                    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
                    found = llm.generate(prompts, params, use_tqdm=False)
                outputs[enforce_eager] = [output.outputs[0].token_ids for output in found]
                pairs = zip(prompts, outputs[enforce_eager], strict=True)
                wrong = statistics.mean(_share_not_best(model, prompt, tokens) for prompt, tokens in pairs)
                label = f"{name}, {'eager' if enforce_eager else 'graphs'}, not transformers'"
                figures.append(Figure("equality", label, wrong, "share", passed=wrong == 0))
            differ = float(outputs[False] != outputs[True])
            figures.append(Figure("equality", f"{name}, graph differs from eager", differ, "yes/no", passed=not differ))
    return figures


@torch.no_grad()
def _share_not_best(model: torch.nn.Module, prompt: list[int], output: list[int]) -> float:
    logits = model(torch.tensor([prompt + output], device="cuda")).logits[0, len(prompt) - 1 : -1].float()
    chosen = logits.gather(1, torch.tensor(output, device="cuda").unsqueeze(1)).squeeze(1)
    return float((logits.amax(dim=1) - chosen > _TIE).double().mean())


def attention(machine: Machine) -> list[Figure]:
    """GB/s of keys and values that decode attention reads, with every backend there is; a bound from batch 32 up."""
    config = ModelConfig.from_dict(QWEN3_0_6B)
    figures = []
    for kind in BACKENDS:
        if kind.rejects(config, "cuda", torch.bfloat16):
            continue
        for batch_size in (1, 8, 32, 64, 128, 256):
            for context in (256, 800, 2048, 8192):
                rate = _decode_rate(kind(16, 8, 128), batch_size, context)
                fraction = rate / machine.read_gb_s
                figures.append(
                    Figure(
                        "attention", f"{kind.name}, batch {batch_size}, context {context}", rate, "GB/s",
                        machine.read_gb_s, fraction, fraction >= 0.8 if batch_size >= 32 else None,
                    )
                )  # fmt: skip
    return figures


def _decode_rate(backend: AttentionBackend, batch_size: int, context: int) -> float:
    """GB/s, from a graph over as many layers as it takes to leave no cache any part in it."""
    block_size = backend.default_block_size
    columns = -(-context // block_size)
    num_bytes = batch_size * context * 2 * 8 * 128 * 2
    layers = max(2, min(64, -(-(512 << 20) // num_bytes)))
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


def _seconds_of(run: Callable[[], None], repeats: int = 10) -> float:
    """Of one replay of a graph of `run`, the median of several."""
    from nanoinfer.worker.cuda_graph import CudaGraph

    graph = CudaGraph(None)
    graph.capture(run)
    graph.replay()
    times = []
    for _ in range(repeats):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop) / 1e3)
    return statistics.median(times)


def steps(machine: Machine) -> list[Figure]:
    """A decode step of the engine, host and all, against the floor of that step; and the engine's own part of it."""
    figures = []
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "config.json").write_text(json.dumps(QWEN3_0_6B))
        with LLM(directory, load_format="dummy", device="cuda", max_model_len=2048, seed=0) as llm:
            floor = Floor.of_model(llm.model_config, 2)
            for batch_size, context in ((1, 512), (8, 512), (64, 800), (256, 800)):
                seen: list[StepStats] = []
                llm.engine.on_step = seen.append
                prompts = [[(i * 31 + j) % 9000 + 100 for j in range(context)] for i in range(batch_size)]
                params = SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=48)
                llm.generate(prompts, params, use_tqdm=False)
                full = [s for s in seen if s.num_decode_tokens == batch_size and not s.num_prefill_tokens][8:]
                took = statistics.median(s.seconds for s in full)
                best = statistics.median(floor.seconds(s, machine) for s in full)
                bound = took < 1.5e-3 if batch_size == 1 else None
                name = f"step, batch {batch_size}, context {context}"
                figures.append(Figure("steps", name, 1e3 * took, "ms", 1e3 * best, best / took, bound))
                host = statistics.median(s.seconds - s.execute_seconds for s in full)
                figures.append(Figure("steps", f"of it engine, batch {batch_size}", 1e3 * host, "ms"))
    return figures


def host(machine: Machine) -> list[Figure]:
    """A decode step without a model, as `bench.py --host-only`."""
    found = measure_host_time((1, 256))["host_ms_per_step_gpu"]
    return [
        Figure("host", f"host time, batch {size}", ms, "ms", passed=ms <= 1.0 if size == "256" else None)
        for size, ms in found.items()
    ]


def workload(machine: Machine) -> list[Figure]:
    """nano-vllm's workload, Qwen3-0.6B's shape with random weights."""
    from nanoinfer.bench.throughput import run_workload, summarize

    drawn = Workload.draw("nano-vllm", 256, 0)
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "config.json").write_text(json.dumps(QWEN3_0_6B))
        with LLM(directory, load_format="dummy", device="cuda", max_model_len=4096, seed=0) as llm:
            floor = Floor.of_model(llm.model_config, 2)
            report = summarize(drawn, run_workload(llm, drawn, 0), floor, machine)
    rate, best = report["output_tok_s"], report["floor_tok_s"]
    return [
        Figure("workload", "nano-vllm, output", rate, "tok/s", best, rate / best, rate >= 25_000),
        Figure("workload", "one request alone", report["batch1_tok_s"], "tok/s"),
        Figure("workload", "decode", report["decode_tok_s"], "tok/s"),
        Figure("workload", "prefill", report["prefill_tok_s"], "tok/s"),
    ]
