"""`nanoinfer generate [MODEL]`: completes prompts from flags, a file or standard input, all of them at once."""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import sys
from pathlib import Path
from typing import Any

from nanoinfer.config import EngineConfig
from nanoinfer.entrypoints.cli.chat import sampling_params
from nanoinfer.entrypoints.cli.flags import add_flags, add_model, given, model_of, new_parser
from nanoinfer.llm import LLM
from nanoinfer.sampling_params import SamplingParams

NOT_FLAGS = ("seed", "output_kind", "prompt_logprobs", "logit_bias", "detokenize")


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    parser = new_parser(
        subparsers, "generate", "Complete prompts", "Without --prompt and --file, standard input is one prompt."
    )
    add_model(parser)
    parser.add_argument("-p", "--prompt", action="append", metavar="TEXT", help="a prompt; may be given several times")
    parser.add_argument("--file", metavar="FILE", help="a file with one prompt per line")
    parser.add_argument("--chat", action="store_true", help="a prompt is a user's message, put in the chat template")
    parser.add_argument("--json", action="store_true", help="one line of JSON per prompt instead of the text")
    add_flags(parser, SamplingParams, "sampling", exclude=NOT_FLAGS)
    add_flags(parser, EngineConfig, "engine", exclude=["model"])
    parser.set_defaults(run=run)
    return parser


def prompts_of(args: argparse.Namespace) -> list[str]:
    prompts = list(args.prompt or [])
    if args.file is not None:
        prompts += [line for line in Path(args.file).read_text(encoding="utf-8").splitlines() if line.strip()]
    if args.prompt is None and args.file is None:
        prompts = [sys.stdin.read()]
    if not any(prompts):
        raise ValueError("there is no prompt; give --prompt TEXT, --file FILE or text on standard input")
    return prompts


def run(args: argparse.Namespace) -> int:
    logging.getLogger().setLevel(logging.WARNING)
    prompts = prompts_of(args)
    engine = given(args, EngineConfig)
    engine.pop("model", None)
    with LLM(model_of(args), **engine) as llm:
        params = sampling_params(args, llm)
        if args.chat:
            outputs = llm.chat([[{"role": "user", "content": prompt}] for prompt in prompts], params)
        else:
            outputs = llm.generate(prompts, params)
    for prompt, output in zip(prompts, outputs, strict=True):
        if args.json:
            completions = [dataclasses.asdict(completion) for completion in output.outputs]
            print(json.dumps({"prompt": prompt, "outputs": completions}, ensure_ascii=False))
            continue
        for completion in output.outputs:
            print(completion.text)
    return 0
