"""Where a model's files are, and what the engine itself reads in them: tokenizer, default parameters, end of sequence.

The path is resolved once, here; ranks get a directory. Hub access is huggingface_hub's, with its environment variables
(HF_HOME, HF_TOKEN, HF_HUB_OFFLINE).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanoinfer.config import ModelConfig, token_id_list
from nanoinfer.sampling_params import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SMALL_FILES = ["*.json", "*.jinja", "*.txt", "*.model"]


def find_checkpoint(model: str, revision: str | None = None, *, weights: bool = True) -> Path:
    """The directory of a local checkpoint, or of a hub id's snapshot (downloaded unless it is in the cache).

    All files are of one revision. Raises ValueError naming the model if it is neither.
    """
    try:
        path = Path(model).expanduser()
    except RuntimeError as error:
        raise ValueError(f"model is {model!r}: {error}") from error
    if path.is_dir():
        if revision is not None:
            raise ValueError(f"revision is {revision!r}, but {model!r} is a local directory, which has only one")
        return path
    if path.is_absolute() or model.startswith((".", "~")) or model.count("/") > 1 or path.exists():
        raise ValueError(f"model is {model!r}; there is no such directory")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    patterns = _SMALL_FILES + (["*.safetensors"] if weights else [])
    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=patterns))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        at = f" at revision {revision!r}" if revision else ""
        raise ValueError(
            f"model {model!r}{at} is neither a local directory nor to be had from the Hugging Face hub: {error}"
        ) from error


def load_generation_config(directory: Path) -> dict[str, Any]:
    """The parsed generation_config.json; {} if there is none."""
    path = directory / "generation_config.json"
    if not path.is_file():
        return {}
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ValueError(f"{path} holds {raw!r}; it must be an object")
    return raw


def load_tokenizer(directory: Path) -> PreTrainedTokenizerBase | None:
    """The checkpoint's tokenizer; None if it has no tokenizer files, in which case prompts must be token ids."""
    if not any((directory / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "vocab.json")):
        return None
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(directory, local_files_only=True)


def default_sampling_params(model_dir: Path, generation_config: dict[str, Any]) -> SamplingParams:
    """The parameters of requests that bring none. Raises ValueError that names the file."""
    try:
        return SamplingParams.from_generation_config(generation_config)
    except ValueError as error:
        raise ValueError(f"{model_dir / 'generation_config.json'}: {error}") from error


def find_eos_token_ids(
    model_config: ModelConfig, generation_config: dict[str, Any], tokenizer: PreTrainedTokenizerBase | None
) -> set[int]:
    """From three sources, each of which has been found to lack one that another has."""
    ids = {*model_config.eos_token_ids, *token_id_list(generation_config.get("eos_token_id"))}
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        ids.add(tokenizer.eos_token_id)
    return ids
