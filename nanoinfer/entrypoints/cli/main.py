"""`nanoinfer VERB ...`: chooses the verb's module, which is imported only then."""

from __future__ import annotations

import argparse
import importlib
import logging
import sys
from collections.abc import Sequence

from nanoinfer.entrypoints.cli.flags import apply_config_file
from nanoinfer.executor.base import EngineDeadError
from nanoinfer.version import __version__

_OF_THE_EXTRA = ("fastapi", "starlette", "uvicorn", "pydantic", "prometheus_client", "llguidance")
VERBS = ("serve", "chat", "generate", "run_batch", "bench")


def make_parser(verb: str | None = None) -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """The parser, and those of the verbs; of all of them, or of one."""
    parser = argparse.ArgumentParser(
        prog="nanoinfer", description="An inference engine for Qwen3.", allow_abbrev=False,
        epilog="nanoinfer VERB --help shows a verb's flags, --help=GROUP or --help=FLAG a part of them.",
    )  # fmt: skip
    parser.add_argument("--version", action="version", version=__version__)
    subparsers = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    parsers = {}
    for name in VERBS:
        shown = name.replace("_", "-")
        if verb in (None, shown):
            parsers[shown] = importlib.import_module(f"nanoinfer.entrypoints.cli.{name}").add_parser(subparsers)
    return parser, parsers


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, 1 if something failed, 2 if the flags are wrong, 130 after Ctrl-C."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    verb = arguments[0] if arguments and arguments[0] in [name.replace("_", "-") for name in VERBS] else None
    parser, parsers = make_parser(verb)
    if verb == "bench":  # has flags of its own benchmarks' making
        args, args.rest = parser.parse_args(arguments[:2]), arguments[2:]
    else:
        early, _ = _config_parser().parse_known_args(arguments)
        if verb is not None and early.config is not None:
            apply_config_file(parsers[verb], early.config)
        args = parser.parse_args(arguments)
    logging.basicConfig(
        level=logging.INFO, format="%(levelname)s %(asctime)s %(name)s: %(message)s", datefmt="%H:%M:%S"
    )
    try:
        return args.run(args)
    except (ValueError, TypeError, OSError) as error:
        if isinstance(error, TypeError) and not str(error).startswith("unknown option"):
            raise
        print(f"nanoinfer {args.verb}: {error}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    except EngineDeadError as error:
        print(f"nanoinfer {args.verb}: {error}", file=sys.stderr)
        return 1
    except ModuleNotFoundError as error:
        if error.name not in _OF_THE_EXTRA:
            raise
        print(f"{error.name} is not installed: pip install 'nanoinfer[serve]'", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _config_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config")
    return parser
