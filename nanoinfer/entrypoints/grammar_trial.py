"""`GrammarTrial`: whether a grammar can be compiled, found out in a process that can be killed.

llguidance bounds what a grammar costs per token, but not what some schemas cost to compile (an intersection of thirty
patterns takes hours), and a thread cannot be ended. So each grammar is compiled in a child process first, under a
deadline and a limit of memory; only what has passed is compiled again where it is used.
"""

from __future__ import annotations

import json
import select
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import Any

_PROGRAM = Path(__file__).with_name("grammar_worker.py")
# So that it imports what this process imports, wherever that is installed.
_BOOT = """
import json, runpy, sys
program, sys.path[:] = sys.argv.pop(1), json.loads(sys.argv.pop(1))
runpy.run_path(program, run_name="__main__")
"""
_START_SECONDS = 60.0
_BROKEN = "the grammar broke the compiler, or needs too much memory; make it simpler"


class GrammarTrial:
    """A child process, started when it is first needed, and again after it had to be killed.

    For one thread at a time; `close` is for any. tokenizer: what LLTokenizer is made of, with tags or without: the
    text and the keywords.
    """

    def __init__(self, tokenizer: Callable[[bool], tuple[str, dict[str, Any]]]) -> None:
        self._tokenizer = tokenizer
        self._process: subprocess.Popen[bytes] | None = None
        self._has_tokenizer: set[bool] = set()
        self._is_closed = False

    def run(self, source: str, with_tags: bool, timeout: float) -> None:
        """Raises ValueError if the grammar is wrong, or does not compile in time or within the limit of memory."""
        try:
            if self._process is None or self._process.poll() is not None:
                self._start()
            if with_tags not in self._has_tokenizer:  # made once, and no part of what the deadline is for
                text, options = self._tokenizer(with_tags)
                self._ask({"with_tags": with_tags, "tokenizer": text, "options": options}, _START_SECONDS)
                self._has_tokenizer.add(with_tags)
            error = self._ask({"with_tags": with_tags, "source": source}, timeout)
        except BaseException:
            self._end()
            raise
        if error is not None:
            raise ValueError(f"the grammar is not usable: {first_line(error)}")

    def close(self) -> None:
        """Whoever waits for an answer gets an error."""
        self._is_closed = True
        self._end()

    def _start(self) -> None:
        self._end()
        if self._is_closed:
            raise ValueError("no grammar is compiled any more: the server ends")
        command = [sys.executable, "-I", "-c", _BOOT, str(_PROGRAM), json.dumps(sys.path)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def _ask(self, item: dict[str, Any], timeout: float) -> str | None:
        """The answer to a line. Raises ValueError if there is no answer in time, or never will be."""
        process = self._process
        if process is None or process.stdout is None:
            raise ValueError(_BROKEN)
        deadline = monotonic() + timeout
        self._write(process, item)
        if not select.select([process.stdout], [], [], max(0.0, deadline - monotonic()))[0]:
            raise ValueError(f"the grammar took more than {timeout:g} s to compile; make it simpler")
        line = process.stdout.readline()
        if not line:
            raise ValueError(_BROKEN)
        error: str | None = json.loads(line)
        return error

    def _write(self, process: subprocess.Popen[bytes], item: dict[str, Any]) -> None:
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps(item, ensure_ascii=False).encode() + b"\n")
            process.stdin.flush()
        except OSError as error:
            raise ValueError(_BROKEN) from error

    def _end(self) -> None:
        process, self._process = self._process, None
        self._has_tokenizer = set()
        if process is not None:
            process.kill()
            process.wait()


def first_line(message: str) -> str:
    """Of an error of llguidance's; without the list of all special tokens that it adds to some."""
    first = message.strip().splitlines()[0] if message.strip() else "unknown error"
    return first.partition("; following special tokens are available")[0]
