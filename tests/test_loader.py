"""Checkpoints in: what the index says, what is missing, surplus, twice, torn or misshapen, and how little is read.
Every error names the file and the tensor.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import kit
import numpy as np
import pytest
import tiny
import torch
from gpu_stand_in import OnFakeGPU
from huggingface_hub.errors import LocalEntryNotFoundError, RepositoryNotFoundError
from kit import checkpoint, greedy, hand_merged, make_llm
from safetensors.torch import load_file, save_file
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

from nanoinfer import LLM
from nanoinfer.attention.cpu import CPUAttention
from nanoinfer.config import EngineConfig, ModelConfig
from nanoinfer.distributed.group import ParallelGroups
from nanoinfer.engine.checkpoint import find_checkpoint
from nanoinfer.models import loader
from nanoinfer.models.loader import load_weights, open_checkpoint
from nanoinfer.models.qwen3 import Qwen3ForCausalLM
from nanoinfer.worker.kv_cache import available_memory, num_cpu_blocks
from nanoinfer.worker.model_runner import cpu_has_bf16, resolve_dtype

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def tensors_of(variant: str) -> dict[str, torch.Tensor]:
    return load_file(checkpoint(variant).directory / "model.safetensors")


def write(variant: str, tensors: dict[str, torch.Tensor], num_shards: int = 1, **config: Any) -> Path:
    """A checkpoint of these tensors, in one file, or in several with an index."""
    directory = kit.new_directory()
    raw = json.loads((checkpoint(variant).directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**raw, **config}))
    if num_shards == 1:
        save_file(tensors, directory / "model.safetensors")
        return directory
    weight_map: dict[str, str] = {}
    for i in range(num_shards):
        name = f"model-{i + 1:05d}-of-{num_shards:05d}.safetensors"
        shard = {key: tensors[key] for key in sorted(tensors)[i::num_shards]}
        save_file(shard, directory / name)
        weight_map |= dict.fromkeys(shard, name)
    write_index(directory, weight_map)
    return directory


def write_index(directory: Path, weight_map: dict[str, str]) -> None:
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def read_index(directory: Path) -> dict[str, str]:
    return json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"]


def assert_answers(variant: str, directory: Path) -> None:
    output = make_llm(directory).generate(PROMPT, greedy(6, logprobs=2))[0]
    checkpoint(variant).reference.assert_greedy(PROMPT, output.token_ids, output.outputs[0].logprobs)


def refuses(directory: Path, *names: str) -> None:
    """Loading raises a ValueError in which each of `names` occurs."""
    with pytest.raises(ValueError) as caught:
        make_llm(directory)
    for name in names:
        assert name in str(caught.value), f"{name!r} is not named in: {caught.value}"


# --- What is right -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["tied", "untied", "bias"])
@pytest.mark.parametrize("num_shards", [1, 2, 5])
def test_one_file_or_several_give_the_same_model(variant: str, num_shards: int) -> None:
    assert_answers(variant, write(variant, tensors_of(variant), num_shards))


@pytest.mark.parametrize("num_shards", [1, 2])
def test_a_tied_head_may_be_stored_again_if_it_is_the_embedding(num_shards: int) -> None:
    tensors = tensors_of("tied")
    assert HEAD not in tensors
    tensors[HEAD] = tensors[EMBED].clone()
    assert_answers("tied", write("tied", tensors, num_shards))
    tensors[HEAD][-1, -1] += 0.5
    refuses(write("tied", tensors, num_shards), HEAD, EMBED, "tie_word_embeddings")


def test_a_head_that_is_stored_again_is_compared_on_the_model_s_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Qwen3-0.6B's is, on fake tensors of a GPU: torch compares none across devices."""
    directory = write("tied", {**(tensors := tensors_of("tied")), HEAD: tensors[EMBED].clone()})
    config, read = ModelConfig.from_directory(directory), loader._read

    def read_in_earnest(*arguments: Any) -> torch.Tensor:
        with unset_fake_temporarily():
            return read(*arguments)

    compared: list[tuple[str, str]] = []

    def equal(mine: torch.Tensor, other: torch.Tensor) -> bool:
        compared.append((mine.device.type, other.device.type))
        return mine.dtype == other.dtype

    monkeypatch.setattr(loader, "_read", read_in_earnest)
    monkeypatch.setattr(torch, "equal", equal)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.inference_mode(), OnFakeGPU():
        backend = CPUAttention(config.num_attention_heads, config.num_key_value_heads, config.head_dim)
        model = Qwen3ForCausalLM(config, backend, ParallelGroups.single(), torch.bfloat16, "cuda")
        load_weights(model, open_checkpoint(directory))
    assert compared == [("cuda", "cuda")]


def test_an_untied_head_is_its_own_and_must_be_there() -> None:
    tensors = tensors_of("untied")
    assert not torch.equal(tensors[HEAD], tensors[EMBED])
    assert_answers("untied", write("untied", tensors))
    del tensors[HEAD]
    refuses(write("untied", tensors), HEAD)


def test_the_index_decides_and_a_file_that_it_does_not_name_is_not_opened() -> None:
    directory = write("tied", tensors_of("tied"), 2)
    garbage = {name: torch.full_like(tensor, 7.0) for name, tensor in tensors_of("tied").items()}
    save_file(garbage, directory / "model.safetensors")
    (directory / "consolidated.safetensors").write_bytes(b"not a safetensors file")
    assert_answers("tied", directory)


@pytest.mark.parametrize(("stored", "dtype"), [(torch.bfloat16, "bfloat16"), (torch.float16, "float16")])
def test_stored_and_computed_dtype_may_differ(stored: torch.dtype, dtype: str) -> None:
    tensors = {name: tensor.to(stored) for name, tensor in tensors_of("tied").items()}
    directory = write("tied", tensors, dtype=dtype)
    llm = make_llm(directory, dtype="float32")
    loaded = {spec.name: spec.dest for spec in llm.engine.executor.runner.model.shards()}
    for name, tensor in tensors.items():
        assert loaded[name].dtype == torch.float32 and torch.equal(loaded[name], tensor.float())
    auto = make_llm(directory, dtype="auto")
    expected = dtype if dtype != "bfloat16" or cpu_has_bf16() else "float32"
    assert auto.capacity.dtype == expected
    assert auto.engine.executor.runner._kv_cache.data.dtype == getattr(torch, expected)


def test_a_cpu_without_bfloat16_computes_in_float32_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert resolve_dtype("auto", "bfloat16", "cpu", has_bf16=False) is torch.float32
    assert "bfloat16" in caplog.text and "float32" in caplog.text
    assert resolve_dtype("auto", "bfloat16", "cpu", has_bf16=True) is torch.bfloat16
    assert resolve_dtype("bfloat16", "float32", "cpu", has_bf16=False) is torch.bfloat16
    assert resolve_dtype("auto", "float32", "cpu", has_bf16=True) is torch.float32
    assert resolve_dtype("float16", "bfloat16", "cpu", has_bf16=False) is torch.float16


@pytest.mark.parametrize(
    ("text", "has_it"),
    [
        ("processor: 0\nflags\t\t: fpu avx512f avx512_bf16 amx_tile\n", True),
        ("flags : fpu avx2 avx512f\n", False),
        ("Features\t: fp asimd bf16 i8mm\n", True),
        ("Features : fp asimd\n", False),
        ("flags: amx_bf16\n", True),
        ("", False),
    ],
)
def test_bfloat16_instructions_are_read_from_cpuinfo(tmp_path: Path, text: str, has_it: bool) -> None:
    (tmp_path / "cpuinfo").write_text(text)
    assert cpu_has_bf16(tmp_path / "cpuinfo") == has_it
    assert not cpu_has_bf16(tmp_path / "absent")


# --- What is wrong -----------------------------------------------------------------------------------------------

KINDS = [
    EMBED, "model.norm.weight", "model.layers.0.input_layernorm.weight",
    "model.layers.1.post_attention_layernorm.weight",
    "model.layers.0.self_attn.q_proj.weight", "model.layers.1.self_attn.k_proj.weight",
    "model.layers.2.self_attn.v_proj.weight", "model.layers.0.self_attn.o_proj.weight",
    "model.layers.0.self_attn.q_norm.weight", "model.layers.1.self_attn.k_norm.weight",
    "model.layers.2.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.down_proj.weight",
    "model.layers.0.self_attn.q_proj.bias", "model.layers.1.self_attn.k_proj.bias",
    "model.layers.2.self_attn.v_proj.bias", "model.layers.0.self_attn.o_proj.bias",
]  # fmt: skip


@pytest.mark.parametrize("name", KINDS)
def test_any_tensor_that_is_missing_is_named(name: str) -> None:
    tensors = tensors_of("bias")
    del tensors[name]
    refuses(write("bias", tensors), name)
    refuses(write("bias", tensors, 2), name)


@pytest.mark.parametrize("name", KINDS)
def test_any_tensor_of_another_shape_is_named_with_both_shapes(name: str) -> None:
    tensors = tensors_of("bias")
    right = tensors[name]
    shapes = [right[:-1], torch.cat((right, right[:1])), right.unsqueeze(0)]
    if right.dim() == 2:
        shapes += [right.flatten(), right[:, :-1].contiguous()]
        if right.shape[0] != right.shape[1]:
            shapes.append(right.T.contiguous())
    for wrong in shapes:
        directory = write("bias", {**tensors, name: wrong.contiguous()})
        refuses(directory, name, "model.safetensors", str(list(wrong.shape)), str(list(right.shape)))


@pytest.mark.parametrize(
    "dtype", [torch.int8, torch.int32, torch.uint8, torch.float64, torch.bool, torch.float8_e4m3fn]
)
@pytest.mark.parametrize("name", [EMBED, "model.layers.1.mlp.up_proj.weight"])
def test_a_tensor_of_a_dtype_that_is_not_a_weight_s_is_named(dtype: torch.dtype, name: str) -> None:
    tensors = tensors_of("tied")
    tensors[name] = tensors[name].to(dtype)
    refuses(write("tied", tensors), name, "model.safetensors", "dtype")


@pytest.mark.parametrize(
    "name", ["model.layers.3.mlp.up_proj.weight", "model.layers.0.self_attn.q_proj.bias", "visual.patch.weight",
             "model.layers.0.mlp.up_proj.weight_scale_inv", "model.layers.0.mlp.experts.0.up_proj.weight"],
)  # fmt: skip
@pytest.mark.parametrize("num_shards", [1, 2])
def test_a_tensor_that_the_model_has_no_use_for_is_named(name: str, num_shards: int) -> None:
    directory = write("tied", {**tensors_of("tied"), name: torch.zeros(4)}, num_shards)
    file = read_index(directory)[name] if num_shards > 1 else "model.safetensors"
    refuses(directory, name, file)


def break_delete(path: Path) -> None:
    path.unlink()


def break_empty(path: Path) -> None:
    path.write_bytes(b"")


def break_truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def break_header(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:20])


def break_pointer(path: Path) -> None:
    """What git leaves instead of the file when LFS is not installed."""
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 12345\n")


def break_trailing(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0" * 64)


@pytest.mark.parametrize(
    "damage", [break_delete, break_empty, break_truncate, break_header, break_pointer, break_trailing]
)
@pytest.mark.parametrize("victim", [1, 2])
def test_a_shard_that_is_not_whole_is_named(damage: Callable[[Path], None], victim: int) -> None:
    directory = write("tied", tensors_of("tied"), 2)
    name = f"model-0000{victim}-of-00002.safetensors"
    damage(directory / name)
    refuses(directory, name)
    if damage is break_delete:
        held = sorted(key for key, file in read_index(directory).items() if file == name)
        refuses(directory, name, held[0])


@pytest.mark.parametrize("damage", [break_empty, break_truncate, break_header, break_pointer])
def test_a_single_file_that_is_not_whole_is_named(damage: Callable[[Path], None]) -> None:
    directory = write("tied", tensors_of("tied"))
    damage(directory / "model.safetensors")
    refuses(directory, "model.safetensors")


def test_an_index_older_than_its_files_is_refused() -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    # The index says that a tensor is in a file which does not hold it.
    directory = write("tied", tensors_of("tied"), 2)
    weight_map = read_index(directory)
    other = next(file for file in sorted(set(weight_map.values())) if file != weight_map[name])
    write_index(directory, {**weight_map, name: other})
    refuses(directory, name, other)
    # The files hold a tensor that the index does not list.
    directory = write("tied", tensors_of("tied"), 2)
    weight_map = read_index(directory)
    file = weight_map.pop(name)
    write_index(directory, weight_map)
    refuses(directory, name, file)
    # A file that is not there, with a tensor that nobody needs.
    directory = write("tied", tensors_of("tied"), 2)
    write_index(directory, {**read_index(directory), "extra.weight": "model-00003-of-00003.safetensors"})
    refuses(directory, "model-00003-of-00003.safetensors", "extra.weight")


def test_a_tensor_in_two_files_is_refused_with_both() -> None:
    directory = write("tied", tensors_of("tied"), 2)
    weight_map = read_index(directory)
    name = "model.norm.weight"
    other = next(file for file in sorted(set(weight_map.values())) if file != weight_map[name])
    save_file({**load_file(directory / other), name: torch.zeros(64)}, directory / other)
    refuses(directory, name, other, weight_map[name])


def test_a_name_that_the_index_lists_twice_is_refused() -> None:
    directory = write("tied", tensors_of("tied"), 2)
    path = directory / "model.safetensors.index.json"
    text = path.read_text()
    line = re.search(r'"model\.norm\.weight": "[^"]*"', text)
    assert line is not None
    path.write_text(text.replace(line[0], f"{line[0]}, {line[0]}"))
    refuses(directory, "model.norm.weight", "twice")


BROKEN_INDEXES = [
    "", "{", "[]", "{}", "null", '{"weight_map": []}', '{"weight_map": 3}', '{"weight_map": ["ab"]}',
    '{"weight_map": {"a": 3}}', '{"weight_map": {"a": null}}', '{"weight_map": {}}',
]  # fmt: skip


@pytest.mark.parametrize("text", BROKEN_INDEXES)
def test_an_index_that_is_none_is_refused_by_name(text: str) -> None:
    directory = write("tied", tensors_of("tied"), 2)
    (directory / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ValueError) as caught:
        make_llm(directory)
    assert "index.json" in str(caught.value) or str(directory) in str(caught.value)


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "sub/model.safetensors"])
def test_an_index_may_not_point_elsewhere(name: str) -> None:
    directory = write("tied", tensors_of("tied"), 2)
    shutil.copy(checkpoint("tied").directory / "model.safetensors", directory.parent / "model.safetensors")
    write_index(directory, dict.fromkeys(tensors_of("tied"), name))
    refuses(directory, name)


def test_a_directory_without_weights_says_what_it_looked_for(tmp_path: Path) -> None:
    shutil.copy(checkpoint("tied").directory / "config.json", tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    refuses(tmp_path, str(tmp_path), "model.safetensors", "pytorch_model.bin")
    (tmp_path / "config.json").unlink()
    refuses(tmp_path, str(tmp_path), "config.json")


def test_a_config_for_another_model_than_the_weights_is_refused() -> None:
    tensors = tensors_of("tied")
    for options in ({"num_hidden_layers": 2}, {"num_hidden_layers": 4}, {"head_dim": 16}, {"vocab_size": 319},
                    {"intermediate_size": 64}, {"num_key_value_heads": 1}, {"attention_bias": True}):  # fmt: skip
        config = {**options}
        if "num_hidden_layers" in options:
            config["layer_types"] = ["full_attention"] * options["num_hidden_layers"]
        refuses(write("tied", tensors, **config), "model.")


# --- How much is read --------------------------------------------------------------------------------------------


class CountingFile:
    """A safetensors file that counts the elements read, by tensor."""

    def __init__(self, file: Any, counts: dict[str, int]) -> None:
        self._file, self._counts = file, counts

    def __enter__(self) -> CountingFile:
        self._file.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._file.__exit__(*exception)

    def keys(self) -> Any:
        return self._file.keys()

    def get_tensor(self, name: str) -> torch.Tensor:
        tensor = self._file.get_tensor(name)
        self._counts[name] = self._counts.get(name, 0) + tensor.numel()
        return tensor

    def get_slice(self, name: str) -> Any:
        counts, stored = self._counts, self._file.get_slice(name)

        class Slice:
            def get_shape(self) -> list[int]:
                return stored.get_shape()

            def get_dtype(self) -> str:
                return stored.get_dtype()

            def __getitem__(self, index: Any) -> torch.Tensor:
                tensor = stored[index]
                counts[name] = counts.get(name, 0) + tensor.numel()
                return tensor

        return Slice()


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("num_shards", [1, 2])
def test_a_rank_reads_its_slice_of_each_tensor_and_no_more(
    size: int, num_shards: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = write("untied", tensors_of("untied"), num_shards)
    config = ModelConfig.from_directory(directory)
    counts: dict[str, int] = {}
    real = loader.safe_open
    monkeypatch.setattr(loader, "safe_open", lambda *args, **options: CountingFile(real(*args, **options), counts))
    whole = {name: tensor.numel() for name, tensor in tensors_of("untied").items()}
    totals = dict.fromkeys(whole, 0)
    for groups in hand_merged(size):
        counts.clear()
        backend = CPUAttention(4 // size, max(1, 2 // size), 32)
        with torch.inference_mode():
            load_weights(Qwen3ForCausalLM(config, backend, groups, torch.float32, "cpu"), open_checkpoint(directory))
        for name, count in counts.items():
            totals[name] += count
            parts = 1 if "norm" in name else min(size, 2) if "k_proj" in name or "v_proj" in name else size
            assert count == whole[name] // parts, name
    for name, total in totals.items():
        copies = size if "norm" in name else max(1, size // 2) if "k_proj" in name or "v_proj" in name else 1
        assert total == whole[name] * copies, name


# --- Where a model is --------------------------------------------------------------------------------------------


def test_a_tilde_is_the_home_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    directory = checkpoint("tied").directory
    monkeypatch.setenv("HOME", str(directory.parent))
    assert find_checkpoint(f"~/{directory.name}") == directory
    output = LLM(f"~/{directory.name}", num_kvcache_blocks=8, dtype="float32").generate(PROMPT, greedy(3))[0]
    checkpoint("tied").reference.assert_greedy(PROMPT, output.token_ids)
    assert LLM(directory, num_kvcache_blocks=8).generate([1], greedy(1)), "a Path is as good as a string"


def test_a_hub_id_is_one_snapshot_of_one_revision(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    directory = checkpoint("tied", tokenizer=True).directory

    def snapshot_download(*args: Any, **options: Any) -> str:
        calls.append((args, options))
        return str(directory)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.chdir(kit.new_directory())
    llm = make_llm(Path("Qwen/Qwen3-0.6B"), revision="abc123")
    output = llm.generate("the ab", greedy(4))[0]
    checkpoint("tied", tokenizer=True).reference.assert_greedy(output.prompt_token_ids, output.token_ids)
    assert len(calls) == 1, "files of more than one snapshot"
    args, options = calls[0]
    assert args == ("Qwen/Qwen3-0.6B",) and options["revision"] == "abc123"
    patterns = options["allow_patterns"]
    from huggingface_hub.utils import filter_repo_objects

    offered = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "merges.txt",
               "vocab.json", "chat_template.jinja", "model-00001-of-00002.safetensors",
               "model.safetensors.index.json", "pytorch_model.bin", "model.gguf", "original/x.pth"]  # fmt: skip
    wanted = list(filter_repo_objects(offered, allow_patterns=patterns))
    assert wanted == offered[:-3]
    calls.clear()
    LLM("Qwen/Qwen3-0.6B", load_format="dummy", num_kvcache_blocks=8)
    assert calls[0][1]["revision"] is None
    assert "model-00001-of-00002.safetensors" not in filter_repo_objects(
        offered, allow_patterns=calls[0][1]["allow_patterns"]
    )


@pytest.mark.parametrize("kind", ["absent", "offline"])
def test_a_hub_id_that_is_not_to_be_had_is_named(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot_download(*args: Any, **options: Any) -> str:
        if kind == "offline":
            raise LocalEntryNotFoundError("outgoing traffic has been disabled")
        response = SimpleNamespace(headers={}, request=None, status_code=404)
        raise RepositoryNotFoundError("no such repository", response=response)  # type: ignore[arg-type]

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(ValueError, match=r"Qwen/Qwen3-9B.*revision 'v7'"):
        find_checkpoint("Qwen/Qwen3-9B", "v7")


@pytest.mark.parametrize("path", ["/no/such/dir", "./no-such-dir", "~/no-such-dir", "a/b/c", "../x"])
def test_a_path_that_is_not_there_is_not_sent_to_the_hub(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *args, **options: pytest.fail("asked the hub"))
    with pytest.raises(ValueError, match=re.escape(repr(path))):
        find_checkpoint(path)


def test_a_revision_of_a_local_directory_is_refused() -> None:
    with pytest.raises(ValueError, match="revision"):
        make_llm(checkpoint("tied").directory, revision="main")


def test_a_broken_generation_config_is_named(tmp_path: Path) -> None:
    directory = write("tied", tensors_of("tied"))
    (directory / "generation_config.json").write_text("{")
    refuses(directory, "generation_config.json")


# --- Dummy weights -----------------------------------------------------------------------------------------------


def test_dummy_weights_need_nothing_but_config_json_and_depend_on_the_seed(tmp_path: Path) -> None:
    shutil.copy(checkpoint("untied").directory / "config.json", tmp_path)
    outputs = []
    for seed in (1, 1, 2):
        llm = make_llm(tmp_path, load_format="dummy", seed=seed)
        outputs.append(llm.generate(PROMPT, greedy(12, logprobs=0))[0].outputs[0])
    assert outputs[0].logprobs == outputs[1].logprobs
    assert outputs[0].logprobs != outputs[2].logprobs


def test_dummy_weights_over_two_ranks_answer_as_one_rank_does(tmp_path: Path) -> None:
    shutil.copy(checkpoint("odd_vocab").directory / "config.json", tmp_path)
    one = make_llm(tmp_path, load_format="dummy").generate(PROMPT, greedy(8, logprobs=1))[0]
    two = kit.lockstep_llm(tmp_path, 2, load_format="dummy").generate(PROMPT, greedy(8, logprobs=1))[0]
    assert one.token_ids == two.token_ids
    first = [next(iter(entry.values())).logprob for entry in one.outputs[0].logprobs or ()]
    second = [next(iter(entry.values())).logprob for entry in two.outputs[0].logprobs or ()]
    np.testing.assert_allclose(first, second, atol=1e-4)


def test_every_parameter_of_a_rank_is_stated_for_loading() -> None:
    """No parameter may keep what memory held: fill all with NaN, load, and look."""
    for variant in tiny.VARIANTS:
        directory = checkpoint(variant).directory
        config = ModelConfig.from_directory(directory)
        backend = CPUAttention(config.num_attention_heads, config.num_key_value_heads, config.head_dim)
        model = Qwen3ForCausalLM(config, backend, ParallelGroups.single(), torch.float32, "cpu")
        with torch.inference_mode():
            for parameter in model.parameters():
                parameter.fill_(float("nan"))
            load_weights(model, open_checkpoint(directory))
        assert not any(parameter.isnan().any() for parameter in model.parameters())


# --- Memory ------------------------------------------------------------------------------------------------------


def config_with(**options: Any) -> EngineConfig:
    return EngineConfig.create("m", **options)


def test_the_pool_is_what_was_asked_for_or_what_memory_allows() -> None:
    gib = 2**30
    assert num_cpu_blocks(config_with(), gib // 64, 100 * gib) == 4 * 64
    assert num_cpu_blocks(config_with(), gib // 64, 5 * gib) == 2 * 64
    assert num_cpu_blocks(config_with(cpu_kvcache_gib=1.5), gib // 64, 5 * gib) == 96
    assert num_cpu_blocks(config_with(num_kvcache_blocks=7), gib // 64, 5 * gib) == 7


@pytest.mark.parametrize(
    ("options", "bytes_per_block", "available", "numbers"),
    [
        ({}, 2**20, 2**20, ["1048576", "419430"]),
        ({"num_kvcache_blocks": 10}, 2**20, 2**22, ["10485760", "4194304", "num_kvcache_blocks=10"]),
        ({"cpu_kvcache_gib": 1.0}, 2**20, 2**22, ["1073741824", "4194304", "cpu_kvcache_gib=1.0"]),
        ({}, 2**20, 0, ["1048576", " 0 "]),
        ({"cpu_kvcache_gib": 0.0001}, 2**20, 2**30, ["1048576", "107374"]),
    ],
)
def test_too_little_memory_is_an_error_with_needed_and_available_bytes(
    options: dict[str, Any], bytes_per_block: int, available: int, numbers: list[str]
) -> None:
    with pytest.raises(ValueError) as caught:
        num_cpu_blocks(config_with(**options), bytes_per_block, available)
    for number in numbers:
        assert number in str(caught.value)


def fake_root(root: Path, meminfo_kib: int, cgroup: str, files: dict[str, str]) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: 99999999 kB\nMemAvailable:   {meminfo_kib} kB\n")
    (root / "proc/self/cgroup").write_text(cgroup)
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("cgroup", "files", "expected"),
    [
        ("", {}, 1000 * 1024),
        ("0::/\n", {"memory.max": "max\n", "memory.current": "5\n"}, 1000 * 1024),
        ("0::/\n", {"memory.max": "500000\n", "memory.current": "100000\n"}, 400000),
        ("0::/\n", {"memory.max": "500000", "memory.current": "100000", "memory.stat": "anon 1\ninactive_file 50000\n"},
         450000),
        ("0::/a/b\n", {"a/memory.max": "300000", "a/memory.current": "100000", "a/b/memory.max": "max",
                       "a/b/memory.current": "9"}, 200000),
        ("0::/host/path\n", {"memory.max": "70000", "memory.current": "30000"}, 40000),
        ("5:cpu:/x\n4:memory:/x\n",
         {"memory/x/memory.limit_in_bytes": "90000", "memory/x/memory.usage_in_bytes": "30000",
          "memory/x/memory.stat": "total_inactive_file 1000\n"}, 61000),
        ("4:memory:/\n", {"memory/memory.limit_in_bytes": "9223372036854771712", "memory/memory.usage_in_bytes": "1"},
         1000 * 1024),
        ("0::/\n", {"memory.max": "5000", "memory.current": "9000"}, 0),
    ],
)  # fmt: skip
def test_available_memory_is_the_least_of_host_and_cgroups(
    tmp_path: Path, cgroup: str, files: dict[str, str], expected: int
) -> None:
    assert available_memory(fake_root(tmp_path, 1000, cgroup, files)) == expected


def test_available_memory_of_this_machine_is_plausible() -> None:
    assert 2**20 < available_memory() < 2**46
