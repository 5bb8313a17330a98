"""What a GPU would be asked to launch, from the real launcher over a device that runs nothing: how many kernels a step
has, that none is compiled once the engine has started, and a dry run of all parts of --gpu-check.

Run by test_triton.py in a process of its own. Not collected by name.
"""

# ruff: noqa: I001

from __future__ import annotations

import triton_launcher  # (first: it makes the device)

import gc
import json
import math
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import gpu_stand_in
import numpy as np
import pytest
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.jit import JITFunction

from nanoinfer import LLM, SamplingParams
from nanoinfer.attention.triton import TritonAttention
from nanoinfer.bench import gpu_check, gpu_kernels, gpu_parts, machine, workload
from nanoinfer.bench.gpu_check import Figure
from nanoinfer.bench.machine import Machine
from nanoinfer.config import ModelConfig, SchedulerConfig
from nanoinfer.distributed.group import ParallelGroups
from nanoinfer.kernels.triton import compile as tool
from nanoinfer.kernels.triton import norm
from nanoinfer.layers.sampler import VocabShard
from nanoinfer.models.qwen3 import Qwen3ForCausalLM
from nanoinfer.worker import cuda_graph, gpu_memory, model_runner
from nanoinfer.worker.device_runner import DeviceRunner

LAYERS = 2
SHAPE = workload.QWEN3_0_6B | {"num_hidden_layers": LAYERS, "hidden_size": 64, "intermediate_size": 96}
SHAPE |= {"vocab_size": 12000, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
MODEL = ModelConfig.from_dict(SHAPE)
MACHINE = Machine(4300.0, 790.0)


@pytest.fixture(autouse=True)
def instant_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    triton_launcher.compile_for_real(False)
    monkeypatch.setattr(model_runner, "graph_factory", lambda device, eager: None if eager else gpu_stand_in.Graph)


@pytest.fixture
def llm(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[LLM]:
    """request.param: whether to do without graphs; not, unless a test says so."""
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    options: dict[str, Any] = {"load_format": "dummy", "device": "cpu", "dtype": "bfloat16", "seed": 0}
    options |= {"max_num_seqs": 20, "max_num_batched_tokens": 256, "num_kvcache_blocks": 1300, "max_model_len": 40000}
    options["enforce_eager"] = getattr(request, "param", False)
    triton_launcher.forget([kernel for module in tool._MODULES for kernel in vars(module).values()])
    with LLM(tmp_path, **options) as made:
        yield made


def test_a_launch_binds_and_compiles_as_on_a_gpu() -> None:
    triton_launcher.compile_for_real(True)
    x = torch.ones(3, 64)
    assert norm.rms_norm(x, torch.ones(64), 1e-6).tolist() == [[0.0] * 64] * 3, "the stand-in zeroes"
    name, key = triton_launcher.compiled[-1]
    assert name == "rms_norm_kernel" == triton_launcher.launched[-1] and "fp32" in key
    with pytest.raises(TypeError):
        norm.rms_norm_kernel[(1,)](x, x)


@pytest.mark.parametrize(
    "shape",
    [
        tool.Shape(),
        tool.Shape(63, 97, 3, 1, 24, 323, 5, torch.float32),
        tool.Shape(64, 1, 1, 1, 2, 1, 1, torch.float16),
    ],
)
def test_what_is_compiled_ahead_of_time_is_what_a_launch_compiles(
    shape: tool.Shape, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Types, constants (ones among them) and what is known to be a multiple of 16: else the report is of kernels that
    nobody runs."""
    found: list[tuple[Any, ...]] = []

    def note(
        self: Any, key: str, signature: Any, device: Any, constants: Any, options: Any, attributes: Any, *_: Any
    ) -> None:
        found.append((signature, constants, {path: what for path, what in attributes.items() if what}))

    monkeypatch.setattr(JITFunction, "_do_compile", note)
    for launch in tool.launches_of(shape, num_seqs=3):
        launch.kernel[(1,)](*launch.arguments, **launch.options)
        source = tool._source(launch)
        attributes = dict(source.attrs)
        assert found[-1] == (source.signature, source.constants, attributes), launch.name
    assert len(found) > 15


class Kernels(TorchDispatchMode):
    """Counts what runs on the device: views and allocations do not, nor does what is on the host as on a GPU."""

    FREE = ("view", "select", "slice", "squeeze", "expand", "alias", "split", "flatten", "transpose", "empty", "detach")

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(function).split(".")[1]
        is_free = any(free in name for free in self.FREE) and name != "index_select"
        if not is_free and not str(function).startswith("nanoinfer."):
            self.names[name] += 1
        return function(*args, **(kwargs or {}))


@torch.inference_mode()
@pytest.mark.parametrize(("num_seqs", "merges"), [(1, 1), (300, 0)])
def test_a_decode_step_is_few_kernels(num_seqs: int, merges: int) -> None:
    """On Qwen3-0.6B a step of one sequence is as long as its kernels are many: each takes a microsecond or two."""
    backend, limits = TritonAttention(4, 2, 64), SchedulerConfig(300, 512, 4096, num_blocks=1, block_size=32)
    model = Qwen3ForCausalLM(MODEL, backend, ParallelGroups.single(), torch.bfloat16, "cpu")
    kv_cache = backend.allocate(LAYERS, 1, 32, torch.bfloat16, "cpu")
    runner = DeviceRunner(model, backend, kv_cache, limits, VocabShard(), torch.device("cpu"))
    triton_launcher.launched.clear()
    rows = torch.full((2, num_seqs), -1, dtype=torch.int32)
    with Kernels() as others:
        runner.decode(rows)
    # A layer: two norms, q and k, attention and its merge, SiLU; four products beside them.
    assert others.names["linear"] == 4 * LAYERS + 1
    assert len(triton_launcher.launched) <= (5 + merges) * LAYERS + 9, Counter(triton_launcher.launched)
    # Of torch's own beside the products: the embedding, the rows' block tables, their places in the batch, and
    # query_start_loc, which is on the host.
    assert others.names.total() - others.names["linear"] <= 4, others.names


@pytest.mark.parametrize("llm", [False, True], indirect=True, ids=["graphs", "eager"])
def test_nothing_is_compiled_once_the_engine_has_started(llm: LLM) -> None:
    """Mixed steps, chunks, filters, penalties, biases, masks, one sequence and twenty: what they launch is known."""
    runner = llm.engine.executor.runner  # type: ignore[attr-defined]
    # As `ModelRunner.capacity` does on a GPU, before the graphs are captured.
    gpu_memory.run_largest_step(runner._device_runner)
    known = set(triton_launcher.compiled)
    rng = np.random.default_rng(0)
    kinds: list[dict[str, Any]] = [
        {}, {"temperature": 0.0}, {"top_k": 20, "top_p": 0.95}, {"min_p": 0.1}, {"repetition_penalty": 1.2},
        {"logit_bias": {5: 1.0}, "top_p": 0.9}, {"allowed_token_ids": [0, 4]}, {"logprobs": 3},
    ]  # fmt: skip
    for num_seqs in (1, 3, 4, 7, 20):
        prompts = [rng.integers(1, 10000, rng.integers(1, 300)).tolist() for _ in range(num_seqs)]
        params = [
            SamplingParams(max_tokens=int(rng.integers(1, 9)), ignore_eos=True, **kinds[i % len(kinds)])
            for i in range(num_seqs)
        ]
        llm.generate(prompts, params, use_tqdm=False)
    assert set(triton_launcher.compiled) == known


def test_a_closed_engine_frees_its_memory_at_once(llm: LLM) -> None:
    """Graphs hold the runner whose step they have captured, which holds them: counting references frees neither."""
    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=3), use_tqdm=False)
    left = weakref.ref(llm.engine.executor.runner)  # type: ignore[attr-defined]
    gc.disable()
    try:
        llm.close()
        assert left() is None
    finally:
        gc.enable()


def test_a_whole_start_as_on_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """device="cuda" from the options to the last token, on a card of 4 GiB of which the process holds 0.25 before, and
    others take 0.5 while a graph is captured, and give it back: what is measured, in which order, what is captured, and
    how large the pool is."""
    gib, calls = 2**30, []

    class Graph(gpu_stand_in.Graph):
        def capture(self, function: Any) -> None:
            calls.append("capture")
            super().capture(function)

    def note(name: str, value: Any = None) -> Any:
        def call(*_: Any) -> Any:
            calls.append(name)
            return value() if callable(value) else value

        monkeypatch.setattr(torch.cuda, name, call)

    gpu_stand_in.pretend(monkeypatch)
    free = iter([3.25, 3.0, 3.0, 2.5, 3.5, 3.5])
    reserved = iter([0.25, 0.75, 0.75, 1.0, 1.0, 1.0, 0.75])
    note("mem_get_info", lambda: (int(next(free) * gib), 4 * gib))
    note("memory_reserved", lambda: int(next(reserved) * gib))
    note("max_memory_reserved", gib)
    for name in ("empty_cache", "synchronize", "reset_peak_memory_stats"):
        note(name)
    monkeypatch.setattr(cuda_graph, "CudaGraph", Graph)
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    with gpu_stand_in.CudaIsCPU():
        options: dict[str, Any] = {"load_format": "dummy", "device": "cuda", "seed": 0, "max_model_len": 300}
        with LLM(tmp_path, max_num_seqs=6, **options) as llm:
            runner = llm.engine.executor.runner  # type: ignore[attr-defined]
            assert runner.backend.name == "triton" and runner.dtype == torch.bfloat16
            # 0.25 for the step, 0.25 reserved, and for graphs 0.25 for the largest of four (6, 4, 2, 1) and nothing
            # more for the others. The budget is 0.9 of 4 GiB less 0.5 of weights; on the card there would be more.
            room = int(0.9 * 4 * gib) - gib // 2 - 3 * gib // 4
            assert llm.engine.scheduler.config.num_blocks == room // (2 * LAYERS * 32 * 2 * 64 * 2)
            outputs = llm.generate([[1, 2, 3], [4] * 40], SamplingParams(max_tokens=5, ignore_eos=True), use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [5, 5]
    # What an engine before this one has left is given back, then it is looked at what is still held; nothing is cached
    # when the largest step's share is measured, nor when the card is asked what is free.
    assert calls[:2] == ["empty_cache", "memory_reserved"]
    asked = [i for i, name in enumerate(calls) if name == "mem_get_info"]
    assert [calls[i - 1] for i in asked] == ["empty_cache"] * 5 + ["memory_reserved"]
    reserved_too = [i for i, name in enumerate(calls) if name == "memory_reserved"][2:]
    assert [calls[i - 2 : i] for i in reserved_too] == [["empty_cache", "mem_get_info"]] * 5
    first = calls.index("reset_peak_memory_stats")
    assert calls[first - 1 : first + 4] == [
        "empty_cache", "reset_peak_memory_stats", "memory_reserved", "synchronize", "max_memory_reserved",
    ]  # fmt: skip
    assert calls.count("capture") == 2 + 4


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts as they are, over a small model and small shapes."""
    monkeypatch.setattr(machine, "READ_BYTES", 1 << 20)
    monkeypatch.setattr(machine, "GEMM_SHAPES", ((16, 16, 64),))
    monkeypatch.setattr(gpu_parts, "QWEN3_0_6B", SHAPE)
    monkeypatch.setattr(gpu_kernels, "VOCAB_SIZE", 5000)
    monkeypatch.setattr(gpu_parts, "EQUAL_TOKENS", 5)
    monkeypatch.setattr(gpu_parts, "STEP_TOKENS", 20)
    monkeypatch.setattr(gpu_parts, "STEPS", ((1, 40), (5, 30)))
    monkeypatch.setattr(gpu_parts, "ATTENTION_BATCHES", (1, 32))
    monkeypatch.setattr(gpu_parts, "ATTENTION_CONTEXTS", (100,))
    monkeypatch.setattr(gpu_parts, "ATTENTION_BYTES", 1 << 20)
    monkeypatch.setattr(gpu_parts, "HOST_BATCHES", (1, 3))
    monkeypatch.setattr(gpu_parts, "PROFILES", ((1, 40), (5, 30)))
    monkeypatch.setattr(gpu_parts, "PROFILED_STEPS", 3)
    monkeypatch.setattr(gpu_parts, "PROFILED", (ProfilerActivity.CPU, DeviceType.CPU))
    monkeypatch.setitem(workload.PRESETS, "nano-vllm", workload.Preset(12, (2, 6), (2, 5), 4096))
    gpu_stand_in.pretend(monkeypatch)
    make = gpu_parts.LLM
    # The pool that an H200 would have is more than there is.
    small: dict[str, Any] = {"num_kvcache_blocks": 400, "max_num_batched_tokens": 512, "max_num_seqs": 8}
    monkeypatch.setattr(gpu_parts, "LLM", lambda path, **others: make(path, **(small | others)))


@pytest.mark.parametrize("part", gpu_check.PARTS)
def test_the_parts_of_the_gpu_check_find_their_figures(small_parts: None, part: str) -> None:
    triton_launcher.launched.clear()
    # What a step costs the host is measured on the CPU, where there is a GPU as well.
    with nullcontext() if part == "host" else gpu_stand_in.CudaIsCPU():
        figures: list[Figure] = list(gpu_check.run_part(part, MACHINE))
    assert all(figure.part == part and not math.isinf(figure.value) for figure in figures)
    names = {figure.name: figure for figure in figures}
    assert len(names) == len(figures)
    if part == "machine":
        assert names["read"].best == 4300.0 and names["gemm"].value > 0 and "copy, read plus write" in names
    elif part == "kernels":
        # What runs nothing is wrong, and is found out.
        assert len(figures) >= 20 and sum(figure.passed is False for figure in figures) >= 5
        every_kernel = {launch.name for launch in tool.launches_of(tool.Shape())}
        assert set(triton_launcher.launched) == every_kernel, "a kernel that no twin is compared with"
    elif part == "equality":
        assert [figure.passed for figure in figures if "not transformers'" in figure.name] == [False] * 4
        assert [figure.passed for figure in figures if "differs" in figure.name] == [True] * 2
    elif part == "workload":
        assert names["nano-vllm, output"].passed is False and names["nano-vllm, output"].best is not None
        assert all(figure.fraction is not None for figure in figures if figure.unit == "tok/s")
    elif part == "attention":
        assert [figure.passed is None for figure in figures] == [True, False]
        assert all(figure.fraction == pytest.approx(figure.value / 4300) for figure in figures)
    elif part == "steps":
        assert len(figures) == 4 and names["step, batch 1, context 40"].passed is not None
        assert all(0 < names[f"of it host, batch {n}"].value < 1e4 for n in (1, 5))
    elif part == "host":
        assert set(names) == {"host time, batch 1", "host time, batch 3"}
    else:
        assert part == "breakdown" and {"batch 1, all kernels", "batch 5, all kernels"} <= set(names)
        # In the stand-in for graphs: torch's own operators, which a CPU's profiler sees.
        assert any("aten::" in name for name in names), names


def test_what_raises_within_a_part_leaves_the_rest_of_it_alone(
    small_parts: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def rate(backend: object, batch_size: int, context: int) -> float:
        if batch_size == 1:
            raise torch.OutOfMemoryError("too large")
        return 2150.0

    monkeypatch.setattr(gpu_parts, "_decode_rate", rate)
    found = gpu_parts.attention(MACHINE)
    figure = next(found)
    assert (figure.name, figure.fraction, figure.passed) == ("triton, batch 32, context 100", 0.5, False)
    with pytest.raises(RuntimeError, match=r"batch 1, context 100: OutOfMemoryError\('too large'\)"):
        next(found)
    assert "in rate" in capsys.readouterr().err, "the traceback"


def test_every_kernel_is_in_the_ahead_of_time_compilation() -> None:
    """A kernel that a step launches and that the compiler's report leaves out would be unbounded."""
    reported = {launch.name for launch in tool.launches_of(tool.Shape())}
    assert {name for name, _ in triton_launcher.compiled} <= reported
