"""Command-line flags out of the dataclasses that hold the options, with their docstrings as help.

A flag exists because a field does: `max_model_len` is `--max-model-len`, its help is the field's entry in the class's
docstring, and what is wrong with a value is said by the class itself. Only flags that were given reach the class.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import re
import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from nanoinfer.config import EngineConfig
from nanoinfer.demo import demo_model_path

_ALIASES = {"tensor_parallel_size": ["-tp"], "kvcache_block_size": ["--block-size"]}
_GROUPS = {
    "model": (
        "dtype", "device", "max_model_len", "load_format", "revision", "seed", "enforce_eager", "quantization",
        "attention_backend",
    ),
    "kv-cache": (
        "gpu_memory_utilization", "kvcache_block_size", "num_kvcache_blocks", "cpu_kvcache_gib",
        "kv_cache_dtype", "enable_prefix_caching",
    ),
    "scheduling": ("max_num_seqs", "max_num_batched_tokens", "async_scheduling", "step_timeout", "load_timeout"),
    "parallel": ("tensor_parallel_size", "distributed_executor_backend"),
}  # fmt: skip
_UNITS = {"k": 10**3, "K": 2**10, "m": 10**6, "M": 2**20, "g": 10**9, "G": 2**30}


def human_int(text: str) -> int:
    """An integer; 1k is 1000 and 1K is 1024, likewise m and M, g and G."""
    match = re.fullmatch(r"(-?\d+(?:\.\d+)?)([kKmMgG]?)", text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer (1k is 1000, 1K is 1024)")
    value = (
        float(match[1]) * _UNITS[match[2]] if match[2] else int(match[1]) if "." not in match[1] else float(match[1])
    )
    if value != int(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(value)


def json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f'{text!r} is not a JSON object such as {{"enable_thinking": false}}')
    return value


class _Help(argparse.Action):
    """`--help` of everything, `--help=GROUP` or `--help=FLAG` of a part."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option: str | None = None) -> None:
        if values in (None, "all"):
            parser.print_help()
            parser.exit()
        wanted = str(values).lstrip("-")
        for group in parser._action_groups:
            actions = [
                action
                for action in group._group_actions
                if group.title == wanted or f"--{wanted}" in action.option_strings
            ]
            if actions:
                formatter = parser.formatter_class(prog=parser.prog)
                formatter.start_section(group.title)
                formatter.add_arguments(actions)
                formatter.end_section()
                parser.exit(message=formatter.format_help())
        titles = ", ".join(str(group.title) for group in parser._action_groups)
        parser.error(f"--help={values}: there is no such flag or group; groups are {titles}")


def new_parser(subparsers: Any, name: str, summary: str, description: str = "") -> argparse.ArgumentParser:
    """A verb's parser."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        name,
        help=summary,
        description=f"{summary}. {description}".strip(),
        add_help=False,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "-h", "--help", action=_Help, nargs="?", metavar="WHAT", help="show everything, or one group or flag"
    )
    parser.add_argument("--config", metavar="FILE", help="a YAML file whose keys are these flags' names; flags win")
    return parser


def add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        nargs="?",
        default=argparse.SUPPRESS,
        metavar="MODEL",
        help="a directory or a Hugging Face hub id; default: the demo checkpoint in the package",
    )


def field_help(cls: type) -> dict[str, str]:
    """The entries `name: text` of a class's docstring, also `name, other: text`."""
    entries: dict[str, str] = {}
    names: list[str] = []
    for line in inspect.cleandoc(cls.__doc__ or "").splitlines():
        match = re.match(r"((?:\w+)(?:, \w+)*): (.*)", line)
        if match:
            names = match[1].split(", ")
            for name in names:
                entries[name] = match[2]
        elif line.startswith("    ") and names:
            for name in names:
                entries[name] += " " + line.strip()
        else:
            names = []
    return entries


def add_flags(parser: argparse.ArgumentParser, cls: type, title: str, exclude: Iterable[str] = ()) -> None:
    """Flags for the fields of a dataclass, in groups."""
    hints = typing.get_type_hints(cls)
    helps = field_help(cls)
    skipped = set(exclude)
    groups: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        if field.name in skipped:
            continue
        own = next((group for group, names in _GROUPS.items() if field.name in names and cls is EngineConfig), title)
        group = groups.get(own) or groups.setdefault(own, parser.add_argument_group(own))
        text = helps.get(field.name, "").rstrip(".")
        if (default := _shown_default(field)) is not None:
            text = f"{text}. Default: {default}" if text else f"Default: {default}"
        _add_flag(group, field.name, hints[field.name], text.replace("%", "%%"))


def _shown_default(field: dataclasses.Field[Any]) -> str | None:
    if field.default in (None, (), dataclasses.MISSING):
        return None
    return "on" if field.default is True else "off" if field.default is False else str(field.default)


def _add_flag(group: Any, name: str, hint: Any, text: str) -> None:
    flags = [f"--{name.replace('_', '-')}", *_ALIASES.get(name, [])]
    options: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS, "help": text}
    kinds = set(typing.get_args(hint) or (hint,)) - {type(None)}
    origins = {typing.get_origin(kind) or kind for kind in kinds} | {typing.get_origin(hint)}
    if bool in kinds:
        group.add_argument(*flags, action=argparse.BooleanOptionalAction, **options)
    elif Mapping in origins:
        group.add_argument(*flags, type=json_object, metavar="JSON", **options)
    elif Sequence in origins:
        kind = human_int if int in {a for k in [hint, *kinds] for a in typing.get_args(k)} else str
        group.add_argument(*flags, nargs="+", type=kind, metavar=name.split("_")[-1].upper(), **options)
    elif int in kinds:
        group.add_argument(*flags, type=human_int, metavar="N", **options)
    else:
        group.add_argument(
            *flags, type=float if float in kinds else str, metavar="X" if float in kinds else "TEXT", **options
        )


def given(args: argparse.Namespace, cls: type) -> dict[str, Any]:
    """The fields of a dataclass that flags were given for."""
    return {field.name: getattr(args, field.name) for field in dataclasses.fields(cls) if hasattr(args, field.name)}


def model_of(args: argparse.Namespace) -> str:
    return getattr(args, "model", None) or str(demo_model_path())


def apply_config_file(parser: argparse.ArgumentParser, path: str) -> None:
    """Makes a file's values the parser's defaults; ends with the parser's error if it names what is no flag."""
    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {}
    except (OSError, yaml.YAMLError) as error:
        parser.error(f"--config {path}: {error}")
    if not isinstance(values, dict):
        parser.error(f"--config {path}: the file must hold keys and values")
    actions = {action.dest: action for action in parser._actions if action.dest not in ("help", "config")}
    for key, value in values.items():
        dest = str(key).replace("-", "_")
        action = actions.get(dest)
        if action is None:
            parser.error(f"--config {path}: {key!r} is no flag of this command")
        parser.set_defaults(**{dest: _converted(parser, action, value, f"--config {path}: {key}")})


def _converted(parser: argparse.ArgumentParser, action: argparse.Action, value: Any, where: str) -> Any:
    if isinstance(action, argparse.BooleanOptionalAction) or action.nargs == 0:
        if not isinstance(value, bool):
            parser.error(f"{where} is {value!r}; it must be true or false")
        return value
    kind: Any = action.type or str
    try:
        if action.nargs == "+":
            return [kind(str(item)) for item in (value if isinstance(value, list) else [value])]
        return kind(json.dumps(value) if isinstance(value, dict) else str(value))
    except (ValueError, argparse.ArgumentTypeError) as error:
        parser.error(f"{where} is {value!r}: {error}")
