"""A GPU's step without a GPU: fake "cuda" tensors, which backend is chosen, and the start-up checks. What needs the
interpreter is in triton_engine_cases.py, memory in test_gpu_memory.py.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, TypeVar
from unittest.mock import Mock, call

import numpy as np
import pytest
import tiny
import torch
from gpu_stand_in import OnFakeGPU
from test_cuda_graph import StandInGraph
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from nanoinfer.attention import select, triton
from nanoinfer.attention import upload as attention_upload
from nanoinfer.attention.base import ForwardBatch
from nanoinfer.attention.cpu import CPUAttention
from nanoinfer.attention.flash_attn import FlashAttention
from nanoinfer.attention.triton import TritonAttention
from nanoinfer.config import EngineConfig, ModelConfig, SchedulerConfig
from nanoinfer.distributed import launch
from nanoinfer.distributed.group import ParallelGroups, TensorParallelGroup
from nanoinfer.distributed.launch import check_devices
from nanoinfer.layers import device_sampler
from nanoinfer.layers.device_sampler import DeviceSampling, sample_on_device
from nanoinfer.layers.sampler import Bias, Penalty, SamplingBatch, TokenCounts, VocabShard, row_logprobs
from nanoinfer.models.qwen3 import Qwen3ForCausalLM
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.step import NewSequence, SchedulerOutput, token_bitmask
from nanoinfer.worker import cuda_graph, device_rows, device_runner
from nanoinfer.worker.cuda_graph import DecodeGraphs, graph_sizes
from nanoinfer.worker.device_runner import DeviceRunner
from nanoinfer.worker.download import Download
from nanoinfer.worker.gpu_memory import run_largest_step
from nanoinfer.worker.input_batch import InputBatch

MODEL = ModelConfig.from_dict({**tiny.Qwen3Config(**tiny.BASE).to_dict(), "model_type": "qwen3"})

# --- Fake tensors ------------------------------------------------------------------------------------------------


class Devices(TorchDispatchMode):
    """Notes every operator that has a tensor elsewhere than on the GPU, and every copy between the two."""

    def __init__(self) -> None:
        super().__init__()
        self.elsewhere: list[str] = []
        self.operators: set[str] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        self.operators.add(str(function))
        tensors = [t for t in tree_flatten((args, kwargs, out))[0] if isinstance(t, torch.Tensor)]
        if any(t.device.type != "cuda" for t in tensors):
            self.elsewhere.append(str(function))
        return out


Runner = TypeVar("Runner", bound=DeviceRunner)


def fake_runner(mode: FakeTensorMode, kind: type[Runner], tp: TensorParallelGroup | None = None) -> Runner:
    limits, tp = SchedulerConfig(8, 64, 128, num_blocks=16, block_size=16), tp or TensorParallelGroup.single()
    with mode, torch.inference_mode(), OnFakeGPU():
        backend = TritonAttention(4 // tp.size, 2 // tp.size, 32)
        model = Qwen3ForCausalLM(MODEL, backend, ParallelGroups(tp), torch.bfloat16, "cuda")
        kv_cache = backend.allocate(3, 16, 16, torch.bfloat16, "cuda")
        return kind(model, backend, kv_cache, limits, VocabShard(tp, model.lm_head.first_id), torch.device("cuda"))


def make_uploads_fake(monkeypatch: pytest.MonkeyPatch, mode: FakeTensorMode) -> None:
    def upload(arrays: list[np.ndarray], device: torch.device) -> list[torch.Tensor]:
        types = [torch.from_numpy(np.empty(0, array.dtype)).dtype for array in arrays]
        with mode:
            return [torch.empty(a.size, dtype=t, device=device) for a, t in zip(arrays, types, strict=True)]

    for module in (device_runner, device_rows, device_sampler, triton):
        monkeypatch.setattr(module, "upload", upload)


# The one thing on the host: query_start_loc, which says that each row has one query.
ON_THE_HOST = {"aten.arange.default", "aten.arange.start_step", "aten._local_scalar_dense.default"}
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is for Linux on x86-64")
KERNELS = {"norm_rotate_store", "paged_decode", "rms_norm", "add_rms_norm", "silu_and_mul", "row_argmax", "choose"}
KERNELS |= {"segment_sums", "sampling_threshold", "store_tokens", "rotary"}


@needs_triton
def test_a_decode_step_stays_on_the_gpu_and_waits_for_nothing() -> None:
    """A fake tensor has no value: whatever made the host read one would raise."""
    mode = FakeTensorMode()
    runner = fake_runner(mode, DeviceRunner)
    with mode, torch.inference_mode(), OnFakeGPU(), Devices() as devices:
        tokens, logits = runner.decode(torch.empty(2, 5, dtype=torch.int32, device="cuda"))
        with pytest.raises(DataDependentOutputException):
            tokens.tolist()
    assert isinstance(tokens, FakeTensor) and tokens.shape == (5,) and tokens.dtype == torch.int64
    assert logits.shape == (5, 320) and logits.dtype == torch.bfloat16
    assert set(devices.elsewhere) <= ON_THE_HOST
    ours = {name.split(".")[1] for name in devices.operators if name.startswith("nanoinfer.")}
    assert ours >= KERNELS | {"prepare_decode"}
    assert "paged_prefill" not in ours


@needs_triton
@pytest.mark.parametrize("rank", [0, 1])
def test_a_decode_step_of_two_ranks_stays_on_the_gpu_and_waits_for_nothing(rank: int) -> None:
    """So a graph can hold it, collectives and all: these are as many as the layers' and the sampler's own."""
    mode, tp = FakeTensorMode(), Alone(rank, 2)
    runner = fake_runner(mode, DeviceRunner, tp)
    with mode, torch.inference_mode(), OnFakeGPU(), Devices() as devices:
        tokens, logits = runner.decode(torch.empty(2, 5, dtype=torch.int32, device="cuda"))
    assert tokens.shape == (5,) and tokens.dtype == torch.int64 and logits.shape == (5, 160)
    assert set(devices.elsewhere) <= ON_THE_HOST
    assert tp.calls == ["all_reduce"] * (1 + 2 * 3) + ["all_gather", "all_gather", "all_reduce"]


class Alone(TensorParallelGroup):
    """A rank that takes what it has for what all have."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self.calls: list[str] = []

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        self.calls.append("all_reduce")
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        self.calls.append("all_gather")
        return torch.cat([tensor] * self.size, dim=-1)


@needs_triton
def test_a_mixed_step_stays_on_the_gpu_and_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three sequences with 7, 1 and 20 tokens; only the sending touches the host."""
    mode = FakeTensorMode()
    runner = fake_runner(mode, DeviceRunner)
    sent: list[int] = []

    def upload(arrays: list[np.ndarray], device: torch.device) -> list[torch.Tensor]:
        sent.append(sum(array.nbytes for array in arrays))
        types = [torch.from_numpy(np.empty(0, array.dtype)).dtype for array in arrays]
        with mode:
            return [torch.empty(a.size, dtype=t, device=device) for a, t in zip(arrays, types, strict=True)]

    monkeypatch.setattr(device_runner, "upload", upload)
    monkeypatch.setattr(triton, "upload", upload)
    starts = torch.tensor([0, 7, 8, 28], dtype=torch.int32)
    host = ForwardBatch(
        input_ids=torch.zeros(28, dtype=torch.int64), positions=torch.zeros(28, dtype=torch.int64),
        query_start_loc=starts, seq_lens=torch.tensor([7, 30, 25], dtype=torch.int32),
        block_tables=torch.zeros(3, 2, dtype=torch.int32), slot_mapping=torch.zeros(28, dtype=torch.int64),
        logits_indices=starts[1:].long() - 1, max_query_len=20, max_seq_len=30,
    )  # fmt: skip
    with torch.inference_mode(), OnFakeGPU():
        batch = runner.send(host)
    assert len(sent) == 2, "the batch, and its plan"
    with mode, torch.inference_mode(), OnFakeGPU(), Devices() as devices:
        logits = runner.compute_logits(runner.forward(batch), batch.logits_indices)
        rows, uniforms = torch.empty(3, dtype=torch.int32, device="cuda"), torch.empty(3, device="cuda").double()
        sampling: DeviceSampling = runner.rows.sampling(rows, uniforms, has_filters=True)
        tokens = sample_on_device(logits, sampling, runner.shard)
    assert tokens.shape == (3,) and not devices.elsewhere
    assert {"nanoinfer.paged_decode.default", "nanoinfer.paged_prefill.default"} <= devices.operators


# --- A launched step waits for nothing --------------------------------------------------------------------------


class Crossings(TorchDispatchMode):
    """Notes every operator by which something comes from the GPU to the host or goes to it, which is for `upload` and
    `Download` alone: any other such copy waits. Numbers that are read raise."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        given, made = ([t.device.type for t in tree_flatten(x)[0] if isinstance(t, torch.Tensor)] for x in (args, out))
        if "cuda" in [*made, *given] and "cpu" in [*made, *given]:
            self.found.append(str(function))
        return out


class Waits(Exception):
    """Somebody waits for the device."""


class FakeDeviceRunner(DeviceRunner):
    """On fake tensors, which are made under a mode; everything around is as on a GPU."""

    mode: FakeTensorMode

    def decode(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with self.mode:
            return super().decode(inputs)

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        with self.mode:
            return super().forward(batch)

    def compute_logits(self, hidden: torch.Tensor, indices: torch.Tensor | None) -> torch.Tensor:
        with self.mode:
            return super().compute_logits(hidden, indices)

    def _sample(self, *arguments: Any) -> torch.Tensor:
        with self.mode:
            return super()._sample(*arguments)


@pytest.fixture(params=["eager", "graphs"])
def launched(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> tuple[FakeDeviceRunner, Callable[[], list[Any]]]:
    """A runner, and a function that launches steps: prompts, one of them in chunks beside a decode, then decodes. It
    returns what was left to be read. One of the two has banned and favoured tokens, and few that are allowed."""
    mode = FakeTensorMode()
    runner = fake_runner(mode, FakeDeviceRunner)
    runner.mode = mode
    downloads: list[Any] = []
    make_uploads_fake(monkeypatch, mode)

    def wait(*_: Any) -> None:
        raise Waits

    monkeypatch.setattr(torch.cuda, "synchronize", wait)
    monkeypatch.setattr(torch.cuda.Stream, "synchronize", wait)
    monkeypatch.setattr(torch.cuda.Event, "synchronize", wait)
    monkeypatch.setattr(cuda_graph, "upload_to", lambda target, array: None)
    if request.param == "graphs":
        runner.graphs = DecodeGraphs(runner.decode, graph_sizes(8), runner.device, StandInGraph)
        with mode, torch.inference_mode(), OnFakeGPU():
            runner.graphs.capture()
    monkeypatch.setattr(device_runner, "Download", lambda tokens: downloads.append(tokens) or tokens)

    def run() -> list[Any]:
        batch = InputBatch(8, 128, 16, 320)
        plans = [
            SchedulerOutput(new=[new_sequence(1, 5)], num_scheduled_tokens={1: 5}),
            SchedulerOutput(new=[new_sequence(2, 20)], num_scheduled_tokens={1: 1, 2: 12}),
            SchedulerOutput(num_scheduled_tokens={1: 1, 2: 8}),
            *[SchedulerOutput(num_scheduled_tokens={1: 1, 2: 1}) for _ in range(3)],
            SchedulerOutput(num_scheduled_tokens={1: 1, 2: 1}, new_block_ids={1: [4]}),
        ]
        with torch.inference_mode(), OnFakeGPU():
            for plan in plans:
                batch.apply(plan)
                rows, tokens, logprobs, _ = runner.launch(plan, batch)
                assert tokens is not None and not logprobs and not batch.needs_tokens(rows)
                batch.commit(rows, None)
        return downloads

    return runner, run


def new_sequence(seq_id: int, num_tokens: int) -> NewSequence:
    limits: dict[str, Any] = (
        {"min_tokens": 3, "logit_bias": {5: 1.0}, "allowed_token_ids": [4, 5]} if seq_id > 1 else {}
    )
    params, blocks = SamplingParams(temperature=0.8, top_k=5, **limits), [2 * seq_id, 2 * seq_id + 1]
    return NewSequence(seq_id, list(range(num_tokens)), num_tokens, 0, blocks, params, 7, (9,))


@needs_triton
def test_steps_are_launched_without_waiting_for_any(launched: tuple[DeviceRunner, Callable[[], list[Any]]]) -> None:
    """Seven steps, filters, masks, bans and biases included, and no token is on the host before somebody reads."""
    with Crossings() as crossings:
        tokens = launched[1]()
    assert crossings.found == []
    assert [len(of_step) for of_step in tokens] == [1, 1, 2, 2, 2, 2, 2]
    assert all(isinstance(of_step, FakeTensor) and of_step.device.type == "cuda" for of_step in tokens)


@needs_triton
@pytest.mark.parametrize("size", [1, 2])
def test_the_largest_step_has_its_tensors_on_the_gpu(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What sizes the pool: an operator whose tensors lie on two devices would raise."""
    mode = FakeTensorMode()
    runner = fake_runner(mode, FakeDeviceRunner, Alone(0, size))
    runner.mode = mode
    make_uploads_fake(monkeypatch, mode)
    for name in ("full", "arange"):
        monkeypatch.setattr(torch, name, under_if_on_gpu(mode, getattr(torch, name)))
    with torch.inference_mode(), OnFakeGPU(), Crossings() as crossings:
        run_largest_step(runner)
    assert crossings.found == []


def under_if_on_gpu(mode: FakeTensorMode, make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def call(*arguments: Any, device: Any = "cpu", **options: Any) -> torch.Tensor:
        with mode if torch.device(device).type == "cuda" else nullcontext():
            return make(*arguments, device=device, **options)

    return call


@needs_triton
@pytest.mark.parametrize("size", [1, 2])
def test_whatever_is_done_to_logits_has_its_tensors_on_the_gpu(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks, bans, biases, penalties, then log-probabilities, up to the moment in which the host reads these."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    make_uploads_fake(monkeypatch, mode)
    settings = SamplingBatch(*(np.zeros(3) for _ in range(5)), logprobs={0: 2, 2: 1})
    settings.masks[0], settings.banned[1] = token_bitmask([1, 2], 320), [3, 4]
    settings.biases[2] = Bias.of({5: 1.0})
    settings.penalties[1] = Penalty(TokenCounts.of(320, np.arange(9), np.arange(5)), 1.2, 0.1, 0.1)
    shard = VocabShard(Alone(size - 1, size), 320 // size * (size - 1))
    with mode, torch.inference_mode(), OnFakeGPU(), Devices() as devices:
        logits = torch.empty(3, 320 // size, dtype=torch.bfloat16, device="cuda")
        changed = device_sampler.adjusted(logits, settings, shard)
        tokens = torch.empty(3, dtype=torch.int64, device="cuda")
        assert changed.device.type == "cuda" and changed.dtype == torch.float32 and changed.shape == logits.shape
        with pytest.raises(DataDependentOutputException):
            row_logprobs(logits, tokens, [0, 1, 2], {0: 2, 1: 1, 2: 1}, shard)
    assert not [name for name in devices.elsewhere if name.startswith("nanoinfer.")], "our own operators do not check"


SYNCHRONIZATIONS: dict[str, Callable[[torch.Tensor], object]] = {
    "item": lambda x: x[0, 0].item(),
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "to": lambda x: x.to("cpu", non_blocking=True),
    "copy_": lambda x: torch.empty(x.shape, device="cpu").copy_(x),
    "nonzero": lambda x: x.nonzero(),
    "mask": lambda x: torch.masked_select(x, x > 0),
    "if": lambda x: bool((x > 0).any()),
    "unique": lambda x: x.unique(),
    "synchronize": lambda x: torch.cuda.synchronize(),
    "pageable copy": lambda x: torch.ones(3).to("cuda"),
}


@needs_triton
@pytest.mark.parametrize("launched", ["eager"], indirect=True)
@pytest.mark.parametrize("how", SYNCHRONIZATIONS)
def test_a_synchronization_would_be_found(
    how: str, launched: tuple[FakeDeviceRunner, Callable[[], list[Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, run = launched
    compute_logits = DeviceRunner.compute_logits

    def waiting(self: DeviceRunner, hidden: torch.Tensor, indices: torch.Tensor | None) -> torch.Tensor:
        logits = compute_logits(self, hidden, indices)
        SYNCHRONIZATIONS[how](logits)
        return logits

    monkeypatch.setattr(DeviceRunner, "compute_logits", waiting)
    with Crossings() as crossings:
        try:
            run()
        except (DataDependentOutputException, DynamicOutputShapeException, Waits):
            return
        except RuntimeError:
            assert how == "nonzero"  # torch without CUDA has no such operator
            return
    assert crossings.found


def test_a_download_is_read_when_its_copy_is_over_and_not_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of the calls, with stand-ins for pinned memory and an event."""
    calls = Mock()
    calls.empty.return_value = calls.pinned
    calls.Event.return_value = calls.event
    calls.pinned.tolist.return_value = [3, 4]
    monkeypatch.setattr(torch, "empty", calls.empty)
    monkeypatch.setattr(torch.cuda, "Event", calls.Event)
    source = SimpleNamespace(device=torch.device("cuda"), shape=(2,), dtype=torch.int64)
    download = Download(source)  # type: ignore[arg-type]
    assert calls.mock_calls == [
        call.empty((2,), dtype=torch.int64, device="cpu", pin_memory=True),
        call.pinned.copy_(source, non_blocking=True),
        call.Event(),
        call.event.record(),
    ]
    calls.reset_mock()
    calls.event.query.side_effect = [False, True]
    assert [download.is_over(), download.is_over()] == [False, True]
    assert download.tolist() == [3, 4]
    assert calls.mock_calls[-2:] == [call.event.synchronize(), call.pinned.tolist()]
    assert calls.event.synchronize.call_count == 1


@pytest.mark.parametrize("way", ["upload", "upload_to"])
def test_what_is_sent_is_pinned_and_not_waited_for(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From memory of each call's own, which torch's allocator does not hand out again while it is read."""
    staged: list[torch.Tensor] = []
    copies: list[tuple[bool, bool]] = []
    empty = torch.empty

    def noting_empty(*arguments: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        made = empty(*arguments, **options)
        if pin_memory:
            staged.append(made)
        return made

    class Sending(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            if function in (torch.Tensor.to, torch.Tensor.copy_):
                source = args[0] if function is torch.Tensor.to else args[1]
                copies.append((any(source is one for one in staged), kwargs.get("non_blocking", False)))
                return source
            return function(*args, **kwargs)

    arrays = [np.arange(5), np.ones(3, np.float32), np.zeros(0, np.int32)]
    monkeypatch.setattr(torch, "empty", noting_empty)
    with Sending():
        for _ in range(2):
            if way == "upload":
                found = attention_upload.upload(arrays, torch.device("cuda"))
                assert [one.tolist() for one in found] == [array.tolist() for array in arrays]
            else:
                target = SimpleNamespace(device=torch.device("cuda"), shape=(5,), dtype=torch.int64)
                target.copy_ = lambda source, **options: torch.Tensor.copy_(empty(5), source, **options)
                attention_upload.upload_to(target, arrays[0])  # type: ignore[arg-type]
                assert staged[-1].tolist() == list(range(5))
    assert copies == [(True, True)] * 2 and staged[0] is not staged[1]


def test_what_is_on_its_way_is_not_overwritten_with_its_source() -> None:
    source = torch.tensor([1, 2])
    download = Download(source)
    source.fill_(9)
    assert download.is_over() and download.tolist() == [1, 2]


# --- Long contexts first ------------------------------------------------------------------------------------------


def test_a_decode_step_s_rows_are_sorted_by_length() -> None:
    """Attention's programs start in the order of the batch; a long one that starts late keeps all others waiting."""
    batch = InputBatch(8, 64, 16, 320)
    lengths = {7: 5, 3: 40, 9: 17, 4: 40}
    new = [
        NewSequence(seq_id, list(range(n)), n, 0, list(range(-(-(n + 1) // 16))), SamplingParams(), seq_id, ())
        for seq_id, n in lengths.items()
    ]
    plan = SchedulerOutput(new=new, num_scheduled_tokens=lengths)
    batch.apply(plan)
    assert batch.decodes(plan) is None
    step, _ = batch.build(plan)
    batch.commit(step, [1, 1, 1, 1])
    one_each = SchedulerOutput(num_scheduled_tokens=dict.fromkeys(lengths, 1))
    in_order = batch.decodes(one_each)
    assert in_order is not None and in_order.seq_ids == list(lengths) and in_order.longest == 41
    decode = batch.decodes(one_each, longest_first=True)
    assert decode is not None and decode.seq_ids == [3, 4, 9, 7]
    assert decode.rows.tolist() == [batch.row_of(seq_id) for seq_id in decode.seq_ids]
    assert batch.num_computed(decode.rows).tolist() == [40, 40, 17, 5]


@needs_triton
def test_a_mixed_step_s_decodes_are_sorted_by_length() -> None:
    backend = TritonAttention(4, 2, 32)
    backend.allocate(1, 1, 16, torch.bfloat16, "cpu")
    starts, lens = torch.tensor([0, 1, 2, 7, 8]).int(), torch.tensor([3, 9, 20, 5]).int()
    nothing = torch.zeros(8, dtype=torch.int64)
    batch = ForwardBatch(nothing, nothing, starts, lens, torch.arange(4).int().view(4, 1), nothing, nothing, 5, 64)
    decodes = backend.plan(batch, 16).decodes  # type: ignore[attr-defined]
    assert decodes.seq_lens.tolist() == [9, 5, 3]
    assert decodes.rows.tolist() == [1, 7, 0] and decodes.block_tables.tolist() == [[1], [3], [0]]


# --- Which backend, and whether there are GPUs --------------------------------------------------------------------


def without(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name in names else find(name, *a))
    for name in names:
        monkeypatch.setitem(sys.modules, name, None)


@needs_triton
def test_preference(monkeypatch: pytest.MonkeyPatch) -> None:
    import flash_attn_stand_in

    assert select.select_backend(MODEL, "cpu") is CPUAttention
    assert select.select_backend(MODEL, "cuda", torch.bfloat16) is TritonAttention
    assert select.select_backend(MODEL, "cuda", requested="triton") is TritonAttention
    monkeypatch.setitem(sys.modules, "flash_attn", flash_attn_stand_in)
    assert select.select_backend(MODEL, "cuda", torch.bfloat16) is TritonAttention
    assert select.select_backend(MODEL, "cuda", torch.bfloat16, requested="flash_attn") is FlashAttention
    assert select.select_backend(MODEL, "cuda", torch.float16, 512, "flash_attn") is FlashAttention


@needs_triton
@pytest.mark.parametrize(
    ("dtype", "block_size", "reason"),
    [
        (torch.float32, None, "flash_attn: dtype is float32, and it computes in float16 and bfloat16 only"),
        (torch.bfloat16, 16, "flash_attn: kvcache_block_size is 16, and it takes multiples of 256 only"),
    ],
)
def test_flash_attn_says_why_not(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, block_size: int | None, reason: str
) -> None:
    import flash_attn_stand_in

    monkeypatch.setitem(sys.modules, "flash_attn", flash_attn_stand_in)
    with pytest.raises(ValueError, match="the requested attention backend cannot run") as caught:
        select.select_backend(MODEL, "cuda", dtype, block_size, "flash_attn")
    assert reason in str(caught.value)


@needs_triton
def test_triton_stores_no_int8() -> None:
    with pytest.raises(ValueError, match="triton: it stores keys and values in the model's dtype only"):
        select.select_backend(MODEL, "cuda", torch.int8, requested="triton")


def test_every_reason_is_reported_where_nothing_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "triton", "flash_attn")
    with pytest.raises(ValueError, match="no attention backend can run this model on 'cuda'") as caught:
        select.select_backend(MODEL, "cuda")
    for part in ("triton: the package triton is not installed", "flash_attn: ", "cpu: it runs on the CPU"):
        assert part in str(caught.value)


def test_attention_backend_must_be_known() -> None:
    with pytest.raises(ValueError, match="attention_backend is 'xformers'; allowed are 'auto', 'triton'"):
        EngineConfig("somewhere", attention_backend="xformers")


def test_each_rank_needs_a_gpu() -> None:
    check_devices(1, 1)
    check_devices(2, 4)
    with pytest.raises(ValueError, match=r"tensor_parallel_size is 4, and torch sees 2 CUDA device\(s\).*CUDA_VISIBLE"):
        check_devices(4, 2)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_takes_its_own_gpu_before_it_meets_the_others(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Mock()
    calls.group.WORLD.rank.return_value, calls.group.WORLD.size.return_value = rank, 2
    monkeypatch.setattr(launch, "dist", calls)
    monkeypatch.setattr(torch.cuda, "set_device", calls.set_device)
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(variable, "eth7")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match="tensor_parallel_size is 2, and torch sees 1"):
        launch.join(rank, 2, "file", "cuda")
    assert not calls.mock_calls
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    groups = launch.join(rank, 2, "file", "cuda")
    assert (groups.tp.rank, groups.tp.size) == (rank, 2) and os.environ["NCCL_SOCKET_IFNAME"].startswith("lo")
    assert calls.mock_calls[:2] == [call.set_device(rank), call.FileStore("file", 2)]
    # However long the others take to load: torch's own limit, 300 s, would be in force at the first collective.
    assert calls.mock_calls[2] == call.FileStore().set_timeout(launch._NEVER)
    assert calls.mock_calls[3][0] == "init_process_group" and calls.init_process_group.call_args.args == ("nccl",)
    assert calls.init_process_group.call_args.kwargs["store"] is calls.FileStore.return_value
    assert calls.init_process_group.call_args.kwargs["rank"] == rank


def test_log_probabilities_come_to_the_host_by_the_tensor_and_not_by_the_number() -> None:
    """Of 64 rows: what is read number by number is a wait for each."""
    logits, rows = torch.randn(64, 50), list(range(64))
    with Devices() as devices:
        row_logprobs(logits, torch.arange(64) % 50, rows, dict.fromkeys(rows, 3), VocabShard())
    assert not [name for name in devices.operators if "local_scalar" in name]
