"""`nanoinfer chat [MODEL]`: a conversation in the terminal, with the engine in this process."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import logging
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, TextIO

from nanoinfer.config import EngineConfig
from nanoinfer.entrypoints.chat_template import ChatTemplate
from nanoinfer.entrypoints.cli.flags import add_flags, add_model, given, model_of, new_parser
from nanoinfer.entrypoints.parsers.reasoning import ReasoningParser, state_after_prompt
from nanoinfer.llm import LLM
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.step import StepStats

NOT_FLAGS = (
    "seed",
    "n",
    "prompt_logprobs",
    "logprobs",
    "output_kind",
    "logit_bias",
    "detokenize",
    "skip_special_tokens",
)
HELP = """/think     think before answering, or not (a switch)
/reset     forget the conversation
/system T  set the system prompt and forget the conversation
/help      this
/exit      leave (or Ctrl-D); Ctrl-C stops an answer
"""


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    parser = new_parser(subparsers, "chat", "Chat with a model in the terminal")
    add_model(parser)
    parser.add_argument("--system", default="", metavar="TEXT", help="the system prompt")
    parser.add_argument("--think", action=argparse.BooleanOptionalAction, default=True, help="think before answering")
    add_flags(parser, SamplingParams, "sampling", exclude=NOT_FLAGS)
    add_flags(parser, EngineConfig, "engine", exclude=["model"])
    parser.set_defaults(run=run)
    return parser


def sampling_params(args: argparse.Namespace, llm: LLM, **defaults: Any) -> SamplingParams:
    """The flags', over the model's own."""
    options = {name: value for name, value in given(args, SamplingParams).items() if name != "seed"}
    return dataclasses.replace(llm.get_default_sampling_params(), **{**defaults, **options})


class Session:
    """One conversation. `handle` takes a line that the user has typed, and returns whether to go on."""

    def __init__(
        self, llm: LLM, params: SamplingParams, system: str = "", think: bool = True, out: TextIO = sys.stdout
    ) -> None:
        self._llm, self._params, self._out = llm, params, out
        tokenizer = llm.get_tokenizer()
        if tokenizer is None or not tokenizer.chat_template:
            raise ValueError("chat needs a checkpoint with a tokenizer and a chat template; try nanoinfer generate")
        self._template = ChatTemplate(tokenizer)
        self._system, self._think = system, think
        self.messages: list[dict[str, str]] = []
        self._dim, self._plain = ("\033[2m", "\033[0m") if out.isatty() else ("", "")
        self._has_thought = False  # since the last content
        self.reset()

    def reset(self) -> None:
        self.messages = [{"role": "system", "content": self._system}] if self._system else []

    def handle(self, line: str) -> bool:
        command, _, rest = line.strip().partition(" ")
        if command in ("/exit", "/quit"):
            return False
        if command == "/help":
            self._say(HELP)
        elif command == "/reset":
            self.reset()
            self._say("The conversation is forgotten.\n")
        elif command == "/system":
            self._system = rest
            self.reset()
            self._say("A new conversation begins.\n")
        elif command == "/think":
            self._think = not self._think
            self._say(f"It {'thinks before it answers' if self._think else 'answers at once'}.\n")
        elif command.startswith("/"):
            self._say(f"{command} is no command.\n{HELP}")
        elif line.strip():
            self._answer(line.strip())
        return True

    def _answer(self, text: str) -> None:
        self.messages.append({"role": "user", "content": text})
        try:
            prompt = self._template.render(self.messages, options={"enable_thinking": self._think})
            content = self._stream(prompt.text, prompt.token_ids)
        except ValueError as error:
            self.messages.pop()
            self._say(f"{error}\n(/reset begins a new conversation)\n")
            return
        if content:
            self.messages.append({"role": "assistant", "content": content})
        else:
            self.messages.pop()

    def _stream(self, text: str, token_ids: list[int]) -> str:
        """Shows an answer as it comes; returns its content, or what there was of it at Ctrl-C."""
        parser = ReasoningParser(state_after_prompt(text))
        content = ""
        stream = self._llm.stream({"prompt": text, "prompt_token_ids": token_ids}, self._params)
        with count_tokens(self._llm) as tokens_per_second:
            try:
                for piece in stream:
                    content += self._show(*parser.feed(piece))
                content += self._show(*parser.finish())
            except KeyboardInterrupt:
                stream.close()  # type: ignore[attr-defined]
                self._say(" (stopped)")
            self._say(f"\n{self._dim}[{tokens_per_second()}]{self._plain}\n")
        return content

    def _show(self, reasoning: str, content: str) -> str:
        if reasoning:
            self._say(f"{self._dim}{reasoning}{self._plain}")
            self._has_thought = True
        if content:
            if self._has_thought:
                self._say("\n\n")
                self._has_thought = False
            self._say(content)
        return content

    def _say(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()


@contextlib.contextmanager
def count_tokens(llm: LLM) -> Iterator[Callable[[], str]]:
    """Gives a function that tells how many tokens were generated, and how fast, counted from the first one on."""
    times: list[float] = []
    numbers: list[int] = []

    def observe(stats: StepStats) -> None:
        if stats.num_sampled:
            times.append(time.perf_counter())
            numbers.append(stats.num_sampled)

    def tell() -> str:
        seconds = times[-1] - times[0] if times else 0.0
        speed = f", {sum(numbers[1:]) / seconds:.1f} tok/s" if seconds else ""
        return f"{sum(numbers)} tokens{speed}"

    previous, llm.engine.on_step = llm.engine.on_step, observe
    try:
        yield tell
    finally:
        llm.engine.on_step = previous


def run(args: argparse.Namespace) -> int:
    logging.getLogger().setLevel(logging.WARNING)
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  line editing and history for input()
    engine = given(args, EngineConfig)
    engine.pop("model", None)
    with LLM(model_of(args), **engine) as llm:
        params = sampling_params(args, llm, max_tokens=llm.model_config.max_model_len)
        session = Session(llm, params, args.system, args.think)
        print(f"{model_of(args)}: say something, or /help")
        while True:
            try:
                line = input("> ")
            except EOFError:
                return 0
            except KeyboardInterrupt:
                print()
                continue
            if not session.handle(line):
                return 0
