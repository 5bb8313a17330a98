"""`ModelRunner`: one rank. Loads its part of the model, owns its KV cache, and runs the steps that the plans describe.

Made by an executor, in this order: construct (loads the weights), `capacity()`, `allocate(...)`, then per step
`launch(plan)`. On a CPU that runs it; on a GPU it is on its way then, and further steps may be launched behind it.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch

from nanoinfer.attention.base import ForwardBatch, KVCache
from nanoinfer.attention.select import BACKENDS, select_backend
from nanoinfer.config import EngineConfig, ModelConfig, SchedulerConfig, heads_of_rank
from nanoinfer.distributed.group import ParallelGroups
from nanoinfer.kernels.cpu.memory import Workspace
from nanoinfer.kernels.cpu.ops import kernels_for
from nanoinfer.layers.linear import int8_kernels
from nanoinfer.layers.sampler import SamplingBatch, VocabShard, checked, sample, token_logprobs
from nanoinfer.models.loader import load_dummy_weights, load_weights, open_checkpoint
from nanoinfer.models.qwen3 import Qwen3ForCausalLM
from nanoinfer.step import KVCacheCapacity, SchedulerOutput, StepResult, TokenLogprobs
from nanoinfer.worker.cuda_graph import DecodeGraphs, graph_factory, graph_sizes
from nanoinfer.worker.decode_replay import DecodeReplay, make_logits_memory, make_replay, make_workspace
from nanoinfer.worker.device_runner import DeviceRunner
from nanoinfer.worker.download import Download
from nanoinfer.worker.gpu_memory import (
    GPUMemory,
    graph_bytes,
    num_gpu_blocks,
    run_largest_step,
    told_when_out_of_memory,
)
from nanoinfer.worker.input_batch import InputBatch, PromptPart, StepRows
from nanoinfer.worker.kv_cache import available_memory, num_cpu_blocks, return_freed_memory

logger = logging.getLogger(__name__)

# Rows whose logits are computed at once for prompt logprobs.
_PROMPT_ROWS = 32
_DEFAULT_BATCHED_TOKENS = {"cpu": 1024, "cuda": 8192}
# CUDA's limit on the last dimension of a grid, which is the sequence in decode attention's.
MAX_GPU_SEQS = 65535


class LaunchedStep:
    """A step that has been launched.

    result: of it, but for the tokens of `seq_ids` that `tokens` will bring.
    """

    def __init__(self, result: StepResult, seq_ids: Sequence[int] = (), tokens: Download | None = None) -> None:
        self._result, self._seq_ids, self._tokens = result, seq_ids, tokens

    def is_over(self) -> bool:
        return self._tokens is None or self._tokens.is_over()

    def result(self) -> StepResult:
        """Waits for it. Raises FloatingPointError if its logits were not finite."""
        if self._tokens is not None:
            self._result.token_ids.update(_by_sequence(self._seq_ids, checked(self._tokens.tolist())))
        return self._result


def _by_sequence(seq_ids: Sequence[int], token_ids: list[int]) -> dict[int, list[int]]:
    return {seq_id: [token_id] for seq_id, token_id in zip(seq_ids, token_ids, strict=True)}


class ModelRunner:
    def __init__(
        self, config: EngineConfig, model_config: ModelConfig, model_dir: Path, seed: int, groups: ParallelGroups
    ) -> None:
        self.config = config
        self.model_config = model_config
        self.device = resolve_device(config.device, model_config)
        checkpoint = None if config.load_format == "dummy" else open_checkpoint(model_dir)
        stored = model_config.dtype or (checkpoint.dtype() if checkpoint else "bfloat16")
        self.dtype = resolve_dtype(config.dtype, stored, self.device, cpu_has_bf16())
        self.kv_dtype = torch.int8 if config.kv_cache_dtype == "int8" else self.dtype
        check_int8(config, self.dtype, self.device, is_first_rank=groups.tp.rank == 0)
        check_num_seqs(config, self.device)
        if self.device == "cuda":
            # What an engine before this one in the same process has left is given back; what the process holds beside
            # is not ours.
            gc.collect()
            torch.cuda.empty_cache()
            self._reserved_at_start = torch.cuda.memory_reserved()
        backend_class = select_backend(
            model_config, self.device, self.kv_dtype, config.kvcache_block_size, config.attention_backend
        )
        num_heads, num_kv_heads = heads_of_rank(
            model_config.num_attention_heads, model_config.num_key_value_heads, groups.tp.size
        )
        self.backend = backend_class(num_heads, num_kv_heads, model_config.head_dim)
        self.block_size = config.kvcache_block_size or self.backend.default_block_size
        with torch.inference_mode(), told_when_out_of_memory("the weights"):
            self.model = Qwen3ForCausalLM(model_config, self.backend, groups, self.dtype, self.device)
            if checkpoint is None:
                load_dummy_weights(self.model, seed)
            else:
                load_weights(self.model, checkpoint, show_progress=groups.tp.rank == 0)
            self.model.pack(config.quantization)
        return_freed_memory()
        self._vocab_shard = VocabShard(groups.tp, self.model.lm_head.first_id)
        self._kv_cache: KVCache | None = None
        self._workspace: Workspace | None = None
        self._logits_memory: Workspace | None = None
        self._replay: DecodeReplay | None = None
        self._batch: InputBatch | None = None
        self._device_runner: DeviceRunner | None = None

    def capacity(self) -> KVCacheCapacity:
        """What this rank can offer, now that its weights are in memory."""
        bytes_per_block = self.backend.bytes_per_block(
            self.model_config.num_hidden_layers, self.block_size, self.kv_dtype
        )
        num_tokens = self.config.max_num_batched_tokens or _DEFAULT_BATCHED_TOKENS[self.device]
        if self.device == "cuda":
            with told_when_out_of_memory("the largest step"):
                memory = self._measure_memory(num_tokens)
            num_blocks = num_gpu_blocks(self.config, bytes_per_block, memory)
        else:
            num_blocks = num_cpu_blocks(self.config, bytes_per_block, available_memory())
        return KVCacheCapacity(
            num_blocks=num_blocks,
            block_size=self.block_size,
            bytes_per_block=bytes_per_block,
            max_num_batched_tokens=num_tokens,
            device=self.device,
            dtype=str(self.dtype).removeprefix("torch."),
            num_threads=torch.get_num_threads(),
        )

    def allocate(self, limits: SchedulerConfig) -> None:
        """Allocates the pool and the rows, in the size that all ranks agreed on, and captures graphs over them."""
        with told_when_out_of_memory("the KV cache and the CUDA graphs"):
            self._allocate(limits)

    def _allocate(self, limits: SchedulerConfig) -> None:
        self._kv_cache = self.backend.allocate(
            self.model_config.num_hidden_layers,
            limits.num_blocks,
            limits.block_size,
            self.dtype,
            self.device,
            self.kv_dtype,
        )
        if kernels_for(self.dtype, self.device) is not None:
            self._workspace = make_workspace(self.model_config, self.dtype, limits)
            self._logits_memory = make_logits_memory(self.model_config, self.dtype, limits)
            memory = (self._workspace, self._logits_memory)
            if not self.config.enforce_eager and self.config.tensor_parallel_size == 1:
                with torch.inference_mode():
                    self._replay = make_replay(self.model, self.backend, self.kv_cache, *memory, limits)
        self._batch = InputBatch(
            limits.max_num_seqs, limits.max_model_len, limits.block_size, self.model_config.vocab_size
        )
        if not self.backend.supports_cuda_graph:
            return
        self._device_runner = self._make_device_runner(limits, self._kv_cache)
        if (make_graph := graph_factory(self.device, self.config.enforce_eager)) is not None:
            graphs = DecodeGraphs(
                self._device_runner.decode, graph_sizes(limits.max_num_seqs), torch.device(self.device), make_graph
            )
            with torch.inference_mode():
                graphs.capture(show_progress=self._vocab_shard.tp.rank == 0)
            self._device_runner.graphs = graphs

    def _make_device_runner(self, limits: SchedulerConfig, kv_cache: KVCache) -> DeviceRunner:
        device = torch.device(self.device)
        return DeviceRunner(self.model, self.backend, kv_cache, limits, self._vocab_shard, device)

    @torch.inference_mode()
    def _measure_memory(self, max_num_batched_tokens: int) -> GPUMemory:
        """Runs the largest step and captures two graphs over a pool of one block, which nothing is written to."""
        limits = SchedulerConfig(
            max_num_seqs=self.config.max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=self.config.max_model_len or self.model_config.max_model_len,
            num_blocks=1,
            block_size=self.block_size,
        )
        layers = self.model_config.num_hidden_layers
        kv_cache = self.backend.allocate(layers, 1, self.block_size, self.dtype, self.device)
        kv_cache.data.zero_()
        runner = self._make_device_runner(limits, kv_cache)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        reserved = torch.cuda.memory_reserved()
        run_largest_step(runner)
        torch.cuda.synchronize()
        # What the allocator took from the card, not what it handed out: the rest of its segments is no one else's.
        activations = torch.cuda.max_memory_reserved() - reserved
        torch.cuda.empty_cache()
        graphs = 0
        if (make_graph := graph_factory(self.device, self.config.enforce_eager)) is not None:
            graphs = graph_bytes(runner, make_graph, _free_and_reserved, limits.max_num_seqs)
        del runner, kv_cache
        gc.collect()
        free, reserved = _free_and_reserved()
        total = torch.cuda.mem_get_info()[1]
        return GPUMemory(total, reserved - self._reserved_at_start, free, activations, graphs)

    @property
    def kv_cache(self) -> KVCache:
        """The pool of keys and values; there once `allocate` has run."""
        assert self._kv_cache is not None, "kv_cache before allocate"
        return self._kv_cache

    @property
    def runs_ahead(self) -> bool:
        """Whether a step may still run when `launch` has returned. Known once `allocate` has run."""
        return self._device_runner is not None

    def step(self, plan: SchedulerOutput) -> StepResult:
        return self.launch(plan).result()

    @torch.inference_mode()
    def launch(self, plan: SchedulerOutput) -> LaunchedStep:
        """Starts one plan. After an exception the rows are uncertain: the next plan must set `forget_all`."""
        assert self._batch is not None, "launch before allocate"
        self._batch.apply(plan)
        if not plan.num_scheduled_tokens:
            return LaunchedStep(StepResult())
        token_ids: list[int] | None
        if self._device_runner is not None:
            rows, download, logprobs, hidden = self._device_runner.launch(plan, self._batch)
            token_ids = None
            if self._batch.needs_tokens(rows):
                token_ids = checked(download.tolist())
        else:
            rows, token_ids, logprobs, hidden = self._run(plan, self._batch)
        self._batch.commit(rows, token_ids)
        seq_ids = [rows.seq_ids[position] for position in rows.sampled.tolist()]
        result = StepResult(logprobs={seq_ids[i]: [entry] for i, entry in logprobs.items()})
        for part in rows.prompts:
            assert hidden is not None
            result.prompt_logprobs[part.seq_id] = self._prompt_logprobs(hidden, part)
        if token_ids is None:
            return LaunchedStep(result, seq_ids, download)
        result.token_ids.update(_by_sequence(seq_ids, token_ids))
        return LaunchedStep(result)

    def _run(
        self, plan: SchedulerOutput, batch: InputBatch
    ) -> tuple[StepRows, list[int], dict[int, TokenLogprobs], torch.Tensor | None]:
        """On a CPU: the step's rows, tokens and log-probabilities as `sample` gives them, and hidden states."""
        if self._replay is not None and (step := batch.decodes(plan)) is not None:
            self._replay.load(step.rows, batch.decode_columns(), step.longest)
            if batch.is_plain(step):
                return step, self._replay.tokens(), {}, None
            logits = self.compute_logits(self._replay.hidden(), None)
            return step, *self.sample(logits, batch.sampling(step)), None
        step, inputs = batch.build(plan)
        inputs.plan = self.backend.plan(inputs, self.block_size)
        hidden = self.forward(inputs)
        logits = self.compute_logits(hidden, inputs.logits_indices)
        token_ids, logprobs = self.sample(logits, batch.sampling(step)) if len(step.sampled) else ([], {})
        return step, token_ids, logprobs, hidden

    def _results_in(self, workspace: Workspace | None) -> AbstractContextManager[None]:
        """Where what the kernels compute goes: it is valid until the workspace is asked for again."""
        kernels = kernels_for(self.dtype, self.device)
        return nullcontext() if kernels is None or workspace is None else kernels.using(workspace)

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Hidden states of all of the step's tokens, whose keys and values are stored."""
        with self._results_in(self._workspace):
            return self.model(batch, self.kv_cache)

    def compute_logits(self, hidden: torch.Tensor, indices: torch.Tensor | None) -> torch.Tensor:
        """This rank's logits of some of the tokens (None: of all), valid until others are computed."""
        if self._logits_memory is not None:
            self._logits_memory.restart()
        with self._results_in(self._logits_memory):
            return self.model.compute_logits(hidden, indices)

    def _prompt_logprobs(self, hidden: torch.Tensor, part: PromptPart) -> list[TokenLogprobs]:
        """A few rows at a time: logits of a whole prompt would be gigabytes."""
        found: list[TokenLogprobs] = []
        chunks = zip(part.indices.split(_PROMPT_ROWS), part.token_ids.split(_PROMPT_ROWS), strict=True)
        for indices, token_ids in chunks:
            logits = self.compute_logits(hidden, indices.to(hidden.device))
            found += token_logprobs(logits, token_ids.to(hidden.device), part.num_best, self._vocab_shard)
        return found

    def sample(self, logits: torch.Tensor, sampling: SamplingBatch) -> tuple[list[int], dict[int, TokenLogprobs]]:
        return sample(logits, sampling, self._vocab_shard)


def _free_and_reserved() -> tuple[int, int]:
    """Bytes that the card has free, for anybody, and that torch's allocator has of it, once it has given back what it
    keeps for later, such as what a graph's first run took."""
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0], torch.cuda.memory_reserved()


def resolve_device(requested: str, model_config: ModelConfig) -> str:
    """ "auto" is the GPU where there is one and a backend for it, else the CPU (said in the log)."""
    if requested != "auto":
        if requested == "cuda" and not torch.cuda.is_available():
            raise ValueError("device is 'cuda', but torch finds no usable CUDA device; use device='cpu'")
        return requested
    if not torch.cuda.is_available():
        return "cpu"
    if all(backend.rejects(model_config, "cuda") for backend in BACKENDS):
        logger.warning("there is a GPU, but no attention backend for it; running on the CPU")
        return "cpu"
    return "cuda"


def resolve_dtype(requested: str, stored: str, device: str, has_bf16: bool) -> torch.dtype:
    """ "auto" is the checkpoint's, except that bfloat16 is emulated slowly on a CPU without it: float32 there."""
    name = stored if requested == "auto" else requested
    if requested == "auto" and name == "bfloat16" and device == "cpu" and not has_bf16:
        logger.warning("this CPU has no bfloat16 instructions; using dtype float32 (twice the memory)")
        name = "float32"
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]


def check_int8(config: EngineConfig, dtype: torch.dtype, device: str, *, is_first_rank: bool) -> None:
    """Raises ValueError where int8 cannot run; says in the log where it runs without its kernels."""
    for option, default in (("quantization", None), ("kv_cache_dtype", "auto")):
        value = getattr(config, option)
        if value == default:
            continue
        if device != "cpu":
            raise ValueError(
                f"{option} is {value!r}, which runs on a CPU only for now, and the device is {device!r}; "
                f"leave {option} out, or use device='cpu'"
            )
        if is_first_rank and int8_kernels(dtype, device) is None:
            logger.warning(
                "%s %r runs on stock torch here: its kernel needs dtype bfloat16 (this is %s), a processor with "
                "AMX_INT8 and a C++ compiler; it saves memory, but steps may take longer than without it",
                option,
                value,
                str(dtype).removeprefix("torch."),
            )


def check_num_seqs(config: EngineConfig, device: str) -> None:
    if device == "cuda" and config.max_num_seqs > MAX_GPU_SEQS:
        raise ValueError(f"max_num_seqs is {config.max_num_seqs}; on a GPU it must be at most {MAX_GPU_SEQS}")


def cpu_has_bf16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether the processor multiplies bfloat16 natively (x86: AVX512_BF16 or AMX_BF16; ARM: bf16)."""
    if not cpuinfo.is_file():
        return False
    for line in cpuinfo.read_text().splitlines():
        if line.lower().startswith(("flags", "features")):
            return bool({"avx512_bf16", "amx_bf16", "bf16"} & set(line.split(":", 1)[1].split()))
    return False
