"""Weights from safetensors files (or from a seed) into a model's parameters.

The model states what it needs as `ShardSpec`s; of each tensor only the part that this rank holds is read. The index
file decides which file holds a tensor. Whatever does not match, on either side, is an error that names file and tensor:
a parameter that was never filled would answer with noise.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from tqdm import tqdm

from nanoinfer.layers.shard import ShardSpec
from nanoinfer.models.qwen3 import Qwen3ForCausalLM

_INDEX_NAME = "model.safetensors.index.json"
_SINGLE_NAME = "model.safetensors"
# The head's and the embedding's names, for checkpoints that store a tied head as well.
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_DTYPE_NAMES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


@dataclass(frozen=True)
class Checkpoint:
    """The tensors of a directory: name to file. Built and checked by `open_checkpoint`."""

    directory: Path
    files: dict[str, str]

    def dtype(self) -> str:
        """Of the embedding, or of the first tensor."""
        name = _EMBEDDING if _EMBEDDING in self.files else next(iter(self.files))
        with _open(self.directory / self.files[name]) as file:
            return _dtype_name(file.get_slice(name), name, self.files[name])


def open_checkpoint(directory: Path) -> Checkpoint:
    """Reads the index, or the single file's header. Raises ValueError if they contradict each other."""
    index_path = directory / _INDEX_NAME
    if index_path.is_file():
        files = _read_index(index_path)
    elif (directory / _SINGLE_NAME).is_file():
        with _open(directory / _SINGLE_NAME) as file:
            files = dict.fromkeys(file.keys(), _SINGLE_NAME)
    else:
        found = sorted(path.name for path in directory.iterdir() if path.suffix in (".safetensors", ".bin", ".pt"))
        raise ValueError(
            f"{directory} has neither {_INDEX_NAME} nor {_SINGLE_NAME} (weight files there: {found or 'none'}); "
            "weights are read from safetensors"
        )
    if not files:
        raise ValueError(f"{directory} lists no tensors")
    return Checkpoint(directory, files)


def _read_index(path: Path) -> dict[str, str]:
    def refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        seen: dict[str, Any] = {}
        for key, value in pairs:
            if key in seen:
                raise ValueError(f"{path} lists {key!r} twice")
            seen[key] = value
        return seen

    try:
        index = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=refuse_duplicates)
        files: dict[str, str] = dict(index["weight_map"])
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not an index of safetensors files: {error!r}") from error
    for name, file_name in files.items():
        if not isinstance(file_name, str):
            raise ValueError(f"{path} maps {name!r} to {file_name!r}, which is no file name")
    for file_name in sorted(set(files.values())):
        mapped = {name for name, holder in files.items() if holder == file_name}
        file_path = path.parent / file_name
        if Path(file_name).name != file_name:
            raise ValueError(f"{path} names the file {file_name!r}; files must lie beside the index")
        if not file_path.is_file():
            raise ValueError(f"{file_path} is missing; {path.name} says it holds {_some(mapped)}")
        with _open(file_path) as file:
            present = set(file.keys())
        if missing := mapped - present:
            raise ValueError(f"{file_path} lacks {_some(missing)}, which {path.name} says it holds")
        for name in sorted(present - mapped):
            if name in files:
                raise ValueError(
                    f"tensor {name!r} is in {file_name} and in {files[name]}; which one is meant is unclear"
                )
            raise ValueError(f"{file_path} holds {name!r}, which {path.name} does not list; is the index an old one?")
    return files


def load_weights(model: Qwen3ForCausalLM, checkpoint: Checkpoint, show_progress: bool = True) -> None:
    """Fills the parameters of one rank. Raises ValueError on missing, surplus or misshapen tensors."""
    specs = {spec.name: spec for spec in model.shards()}
    available = set(checkpoint.files)
    if missing := set(specs) - available:
        raise ValueError(f"{checkpoint.directory} lacks {_some(missing)}, which its config.json calls for")
    extra = available - set(specs)
    redundant_head = model.config.tie_word_embeddings and _HEAD in extra
    extra.discard(_HEAD if redundant_head else "")
    if extra:
        holders = {checkpoint.files[name] for name in extra}
        raise ValueError(
            f"{_some(holders)} in {checkpoint.directory} holds {_some(extra)}, which the model has no use for"
        )
    by_file: dict[str, list[ShardSpec]] = {}
    for spec in specs.values():
        by_file.setdefault(checkpoint.files[spec.name], []).append(spec)
    show = show_progress and sys.stderr.isatty()
    with tqdm(total=len(specs), desc="Loading weights", unit="tensor", disable=not show) as bar:
        for file_name, file_specs in sorted(by_file.items()):
            with _open(checkpoint.directory / file_name) as file:
                for spec in file_specs:
                    _check(file, spec, file_name)
                    spec.dest.copy_(_read(file, spec, file_name))
                    bar.update()
    if redundant_head:
        _check_tied(checkpoint, specs[_EMBEDDING])


def _check(file: Any, spec: ShardSpec, file_name: str) -> None:
    stored = file.get_slice(spec.name)
    shape = tuple(stored.get_shape())
    if shape != spec.shape:
        raise ValueError(
            f"{file_name}: tensor {spec.name!r} has shape {list(shape)}; config.json calls for {list(spec.shape)}"
        )
    _dtype_name(stored, spec.name, file_name)


def _read(file: Any, spec: ShardSpec, file_name: str) -> torch.Tensor:
    if spec.dest.numel() == 0:
        return spec.dest  # a rank beyond the end of a padded vocabulary
    try:
        return file.get_slice(spec.name)[spec.index]
    except SafetensorError as error:
        raise ValueError(f"{file_name}: tensor {spec.name!r} cannot be read: {error}") from error


def _check_tied(checkpoint: Checkpoint, embedding: ShardSpec) -> None:
    """A tied checkpoint may store its head again, but then it must be the embedding."""
    file_name = checkpoint.files[_HEAD]
    head = ShardSpec(_HEAD, embedding.shape, embedding.index, embedding.dest)
    with _open(checkpoint.directory / file_name) as file:
        _check(file, head, file_name)
        # To its dtype and its device: tensors on two devices are never equal, but an error.
        if not torch.equal(_read(file, head, file_name).to(embedding.dest), embedding.dest):
            raise ValueError(
                f"{file_name}: {_HEAD!r} differs from {_EMBEDDING!r}, yet config.json sets tie_word_embeddings; "
                "if the head is meant to be its own, set it to false"
            )


def load_dummy_weights(model: Qwen3ForCausalLM, seed: int) -> None:
    """Random weights of a trained model's scale: the same for every way of sharding, given the seed."""
    for spec in model.shards():
        if "norm" in spec.name:
            spec.dest.fill_(1.0)
            continue
        generator = torch.Generator().manual_seed(xxhash.xxh3_64_intdigest(spec.name.encode(), seed=seed) >> 1)
        full = torch.empty(spec.shape, dtype=torch.float32).normal_(0.0, 0.02, generator=generator)
        spec.dest.copy_(full[spec.index])


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is not a whole safetensors file: {error}") from error


def _dtype_name(stored: Any, name: str, file_name: str) -> str:
    dtype = stored.get_dtype()
    if dtype not in _DTYPE_NAMES:
        raise ValueError(
            f"{file_name}: tensor {name!r} has dtype {dtype}; supported are {', '.join(_DTYPE_NAMES)} "
            "(quantized checkpoints are not implemented)"
        )
    return _DTYPE_NAMES[dtype]


def _some(names: Iterable[str]) -> str:
    """A few names, and how many more there are."""
    ordered = sorted(names)
    more = f" and {len(ordered) - 4} more" if len(ordered) > 4 else ""
    return ", ".join(map(repr, ordered[:4])) + more
