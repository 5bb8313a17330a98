"""The parts of `--gpu-check`, each a function of what the card can do; gpu_check.py gives each a process of its own."""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from nanoinfer.attention.base import AttentionBackend
from nanoinfer.attention.select import BACKENDS
from nanoinfer.bench.floor import Floor
from nanoinfer.bench.gpu_check import Figure
from nanoinfer.bench.host_time import host_milliseconds
from nanoinfer.bench.machine import Machine
from nanoinfer.bench.workload import QWEN3_0_6B, Workload
from nanoinfer.config import ModelConfig
from nanoinfer.demo import demo_model_path
from nanoinfer.kernels import reference
from nanoinfer.llm import LLM
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.step import StepStats

ATTENTION_BATCHES, ATTENTION_CONTEXTS = (1, 8, 32, 64, 128, 256), (256, 800, 2048, 8192)
# Sequences and tokens of each.
STEPS = ((1, 512), (8, 512), (64, 800), (256, 800))
VOCAB_SIZE = 151936
_BLOCK = 32
# Two logits closer than this are a tie: either token is right.
_TIE = 1e-3


def _relative_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    return float((out.double() - expected.double()).norm() / expected.double().norm())


def kernels(machine: Machine) -> Iterator[Figure]:
    """Every kernel against its twin, bf16, Qwen3-0.6B's shapes: the relative error, or the share of other tokens."""
    torch.manual_seed(0)
    for errors in (_layer_errors, _attention_errors, _far_block_errors, _sampler_errors, _input_errors):
        for name, error in errors():
            yield Figure("kernels", name, error, "error", passed=error < 0.02)


def _randn(*size: int) -> torch.Tensor:
    return torch.randn(size, device="cuda").bfloat16()


def _layer_errors() -> Iterator[tuple[str, float]]:
    from nanoinfer.kernels.triton import activation, kv_store, norm, rotary

    x, residual, weight = _randn(300, 1024), _randn(300, 1024), _randn(1024)
    expected, total = reference.add_rms_norm(x, residual, weight, 1e-6)
    yield "add_rms_norm", _relative_error(norm.add_rms_norm(x, residual, weight, 1e-6), expected)
    yield "its residual", _relative_error(residual, total)
    yield "rms_norm", _relative_error(norm.rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6))
    gate_up = _randn(300, 6144)
    yield "silu_and_mul", _relative_error(activation.silu_and_mul(gate_up), reference.silu_and_mul(gate_up))
    angles = (torch.randint(0, 40960, (300,), device="cuda"), 1e6 ** -(torch.arange(64, device="cuda") / 64), 1.0)
    cos, sin = rotary.rotary(*angles, torch.bfloat16)
    yield "rotary", _relative_error(torch.cat((cos, sin)), torch.cat(reference.rotary(*angles, torch.bfloat16)))

    qkv, q_weight, k_weight = _randn(300, 32, 128), _randn(128), _randn(128)
    caches = [torch.zeros(20, 8, _BLOCK, 128, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    slots = torch.randperm(20 * _BLOCK, device="cuda")[:300]
    q = kv_store.norm_rotate_store(qkv, q_weight, k_weight, cos, sin, caches[0], caches[1], slots, 1e-6)
    first, k, v = qkv.split([16, 8, 8], dim=1)
    reference.store_kv(caches[2], reference.apply_rotary(reference.rms_norm(k, k_weight, 1e-6), cos, sin), slots)
    reference.store_kv(caches[3], v, slots)
    rotated = reference.apply_rotary(reference.rms_norm(first, q_weight, 1e-6), cos, sin)
    yield "norm_rotate_store: q", _relative_error(q, rotated)
    yield "norm_rotate_store: k", _relative_error(caches[0], caches[2])
    yield "norm_rotate_store: v", _relative_error(caches[1], caches[3])


def _attention_errors() -> Iterator[tuple[str, float]]:
    """Decode, split and not, and prefill with a cached prefix; against the twin."""
    from nanoinfer.kernels.triton import decode, prefill

    seq_lens = torch.tensor([2049, 700, 31, 1], dtype=torch.int32, device="cuda")
    tables = torch.randperm(4 * 70, device="cuda").int().view(4, 70)
    k, v = (_randn(280, 8, _BLOCK, 128) for _ in range(2))
    q, scale = _randn(4, 16, 128), 128**-0.5
    rows = torch.arange(4, dtype=torch.int32, device="cuda")
    expected = reference.paged_attention(q, k, v, tables, torch.arange(5), seq_lens, scale)
    for splits in (1, 8):
        out = torch.empty_like(q)
        decode.paged_decode(q, k, v, tables, seq_lens, rows, out, scale, splits, decode.MIN_TILES)
        yield f"paged_decode, {splits} split(s)", _relative_error(out, expected)
    starts = torch.tensor([0, 580, 880, 899, 900], dtype=torch.int32)
    q = _randn(900, 16, 128)
    num_queries = prefill.queries_per_tile(q.dtype, 128, 2)
    work = prefill.work_items(starts.numpy(), seq_lens.cpu().numpy(), torch.arange(4).numpy(), num_queries)
    items = torch.from_numpy(work).cuda()
    out = torch.empty_like(q)
    prefill.paged_prefill(q, k, v, tables, seq_lens, starts.cuda(), items, out, scale)
    yield "paged_prefill", _relative_error(out, reference.paged_attention(q, k, v, tables, starts, seq_lens, scale))


def _far_block_errors() -> Iterator[tuple[str, float]]:
    """Blocks beyond 2^31 elements of a cache, as a large pool has them: stored to, and read."""
    from nanoinfer.kernels.triton import decode, kv_store

    num_blocks = 2**31 // (8 * _BLOCK * 128) + 4
    caches = [torch.empty(num_blocks, 8, _BLOCK, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    k, v, q = _randn(64, 8, 128), _randn(64, 8, 128), _randn(1, 16, 128)
    tables = torch.tensor([[num_blocks - 1, num_blocks - 3]], dtype=torch.int32, device="cuda")
    positions = torch.arange(64, device="cuda")
    slots = tables[0][positions // _BLOCK].long() * _BLOCK + positions % _BLOCK
    kv_store.store_kv(k, v, *caches, slots)
    out, rows = torch.empty_like(q), torch.zeros(1, dtype=torch.int32, device="cuda")
    decode.paged_decode(q, *caches, tables, rows + 64, rows, out, 128**-0.5, 1, decode.MIN_TILES)
    near_k, near_v = (x.view(2, _BLOCK, 8, 128).transpose(1, 2).contiguous() for x in (k, v))
    in_order = torch.arange(2, device="cuda").int().unsqueeze(0)
    expected = reference.paged_attention(q, near_k, near_v, in_order, torch.arange(2), rows + 64, 128**-0.5)
    yield "store_kv and paged_decode, far blocks", _relative_error(out, expected)


def _sampler_errors() -> Iterator[tuple[str, float]]:
    from nanoinfer.kernels.triton import sampler, threshold

    logits = _randn(64, VOCAB_SIZE) * 4
    best, winners = sampler.row_argmax(logits)
    inverse, numbers = torch.full((64,), 1.5, device="cuda"), torch.rand(64, device="cuda", dtype=torch.float64)
    yield "row_argmax", float((winners != reference.row_argmax(logits)[1]).double().mean())
    filters = (torch.full((64,), 0.001, device="cuda"), torch.full((64,), 50, device="cuda").int(), numbers.float())
    least = threshold.sampling_threshold(logits, best, inverse, *filters)
    expected = reference.sampling_threshold(logits, best, inverse, *filters)
    yield "sampling_threshold", float((least != expected).double().mean())
    inverse[::4] = 0.0
    for name, bound in (("choose", torch.full_like(best, float("-inf"))), ("choose, filtered", least)):
        sums = sampler.segment_sums(logits, best, inverse, bound)
        tokens = sampler.choose(logits, best, winners, inverse, bound, sums, numbers)
        right = reference.choose(logits, best, winners, inverse, bound, numbers)
        yield name, float((tokens != right).double().mean())
    wide, seen = logits.float(), torch.rand(64, VOCAB_SIZE, device="cuda") < 0.1
    counts = torch.randint(0, 3, wide.shape, device="cuda").int()
    factors = [torch.full((64,), value, device="cuda") for value in (1.3, 0.5, 0.2)]
    right = reference.penalize(wide, seen, counts, *factors)
    rows = torch.arange(64, device="cuda").int()
    sampler.penalize(wide, rows, counts + seen.int() * sampler.IN_PROMPT, *factors)
    yield "penalize", _relative_error(wide, right)


def _input_errors() -> Iterator[tuple[str, float]]:
    """Exact: the largest share of entries that differ."""
    from nanoinfer.kernels.triton import inputs

    def integers(high: int, *size: int) -> torch.Tensor:
        return torch.randint(0, high, size, device="cuda")

    rows = torch.randperm(256, device="cuda").int()
    rows[::7] = -1
    lengths, tables = (integers(4096, 256).int(), integers(20, 256).int()), integers(10**6, 256, 128).int()
    shares = [torch.rand(256, device="cuda") for _ in range(3)]
    settings = (shares[0], shares[1], integers(50, 256).int(), shares[2])
    step = (rows, lengths[0], integers(150000, 256), lengths[1], integers(2**62, 256) * 3, *settings, tables, _BLOCK)
    pairs = zip(inputs.prepare_decode(*step), reference.prepare_decode(*step), strict=True)
    yield "prepare_decode", max(float((ours != right).double().mean()) for ours, right in pairs)


def equality(machine: Machine) -> Iterator[Figure]:
    """Greedy tokens in float32, with graphs and without, against transformers: the share that is not the best."""
    from transformers import Qwen3ForCausalLM

    with tempfile.TemporaryDirectory() as directory:
        _save_tiny_model(directory)
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
                yield Figure("equality", label, wrong, "share", passed=wrong == 0)
            differ = float(outputs[False] != outputs[True])
            yield Figure("equality", f"{name}, graph differs from eager", differ, "yes/no", passed=not differ)


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
    for kind in BACKENDS:
        if kind.rejects(config, "cuda", torch.bfloat16):
            continue
        for batch_size in ATTENTION_BATCHES:
            for context in ATTENTION_CONTEXTS:
                rate = _decode_rate(kind(16, 8, 128), batch_size, context)
                name, fraction = f"{kind.name}, batch {batch_size}, context {context}", rate / machine.read_gb_s
                bound = fraction >= 0.8 if batch_size >= 32 else None
                yield Figure("attention", name, rate, "GB/s", machine.read_gb_s, fraction, bound)


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


def _seconds_of(run: Callable[[], None], repeats: int = 5, replays: int = 4) -> float:
    """Of one replay of a graph of `run`, the median of several means over a few that follow each other."""
    from nanoinfer.worker.cuda_graph import CudaGraph

    graph = CudaGraph(None)
    graph.capture(run)
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
    """A decode step of the engine, host and all, against the floor of that step; and the engine's own part of it."""
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "config.json").write_text(json.dumps(QWEN3_0_6B))
        with LLM(directory, load_format="dummy", device="cuda", max_model_len=2048, seed=0) as llm:
            floor = Floor.of_model(llm.model_config, 2)
            for batch_size, context in STEPS:
                seen: list[StepStats] = []
                llm.engine.on_step = seen.append
                prompts = [[(i * 31 + j) % 9000 + 100 for j in range(context)] for i in range(batch_size)]
                # The first sequences decode while the last ones are still at their prompts, for 26 steps at 256.
                params = SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=80)
                llm.generate(prompts, params, use_tqdm=False)
                full = [s for s in seen if s.num_decode_tokens == batch_size and not s.num_prefill_tokens][8:]
                took = statistics.median(s.seconds for s in full)
                best = statistics.median(floor.seconds(s, machine) for s in full)
                bound = took < 1.5e-3 if batch_size == 1 else None
                name = f"step, batch {batch_size}, context {context}"
                yield Figure("steps", name, 1e3 * took, "ms", 1e3 * best, best / took, bound)
                host = statistics.median(s.seconds - s.execute_seconds for s in full)
                yield Figure("steps", f"of it engine, batch {batch_size}", 1e3 * host, "ms")


def host(machine: Machine) -> Iterator[Figure]:
    """A decode step without a model, as `bench.py --host-only`."""
    for size, ms in host_milliseconds((1, 256), as_on_gpu=True).items():
        yield Figure("host", f"host time, batch {size}", ms, "ms", passed=ms <= 1.0 if size == "256" else None)


def workload(machine: Machine) -> Iterator[Figure]:
    """nano-vllm's workload, Qwen3-0.6B's shape with random weights."""
    from nanoinfer.bench.throughput import run_workload, summarize

    drawn = Workload.draw("nano-vllm", 256, 0)
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "config.json").write_text(json.dumps(QWEN3_0_6B))
        with LLM(directory, load_format="dummy", device="cuda", max_model_len=4096, seed=0) as llm:
            floor = Floor.of_model(llm.model_config, 2)
            report = summarize(drawn, run_workload(llm, drawn, 0), floor, machine)
    rate, best = report["output_tok_s"], report["floor_tok_s"]
    yield Figure("workload", "nano-vllm, output", rate, "tok/s", best, rate / best, rate >= 25_000)
    alone = report["batch1_tok_s"], report["batch1_fraction_of_floor"]
    yield Figure("workload", "one request alone", alone[0], "tok/s", alone[0] / alone[1], alone[1])
    yield Figure("workload", "decode", report["decode_tok_s"], "tok/s")
    yield Figure("workload", "prefill", report["prefill_tok_s"], "tok/s")
    fraction = report["prefill_512_fraction"]
    yield Figure("workload", "prefill of 512 tokens, rate of products", fraction, "of gemm", 1.0, fraction)
