"""The program of the child processes of grammar_trial.py: compiles grammars to see whether that comes to an end.

Lines of JSON on standard input, each with a tokenizer to make or a grammar to compile with one. For each a line comes
back, with what is wrong or null. Imports nothing of nanoinfer, so that it starts in a fraction of a second.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import sys
import threading

from llguidance import LLMatcher, LLTokenizer

MAX_MEMORY_BYTES = 4 * 2**30


def main() -> None:
    with contextlib.suppress(ImportError, ValueError, OSError):  # where there are no such limits
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=read, args=(lines,), daemon=True).start()
    tokenizers: dict[bool, LLTokenizer] = {}
    while True:
        item = json.loads(lines.get())
        error = None
        if "tokenizer" in item:
            tokenizers[item["with_tags"]] = LLTokenizer(item["tokenizer"], **item["options"])
        else:
            matcher = LLMatcher(tokenizers[item["with_tags"]], item["source"], log_level=0)
            error = matcher.get_error() if matcher.is_error() else None
        sys.stdout.write(json.dumps(error) + "\n")
        sys.stdout.flush()


def read(lines: queue.SimpleQueue[bytes]) -> None:
    """In a thread of its own, which the compiler lets run: when the parent is gone, so is this process."""
    for line in sys.stdin.buffer:
        lines.put(line)
    os._exit(0)


if __name__ == "__main__":
    main()
