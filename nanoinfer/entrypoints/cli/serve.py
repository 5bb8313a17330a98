"""`nanoinfer serve [MODEL]`: the OpenAI-compatible server, with the web page at `/`."""

from __future__ import annotations

import argparse
from typing import Any

from nanoinfer.config import EngineConfig
from nanoinfer.demo import demo_model_path
from nanoinfer.entrypoints.cli.flags import add_flags, add_model, given, model_of, new_parser
from nanoinfer.entrypoints.openai.config import ServerConfig

DEMO_NAME = "nanoinfer-demo"


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    parser = new_parser(subparsers, "serve", "Serve a model over OpenAI's HTTP API", "The page at / chats with it.")
    add_model(parser)
    add_flags(parser, ServerConfig, "server")
    add_flags(parser, EngineConfig, "engine", exclude=["model"])
    parser.set_defaults(run=run)
    return parser


def server_config(args: argparse.Namespace) -> ServerConfig:
    options = given(args, ServerConfig)
    if model_of(args) == str(demo_model_path()):
        options.setdefault("served_model_name", [DEMO_NAME])
    return ServerConfig(**options)


def run(args: argparse.Namespace) -> int:
    from nanoinfer.entrypoints.openai.server import run_server

    engine = given(args, EngineConfig)
    engine.pop("model", None)
    return run_server(model_of(args), engine, server_config(args))
