"""`nanoinfer bench throughput | serve`: the benchmarks, each with flags of its own (`nanoinfer bench serve --help`)."""

from __future__ import annotations

import argparse
import importlib
from typing import Any

KINDS = {"throughput": "nanoinfer.bench.throughput", "serve": "nanoinfer.bench.serving"}


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "bench", help="Measure throughput, offline or served", description="Measure throughput, offline or served."
    )
    parser.add_argument("kind", choices=KINDS, help="throughput: offline; serve: over HTTP, next to offline")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    importlib.import_module(KINDS[args.kind]).main(args.rest)
    return 0
