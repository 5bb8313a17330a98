"""`config.json` in, a `ModelConfig` out, by our own code: every dense Qwen3 in both spellings, equal to transformers'
reading of it, and a sentence that names what is not supported. Then the engine's own options.
"""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import kit
import pytest
import torch
from kit import checkpoint, make_llm
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from nanoinfer.config import EngineConfig, ModelConfig, YarnScaling, parse_dtype
from nanoinfer.layers.rotary import RotaryEmbedding

COMMON: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 151643,
    "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "initializer_range": 0.02,
    "max_position_embeddings": 40960, "model_type": "qwen3", "num_key_value_heads": 8, "rms_norm_eps": 1e-06,
    "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None, "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0", "use_cache": True, "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
# hidden, intermediate, layers, query heads, tied; the published sizes.
SIZES: dict[str, tuple[int, int, int, int, bool]] = {
    "Qwen3-0.6B": (1024, 3072, 28, 16, True),
    "Qwen3-1.7B": (2048, 6144, 28, 16, True),
    "Qwen3-4B": (2560, 9728, 36, 32, True),
    "Qwen3-8B": (4096, 12288, 36, 32, False),
    "Qwen3-14B": (5120, 17408, 40, 40, False),
    "Qwen3-32B": (5120, 25600, 64, 64, False),
}
YARN = {"factor": 4.0, "original_max_position_embeddings": 32768}


def raw_config(size: str = "Qwen3-0.6B", **changes: Any) -> dict[str, Any]:
    """transformers 4's spelling. A change to `...` removes the key."""
    hidden, inner, layers, heads, tied = SIZES[size]
    raw = {
        **COMMON, "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers,
        "max_window_layers": layers, "num_attention_heads": heads, "tie_word_embeddings": tied, **changes,
    }  # fmt: skip
    return {key: value for key, value in raw.items() if value is not ...}


def respelled(raw: dict[str, Any]) -> dict[str, Any]:
    """The same in transformers 5's spelling: what the installed transformers writes for it."""
    new = json.loads(Qwen3Config(**raw).to_json_string(use_diff=False))
    assert "rope_parameters" in new and "rope_theta" not in new and "torch_dtype" not in new
    new["architectures"] = raw.get("architectures")
    return new


def rotary_of(raw: dict[str, Any]) -> tuple[RotaryEmbedding, Qwen3RotaryEmbedding]:
    ours = RotaryEmbedding(ModelConfig.from_dict(raw), {"dtype": torch.float32, "device": "cpu"})
    return ours, Qwen3RotaryEmbedding(Qwen3Config(**raw))


def assert_same_rotation(raw: dict[str, Any]) -> None:
    ours, theirs = rotary_of(raw)
    positions = torch.tensor([0, 1, 5, 1000, 32767, 32768, 40959, 131071])
    torch.testing.assert_close(ours.inv_freq, theirs.inv_freq, rtol=1e-6, atol=0)
    cos, sin = ours(positions)
    their_cos, their_sin = theirs(torch.zeros(1), positions.unsqueeze(0))
    half = raw["head_dim"] // 2
    # At position 131071 an angle's last bit in float32 is 0.008.
    torch.testing.assert_close(cos, their_cos[0, :, :half], rtol=0, atol=2e-2)
    torch.testing.assert_close(sin, their_sin[0, :, :half], rtol=0, atol=2e-2)
    torch.testing.assert_close(cos[:4], their_cos[0, :4, :half], rtol=0, atol=2e-4)


# --- The family --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("spelling", [4, 5])
def test_every_dense_size_parses_in_both_spellings(size: str, spelling: int) -> None:
    hidden, inner, layers, heads, tied = SIZES[size]
    raw = raw_config(size)
    config = ModelConfig.from_dict(raw if spelling == 4 else respelled(raw))
    assert config == ModelConfig(
        vocab_size=151936, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=8, head_dim=128, rms_norm_eps=1e-6,
        max_position_embeddings=40960, rope_theta=1e6, yarn=None, tie_word_embeddings=tied, attention_bias=False,
        dtype="bfloat16", eos_token_ids=(151645,),
    )  # fmt: skip
    assert config.max_model_len == 40960
    assert_same_rotation(raw)


@pytest.mark.parametrize("spelling", [4, 5])
def test_the_2507_models_and_the_base_models_parse(spelling: int) -> None:
    raw = raw_config("Qwen3-4B", max_position_embeddings=262144, rope_theta=5000000)
    config = ModelConfig.from_dict(raw if spelling == 4 else respelled(raw))
    assert (config.rope_theta, config.max_model_len) == (5e6, 262144)
    assert_same_rotation(raw)
    raw = raw_config("Qwen3-8B", max_position_embeddings=32768, eos_token_id=151643)
    config = ModelConfig.from_dict(raw if spelling == 4 else respelled(raw))
    assert (config.eos_token_ids, config.max_model_len) == ((151643,), 32768)


@pytest.mark.parametrize("theta", [1000000, 12345.0, 10000])
def test_the_rotary_base_is_read_wherever_it_stands(theta: float) -> None:
    places: list[dict[str, Any]] = [
        {"rope_theta": theta},
        {"rope_theta": ..., "rope_parameters": {"rope_type": "default", "rope_theta": theta}, "rope_scaling": ...},
        {"rope_theta": theta, "rope_parameters": {"rope_type": "default", "rope_theta": theta}},
        {"rope_theta": ..., "rope_parameters": {"rope_theta": theta}},
        {"rope_theta": theta, "rope_parameters": None},
    ]
    for place in places:
        raw = raw_config(**place)
        assert ModelConfig.from_dict(raw).rope_theta == theta
        expected = 1.0 / theta ** (torch.arange(0, 128, 2, dtype=torch.float32) / 128)
        torch.testing.assert_close(rotary_of(raw)[0].inv_freq, expected)


def test_no_rotary_base_or_two_of_them_are_refused() -> None:
    with pytest.raises(ValueError, match="rope_theta"):
        ModelConfig.from_dict(raw_config(rope_theta=...))
    with pytest.raises(ValueError, match="rope_theta"):
        ModelConfig.from_dict(raw_config(rope_theta=..., rope_parameters={"rope_type": "default"}))
    with pytest.raises(ValueError, match=r"rope_theta.*10000.*1000000"):
        ModelConfig.from_dict(raw_config(rope_theta=10000, rope_parameters={"rope_theta": 1000000}))


YARN_SPELLINGS: list[dict[str, Any]] = [
    {"rope_scaling": {"rope_type": "yarn", **YARN}},
    {"rope_scaling": {"type": "yarn", **YARN}},
    {"rope_scaling": {"type": "yarn", "rope_type": "yarn", **YARN}},
    {"rope_theta": ..., "rope_scaling": ..., "rope_parameters": {"rope_type": "yarn", "rope_theta": 1000000, **YARN}},
    {"rope_theta": ..., "rope_scaling": None, "rope_parameters": {"type": "yarn", "rope_theta": 1000000, **YARN}},
]


@pytest.mark.parametrize("place", YARN_SPELLINGS, ids=range(len(YARN_SPELLINGS)))
@pytest.mark.parametrize("max_positions", [40960, 32768, 131072])
def test_yarn_parses_in_every_spelling_and_turns_as_transformers_does(
    place: dict[str, Any], max_positions: int
) -> None:
    raw = raw_config(max_position_embeddings=max_positions, **place)
    config = ModelConfig.from_dict(raw)
    assert config.yarn == YarnScaling(factor=4.0, original_max_position_embeddings=32768)
    assert config.rope_theta == 1e6 and config.max_model_len == 131072
    ours, theirs = rotary_of(raw_config(max_position_embeddings=max_positions, **YARN_SPELLINGS[0]))
    mine = rotary_of(raw)[0]
    torch.testing.assert_close(mine.inv_freq, theirs.inv_freq, rtol=1e-6, atol=0)
    assert mine.amplitude == ours.amplitude == pytest.approx(theirs.attention_scaling)
    assert mine.amplitude == pytest.approx(0.1 * math.log(4.0) + 1.0)


@pytest.mark.parametrize(
    "options",
    [
        {"attention_factor": 1.25}, {"attention_factor": 1.0}, {"beta_fast": 16.0}, {"beta_slow": 2.0},
        {"beta_fast": 64, "beta_slow": 4}, {"mscale": 0.7, "mscale_all_dim": 1.2}, {"mscale": 0.7},
        {"truncate": False}, {"truncate": True}, {"factor": 1.5}, {"factor": 1.0},
        {"original_max_position_embeddings": 4096}, {"attention_factor": None},
        {"original_max_position_embeddings": 100},
    ],
    ids=str,
)  # fmt: skip
def test_options_of_yarn_mean_what_they_mean_in_transformers(options: dict[str, Any]) -> None:
    for theta in (1000000, 10000):
        raw = raw_config(rope_theta=theta, rope_scaling={"rope_type": "yarn", **YARN, **options})
        assert_same_rotation(raw)
        ours, theirs = rotary_of(raw)
        assert ours.amplitude == pytest.approx(theirs.attention_scaling)


def test_yarn_without_its_original_length_extends_the_stated_one() -> None:
    raw = raw_config(max_position_embeddings=32768, rope_scaling={"rope_type": "yarn", "factor": 2.0})
    config = ModelConfig.from_dict(raw)
    assert config.yarn is not None and config.yarn.original_max_position_embeddings == 32768
    assert config.max_model_len == 65536
    assert_same_rotation(raw)


def test_head_dim_is_its_own_key_and_not_a_quotient() -> None:
    config = ModelConfig.from_dict(raw_config())
    assert config.head_dim == 128 != config.hidden_size // config.num_attention_heads
    with pytest.raises(ValueError, match="head_dim"):
        ModelConfig.from_dict(raw_config(head_dim=...))
    with pytest.raises(ValueError, match="head_dim"):
        ModelConfig.from_dict(raw_config(head_dim=None))


# --- What is refused ---------------------------------------------------------------------------------------------

REQUIRED = [
    "architectures or model_type", "attention_bias", "head_dim", "hidden_act", "hidden_size", "intermediate_size",
    "max_position_embeddings", "num_attention_heads", "num_hidden_layers", "num_key_value_heads", "rms_norm_eps",
    "rope_theta", "tie_word_embeddings", "vocab_size",
]  # fmt: skip


@pytest.mark.parametrize("key", REQUIRED[1:])
@pytest.mark.parametrize("absence", [..., None])
def test_each_key_that_shapes_the_model_is_required_by_name(key: str, absence: Any) -> None:
    with pytest.raises(ValueError, match=key):
        ModelConfig.from_dict(raw_config(**{key: absence}))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}, "Llama"),
        ({"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}, "Qwen3Moe"),
        ({"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}, "Qwen2"),
        ({"architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next"}, "Qwen3Next"),
        ({"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5"}, "qwen3_5"),
        ({"architectures": ["Qwen3ForSequenceClassification"]}, "Qwen3ForSequenceClassification"),
        ({"model_type": "gemma3"}, "gemma3"), ({"model_type": "qwen2", "architectures": None}, "qwen2"),
        ({"model_type": ...}, "model_type"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "linear"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "llama3"),
        ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0]}}, "longrope"),
        ({"rope_scaling": {"mrope_section": [16, 24, 24], "type": "mrope"}}, "mrope"),
        ({"rope_theta": ..., "rope_parameters": {"rope_type": "llama3", "rope_theta": 1e6, "factor": 8.0}}, "llama3"),
        ({"rope_scaling": {"factor": 4.0}}, "factor"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "factor"),
        ({"rope_scaling": {"rope_type": "yarn", "type": "linear", "factor": 2.0}}, "linear"),
        ({"rope_scaling": {"rope_type": "yarn", **YARN, "factor": 0}}, "factor"),
        ({"rope_scaling": {"rope_type": "yarn", **YARN, "factor": "4"}}, "factor"),
        ({"rope_scaling": {"rope_type": "yarn", **YARN, "short_mscale": 1}}, "short_mscale"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1000000, "partial_rotary_factor": 0.5}},
         "partial_rotary_factor"),
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}, "fp8"),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "awq"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 10}, "sliding"),
        ({"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": ...}, "sliding"),
        ({"use_sliding_window": True, "sliding_window": 512,
          "layer_types": ["full_attention"] * 27 + ["sliding_attention"]}, "sliding"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"num_attention_heads": 15}, "15"),
        ({"head_dim": 127}, "127"),
        ({"hidden_size": 0}, "hidden_size"), ({"hidden_size": -4}, "hidden_size"),
        ({"hidden_size": 1024.0}, "hidden_size"), ({"hidden_size": "1024"}, "hidden_size"),
        ({"vocab_size": True}, "vocab_size"), ({"rms_norm_eps": 0}, "rms_norm_eps"),
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps"), ({"rope_theta": -1}, "rope_theta"),
        ({"rope_theta": math.inf}, "rope_theta"), ({"tie_word_embeddings": 1}, "tie_word_embeddings"),
        ({"attention_bias": "false"}, "attention_bias"), ({"torch_dtype": "float64"}, "float64"),
        ({"torch_dtype": "int8"}, "int8"), ({"eos_token_id": "151645"}, "eos_token_id"),
        ({"eos_token_id": [1, None]}, "eos_token_id"),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_not_supported_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        ModelConfig.from_dict(raw_config(**changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"sliding_window": 4096, "use_sliding_window": False},
        {"use_sliding_window": True, "sliding_window": None},
        {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 28},
        {"layer_types": ["full_attention"] * 28},
        {"quantization_config": None},
        {"rope_scaling": {}},
        {"rope_scaling": {"rope_type": "default"}},
        {"unknown_key": {"a": 1}},
        {"torch_dtype": ...},
        {"eos_token_id": None},
        {"architectures": None},
    ],
    ids=str,
)
def test_what_changes_nothing_is_accepted(changes: dict[str, Any]) -> None:
    config = ModelConfig.from_dict(raw_config(**changes))
    exempt = {"dtype", "eos_token_ids"}
    expected = ModelConfig.from_dict(raw_config())
    for field in dataclasses.fields(ModelConfig):
        if field.name not in exempt:
            assert getattr(config, field.name) == getattr(expected, field.name)


@pytest.mark.parametrize(
    ("value", "expected"), [(None, ()), (3, (3,)), ([3, 4], (3, 4)), ([], ()), ([151645, 151643], (151645, 151643))]
)
def test_end_of_sequence_ids_are_one_several_or_none(value: Any, expected: tuple[int, ...]) -> None:
    assert ModelConfig.from_dict(raw_config(eos_token_id=value)).eos_token_ids == expected


def test_the_dtype_is_read_in_both_spellings() -> None:
    assert ModelConfig.from_dict(raw_config(torch_dtype="float16")).dtype == "float16"
    assert ModelConfig.from_dict(raw_config(torch_dtype=..., dtype="float32")).dtype == "float32"
    assert ModelConfig.from_dict(raw_config(torch_dtype=...)).dtype is None


def test_the_file_is_named_when_it_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"{tmp_path}.*config\.json"):
        ModelConfig.from_directory(tmp_path)
    path = tmp_path / "config.json"
    for text in ("", "{", '{"model_type": "qwen3",}'):
        path.write_text(text)
        with pytest.raises(ValueError, match=str(path)):
            ModelConfig.from_directory(tmp_path)
    path.write_text(json.dumps(raw_config(vocab_size=...)))
    with pytest.raises(ValueError, match=rf"{path}.*vocab_size"):
        ModelConfig.from_directory(tmp_path)


@pytest.mark.parametrize("text", ["[]", "3", "null", '"qwen3"'])
def test_a_file_that_is_no_object_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"config\.json"):
        ModelConfig.from_directory(tmp_path)


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters", "quantization_config"])
def test_a_key_of_the_wrong_kind_is_named(key: str) -> None:
    for value in ("yarn", 3, True):
        with pytest.raises(ValueError, match=key):
            ModelConfig.from_dict(raw_config(**{key: value}))


# --- The engine's options ----------------------------------------------------------------------------------------


def test_defaults_are_the_issue_s() -> None:
    config = EngineConfig("m")
    expected = {
        "dtype": "auto", "device": "auto", "max_model_len": None, "max_num_seqs": 256, "max_num_batched_tokens": None,
        "gpu_memory_utilization": 0.9, "kvcache_block_size": None, "num_kvcache_blocks": None, "cpu_kvcache_gib": None,
        "enable_prefix_caching": True, "tensor_parallel_size": 1, "enforce_eager": False, "load_format": "auto",
        "seed": None, "revision": None,
    }  # fmt: skip
    assert {name: getattr(config, name) for name in expected} == expected
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.dtype = "float32"  # type: ignore[misc]


def test_a_cpu_s_default_budget_is_1024_tokens_and_a_pool_of_4_gib_at_most() -> None:
    llm = kit.LLM(str(checkpoint("tied").directory), dtype="float32", max_num_seqs=4)
    assert llm.engine.scheduler.config.max_num_batched_tokens == 1024
    assert llm.engine.scheduler.config.max_model_len == 256
    assert llm.capacity.num_blocks * llm.capacity.bytes_per_block <= 4 * 2**30
    assert llm.capacity.device == "cpu"


@pytest.mark.parametrize(
    ("name", "hint"),
    [("max_seq_len", ""), ("max_num_seq", "max_num_seqs"), ("tensor_parallel", "tensor_parallel_size"),
     ("num_kvcache_block", "num_kvcache_blocks"), ("quantisation", "quantization"), ("Dtype", "dtype")],
)  # fmt: skip
def test_an_unknown_option_is_a_type_error_that_names_it(name: str, hint: str) -> None:
    with pytest.raises(TypeError, match=rf"{name}.*{hint}"):
        EngineConfig.create("m", **{name: 1})
    with pytest.raises(TypeError, match=name):
        EngineConfig("m", **{name: 1})


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "float64"}, {"dtype": "int8"}, {"dtype": 3}, {"device": "tpu"}, {"device": None},
        {"max_model_len": 0},
        {"max_model_len": 1}, {"max_model_len": -5}, {"max_model_len": 10.0}, {"max_model_len": "10"},
        {"max_num_seqs": 0}, {"max_num_seqs": None}, {"max_num_seqs": True}, {"max_num_batched_tokens": 0},
        {"gpu_memory_utilization": 0}, {"gpu_memory_utilization": 1.1}, {"gpu_memory_utilization": math.nan},
        {"gpu_memory_utilization": None}, {"kvcache_block_size": 0}, {"kvcache_block_size": 1.5},
        {"num_kvcache_blocks": 0}, {"num_kvcache_blocks": -1}, {"cpu_kvcache_gib": 0}, {"cpu_kvcache_gib": -1.0},
        {"cpu_kvcache_gib": math.inf}, {"cpu_kvcache_gib": "4"}, {"enable_prefix_caching": 1},
        {"enable_prefix_caching": None}, {"tensor_parallel_size": 0}, {"tensor_parallel_size": 1.0},
        {"enforce_eager": "yes"}, {"load_format": "gguf"}, {"load_format": None}, {"seed": -1}, {"seed": 1.5},
        {"quantization": "int4"}, {"quantization": ""}, {"quantization": 8},
    ],
    ids=str,
)  # fmt: skip
def test_a_bad_value_is_refused_with_option_and_value(options: dict[str, Any]) -> None:
    ((name, value),) = options.items()
    with pytest.raises(ValueError) as caught:
        EngineConfig.create("m", **options)
    assert (name in str(caught.value)) and repr(value) in str(caught.value)


@pytest.mark.parametrize("value", ["bfloat16", "torch.bfloat16", torch.bfloat16, "bf16"])
def test_a_dtype_may_be_a_name_or_torch_s(value: Any) -> None:
    assert parse_dtype(value) == "bfloat16"
    assert EngineConfig.create("m", dtype=value).dtype == "bfloat16"


def test_a_length_beyond_the_model_s_is_refused_with_both() -> None:
    with pytest.raises(ValueError, match=r"max_model_len is 257.*256"):
        make_llm(checkpoint("tied").directory, max_model_len=257)
    assert make_llm(checkpoint("tied").directory, max_model_len=256).engine.scheduler.config.max_model_len == 256


def test_a_length_beyond_the_pool_is_lowered_and_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING"):
        llm = make_llm(checkpoint("tied").directory, num_kvcache_blocks=5)
    assert llm.engine.scheduler.config.max_model_len == 40
    assert any("256" in r.getMessage() and "40" in r.getMessage() for r in caplog.records)
    with pytest.raises(ValueError, match="KV pool"):
        make_llm(checkpoint("tied").directory, num_kvcache_blocks=1, kvcache_block_size=1)


def test_a_device_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="cuda"):
        make_llm(checkpoint("tied").directory, device="cuda")
