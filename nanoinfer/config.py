"""Options of the engine and facts about the model, as frozen dataclasses.

`EngineConfig` is what the user asked for and is never written to: what start-up finds out (device, dtype, number of
KV blocks, the length limit) is returned and passed on instead. `ModelConfig` is read from a checkpoint's
`config.json` by our own code, because class defaults and renamed keys in other parsers have given wrong rotary bases
without an error (transformers 5 moved `rope_theta`); every key that shapes the model is required.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DTYPES = ("float32", "bfloat16", "float16")
QUANTIZATIONS = ("int8",)
KV_CACHE_DTYPES = ("auto", "int8")
ATTENTION_BACKENDS = ("auto", "triton", "flash_attn", "cpu")
_DTYPE_ALIASES = {"float": "float32", "half": "float16", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def parse_dtype(value: object) -> str:
    """The canonical name of a dtype given as a string or as a torch.dtype; ValueError if it isn't supported."""
    name = str(value).removeprefix("torch.")
    name = _DTYPE_ALIASES.get(name, name)
    if name not in DTYPES:
        raise ValueError(f"dtype is {value!r}; supported are {', '.join(map(repr, DTYPES))}")
    return name


def _require_int(name: str, value: object, minimum: int, *, optional: bool = False) -> None:
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ValueError(
            f"{name} is {value!r}; it must be an integer of at least {minimum}{' or None' if optional else ''}"
        )


@dataclass(frozen=True)
class EngineConfig:
    """Options of `LLM(model, ...)`. Names and defaults follow vLLM and nano-vllm.

    model: a local directory, or a Hugging Face hub id.
    dtype: "auto" is the checkpoint's; on a CPU without bf16 instructions float32.
    device: "auto", "cpu" or "cuda".
    max_model_len: prompt plus output tokens of one request; None is the model's limit. Lowered (and logged) to what
        the KV pool holds.
    max_num_seqs: sequences that run at once; on a GPU at most 65535.
    max_num_batched_tokens: token budget of one step; None is 8192 on a GPU and 1024 on a CPU.
    gpu_memory_utilization: the fraction of the GPU's memory that weights, a step, CUDA graphs and KV blocks may fill
        together. What CUDA and its libraries hold beside them only has to be free.
    kvcache_block_size: tokens per KV block; None is the attention backend's choice.
    num_kvcache_blocks: None sizes the pool from memory.
    cpu_kvcache_gib: size of the KV pool on a CPU; None is the smaller of 4 GiB and 40 % of the available memory.
    tensor_parallel_size: ranks that share each layer.
    distributed_executor_backend: "uni" runs the only rank in this process, "mp" runs each in a process of its own; None
        is "uni" for one rank and "mp" for several (`AsyncLLM`: "mp" always).
    async_scheduling: a step is planned and sent while the one before runs. None does so on a GPU; True also on a CPU
        whose ranks are processes of their own; False nowhere.
    step_timeout: seconds after which a step that has not come back counts as hung (with several ranks).
    load_timeout: the same for start-up, in seconds.
    enable_prefix_caching: full blocks of earlier requests are reused for equal prefixes.
    enforce_eager: no CUDA graphs on a GPU, and no replay of decode steps on a CPU.
    quantization: None, or "int8": linear layers and the head are quantized when they are loaded (a scale per output
        and per token, symmetric). On a CPU only; fast in bfloat16 with AMX.
    kv_cache_dtype: "auto" (the model's), or "int8": keys and values are stored in int8 with a scale per token and head
        (symmetric), in about half the memory. On a CPU only; fast in bfloat16 with AMX.
    attention_backend: "auto", "triton", "flash_attn" or "cpu"; "auto" is the first that can run the model there.
    load_format: "auto", or "dummy" for seeded random weights (no file but config.json is needed).
    seed: source of the seeds of requests that bring none, and of dummy weights; None draws one, which is logged.
    revision: branch, tag or commit of a hub id.
    """

    model: str
    dtype: str = "auto"
    device: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int | None = None
    gpu_memory_utilization: float = 0.9
    kvcache_block_size: int | None = None
    num_kvcache_blocks: int | None = None
    cpu_kvcache_gib: float | None = None
    enable_prefix_caching: bool = True
    tensor_parallel_size: int = 1
    distributed_executor_backend: str | None = None
    async_scheduling: bool | None = None
    step_timeout: float = 300.0
    load_timeout: float = 1800.0
    enforce_eager: bool = False
    quantization: str | None = None
    kv_cache_dtype: str = "auto"
    attention_backend: str = "auto"
    load_format: str = "auto"
    seed: int | None = None
    revision: str | None = None

    @classmethod
    def create(cls, model: str | Path, **options: Any) -> EngineConfig:
        """Like the constructor, with a hint at the option that was probably meant. Raises TypeError on unknown ones."""
        names = [field.name for field in dataclasses.fields(cls)]
        for name in options:
            if name not in names:
                close = difflib.get_close_matches(name, names, n=1)
                hint = f" (did you mean {close[0]!r}?)" if close else ""
                raise TypeError(f"unknown option {name!r}{hint}; options are {', '.join(names)}")
        return cls(str(model) if isinstance(model, Path) else model, **options)

    def __post_init__(self) -> None:
        if not isinstance(self.model, str) or not self.model:
            raise ValueError(f"model is {self.model!r}; it must be a directory or a Hugging Face hub id")
        if self.dtype != "auto":
            object.__setattr__(self, "dtype", parse_dtype(self.dtype))
        if self.device not in ("auto", "cpu", "cuda"):
            raise ValueError(f"device is {self.device!r}; allowed are 'auto', 'cpu' and 'cuda'")
        if self.distributed_executor_backend not in (None, "uni", "mp"):
            raise ValueError(
                f"distributed_executor_backend is {self.distributed_executor_backend!r}; allowed are 'uni', 'mp' and "
                "None"
            )
        if self.distributed_executor_backend == "uni" and self.tensor_parallel_size != 1:
            raise ValueError(
                f"distributed_executor_backend is 'uni', which is for one rank, and tensor_parallel_size is "
                f"{self.tensor_parallel_size}; use 'mp', or leave it out"
            )
        if self.quantization not in (None, *QUANTIZATIONS):
            raise ValueError(
                f"quantization is {self.quantization!r}; allowed are None and {', '.join(map(repr, QUANTIZATIONS))}"
            )
        if self.kv_cache_dtype not in KV_CACHE_DTYPES:
            raise ValueError(
                f"kv_cache_dtype is {self.kv_cache_dtype!r}; allowed are {', '.join(map(repr, KV_CACHE_DTYPES))}"
            )
        if self.load_format not in ("auto", "dummy"):
            raise ValueError(f"load_format is {self.load_format!r}; allowed are 'auto' and 'dummy'")
        if self.attention_backend not in ATTENTION_BACKENDS:
            allowed = ", ".join(map(repr, ATTENTION_BACKENDS))
            raise ValueError(f"attention_backend is {self.attention_backend!r}; allowed are {allowed}")
        _require_int("max_model_len", self.max_model_len, 2, optional=True)
        _require_int("max_num_seqs", self.max_num_seqs, 1)
        _require_int("max_num_batched_tokens", self.max_num_batched_tokens, 1, optional=True)
        _require_int("kvcache_block_size", self.kvcache_block_size, 1, optional=True)
        _require_int("num_kvcache_blocks", self.num_kvcache_blocks, 1, optional=True)
        _require_int("tensor_parallel_size", self.tensor_parallel_size, 1)
        _require_int("seed", self.seed, 0, optional=True)
        for name in ("enable_prefix_caching", "enforce_eager"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be True or False")
        if self.async_scheduling is not None and not isinstance(self.async_scheduling, bool):
            raise ValueError(f"async_scheduling is {self.async_scheduling!r}; it must be True, False or None")
        _require_positive("gpu_memory_utilization", self.gpu_memory_utilization, 1.0)
        _require_positive("step_timeout", self.step_timeout, math.inf)
        _require_positive("load_timeout", self.load_timeout, math.inf)
        if self.cpu_kvcache_gib is not None:
            _require_positive("cpu_kvcache_gib", self.cpu_kvcache_gib, math.inf)


def _require_positive(name: str, value: object, maximum: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= maximum or value == math.inf:
        limit = "" if maximum == math.inf else f" and at most {maximum}"
        raise ValueError(f"{name} is {value!r}; it must be a number above 0{limit}")


@dataclass(frozen=True)
class SchedulerConfig:
    """What the scheduler needs to know, all of it resolved (no None). `num_blocks` is the least of all ranks."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    num_blocks: int
    block_size: int
    enable_prefix_caching: bool = True


@dataclass(frozen=True)
class YarnScaling:
    """YaRN (Peng et al., 2023, arXiv:2309.00071) as transformers spells it in `config.json`."""

    factor: float
    original_max_position_embeddings: int
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


def heads_of_rank(num_heads: int, num_kv_heads: int, size: int) -> tuple[int, int]:
    """(query heads, KV heads) that each of `size` ranks holds; with more ranks than KV heads, these are replicated.

    Raises ValueError if the heads cannot be shared out evenly.
    """
    if num_heads % size or (num_kv_heads % size and size % num_kv_heads):
        raise ValueError(
            f"tensor_parallel_size {size} does not divide {num_heads} attention and {num_kv_heads} key-value heads"
        )
    return num_heads // size, max(1, num_kv_heads // size)


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a dense Qwen3 checkpoint. `dtype` is None when `config.json` does not state one."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope_theta: float
    yarn: YarnScaling | None
    tie_word_embeddings: bool
    attention_bias: bool
    dtype: str | None
    eos_token_ids: tuple[int, ...]

    @property
    def max_model_len(self) -> int:
        """The longest sequence that the position encoding is made for, in tokens."""
        if self.yarn is None:
            return self.max_position_embeddings
        extended = int(self.yarn.factor * self.yarn.original_max_position_embeddings)
        return max(self.max_position_embeddings, extended)

    def check_tensor_parallel(self, size: int) -> None:
        """Raises ValueError, with the sizes that are possible, if the model cannot be split over `size` ranks."""
        if (reason := self._not_divisible(size)) is not None:
            valid = [n for n in range(1, self.num_attention_heads + 1) if self._not_divisible(n) is None]
            raise ValueError(f"{reason}; possible sizes are {valid}")

    def _not_divisible(self, size: int) -> str | None:
        try:
            heads_of_rank(self.num_attention_heads, self.num_key_value_heads, size)
        except ValueError as error:
            return str(error)
        if self.intermediate_size % size:
            return f"tensor_parallel_size {size} does not divide intermediate_size {self.intermediate_size}"
        return None

    @classmethod
    def from_directory(cls, directory: Path) -> ModelConfig:
        """Parses `directory/config.json`. Raises ValueError if it is missing or isn't a model that we run."""
        path = directory / "config.json"
        if not path.is_file():
            raise ValueError(f"{directory} holds no config.json; it is not a Hugging Face checkpoint")
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except json.JSONDecodeError as error:
            raise ValueError(f"{path} is not valid JSON: {error}") from error
        if not isinstance(raw, dict):
            raise ValueError(f"{path} holds {raw!r}; it must be an object with the model's settings")
        try:
            return cls.from_dict(raw)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> ModelConfig:
        """From the parsed `config.json`, in the spelling of transformers 4 or 5. Raises ValueError."""
        _refuse_unsupported(raw)
        heads, kv_heads = _integer(raw, "num_attention_heads"), _integer(raw, "num_key_value_heads")
        if heads % kv_heads:
            raise ValueError(
                f"num_attention_heads ({heads}) is not a multiple of num_key_value_heads ({kv_heads}), "
                "so query heads cannot share key-value heads evenly"
            )
        head_dim = _integer(raw, "head_dim")
        if head_dim % 2:
            raise ValueError(f"head_dim is {head_dim}; rotary position encoding needs an even number")
        rope_theta, yarn = _parse_rope(raw)
        dtype = raw.get("dtype", raw.get("torch_dtype"))
        return cls(
            vocab_size=_integer(raw, "vocab_size"),
            hidden_size=_integer(raw, "hidden_size"),
            intermediate_size=_integer(raw, "intermediate_size"),
            num_hidden_layers=_integer(raw, "num_hidden_layers"),
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            rms_norm_eps=_number(raw, "rms_norm_eps"),
            max_position_embeddings=_integer(raw, "max_position_embeddings"),
            rope_theta=rope_theta,
            yarn=yarn,
            tie_word_embeddings=_boolean(raw, "tie_word_embeddings"),
            attention_bias=_boolean(raw, "attention_bias"),
            dtype=None if dtype is None else parse_dtype(dtype),
            eos_token_ids=token_id_list(raw.get("eos_token_id")),
        )


def token_id_list(value: object) -> tuple[int, ...]:
    """`eos_token_id` is null, one integer or a list of them, depending on the file and the model."""
    values = [] if value is None else value if isinstance(value, (list, tuple)) else [value]
    if not all(isinstance(v, int) and not isinstance(v, bool) for v in values):
        raise ValueError(f"eos_token_id is {value!r}; it must be an integer, a list of integers or null")
    return tuple(values)


def _require(raw: Mapping[str, Any], key: str) -> Any:
    if raw.get(key) is None:
        raise ValueError(
            f"the key {key!r} is missing; Qwen3 checkpoints state it, and no default is right for all sizes"
        )
    return raw[key]


def _integer(raw: Mapping[str, Any], key: str) -> int:
    value = _require(raw, key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{key} is {value!r}; it must be a positive integer")
    return value


def _number(raw: Mapping[str, Any], key: str) -> float:
    value = _require(raw, key)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ValueError(f"{key} is {value!r}; it must be a positive number")
    return float(value)


def _boolean(raw: Mapping[str, Any], key: str) -> bool:
    value = _require(raw, key)
    if not isinstance(value, bool):
        raise ValueError(f"{key} is {value!r}; it must be true or false")
    return value


def _refuse_unsupported(raw: Mapping[str, Any]) -> None:
    architectures = raw.get("architectures") or []
    if raw.get("model_type") != "qwen3" or any(name != "Qwen3ForCausalLM" for name in architectures):
        raise ValueError(
            f"architectures is {architectures} and model_type {raw.get('model_type')!r}; "
            "only dense Qwen3 ('Qwen3ForCausalLM', 'qwen3') is implemented"
        )
    for key in ("quantization_config", "compression_config"):
        if raw.get(key) is not None:
            method = raw[key].get("quant_method", raw[key]) if isinstance(raw[key], Mapping) else raw[key]
            raise ValueError(
                f"{key} names the format {method!r}, which is not implemented; use the unquantized checkpoint"
            )
    if _require(raw, "hidden_act") != "silu":
        raise ValueError(f"hidden_act is {raw['hidden_act']!r}; only 'silu' is implemented")
    layer_types = raw.get("layer_types")
    if layer_types is not None:
        windowed = any(kind != "full_attention" for kind in layer_types)
    else:
        windowed = raw.get("sliding_window") is not None and (raw.get("max_window_layers") or 0) < _integer(
            raw, "num_hidden_layers"
        )
    if windowed and raw.get("use_sliding_window"):
        raise ValueError(
            f"use_sliding_window is true (sliding_window {raw.get('sliding_window')!r}); "
            "sliding-window attention is not implemented"
        )


def _parse_rope(raw: Mapping[str, Any]) -> tuple[float, YarnScaling | None]:
    """(rope_theta, scaling) from transformers 4's `rope_theta` + `rope_scaling` or 5's `rope_parameters`."""
    parameters = raw.get("rope_parameters") or {}
    scaling = raw.get("rope_scaling") or {}
    for key, value in (("rope_parameters", parameters), ("rope_scaling", scaling)):
        if not isinstance(value, Mapping):
            raise ValueError(f"{key} is {value!r}; it must be an object or null")
    stated: list[float] = [
        _number(source, "rope_theta") for source in (raw, parameters, scaling) if source.get("rope_theta") is not None
    ]
    if not stated:
        _require(raw, "rope_theta")
    if len(set(stated)) > 1:
        raise ValueError(f"rope_theta is stated as {' and as '.join(map(str, stated))}; which one is meant is unclear")

    options = {**parameters, **scaling}
    options.pop("rope_theta", None)
    kinds = {options.pop(key) for key in ("rope_type", "type") if options.get(key) is not None} or {"default"}
    if len(kinds) > 1:
        raise ValueError(f"the rope scaling is called {' and '.join(sorted(map(repr, kinds)))} at once")
    kind = kinds.pop()
    if kind not in ("default", "yarn"):
        raise ValueError(f"rope scaling {kind!r} is not implemented; 'default' and 'yarn' are")
    options = {key: value for key, value in options.items() if value is not None}
    if options.pop("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError("partial_rotary_factor other than 1 is not implemented")
    if kind == "default":
        # A factor beside "default" would be scaling that nobody applies.
        if options:
            raise ValueError(f"rope parameters {sorted(options)} are given without a rope_type that uses them")
        return stated[0], None
    options.setdefault("original_max_position_embeddings", _integer(raw, "max_position_embeddings"))
    known = {field.name for field in dataclasses.fields(YarnScaling)}
    if unknown := sorted(set(options) - known):
        raise ValueError(f"the yarn rope scaling has unknown keys {unknown}; known are {sorted(known)}")
    for key in ("factor", "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim"):
        if key == "factor" or key in options:
            _number(options, key)
    if options["factor"] < 1:
        raise ValueError(f"the yarn factor is {options['factor']}; it must be at least 1")
    _integer(options, "original_max_position_embeddings")
    return stated[0], YarnScaling(**options)
