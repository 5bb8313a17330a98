"""A user's script over two ranks, without a main guard. Run by test_ranks.py as

python parent_program.py MODEL_DIR LOG MODE

    leave       generates and ends, closing nothing
    collective  generates over faulty_worker.py
    thread      makes the engine in a thread that ends, generates, forks a child that keeps everything open, and waits
    fork        generates, forks a child that ends as any script does, and generates again
    interrupt   generates for ever; after a first Ctrl-C, generates once, then for ever again

Each run of this file adds a line to LOG. Prints a line of JSON for what it has generated: pairs of prompt and output.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from typing import Any

from nanoinfer import LLM, SamplingParams
from nanoinfer.executor.multiproc import MultiprocExecutor

PROMPTS = [[5, 6, 7], [300, 2]]
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
ENDLESS = SamplingParams(temperature=0, max_tokens=2000, ignore_eos=True)
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "num_kvcache_blocks": 64,
    "kvcache_block_size": 8,
    "tensor_parallel_size": 2,
    "seed": 0,
}


def say(what: object) -> None:
    print(json.dumps(what), flush=True)


def generate(llm: LLM) -> None:
    say([(output.prompt_token_ids, output.token_ids) for output in llm.generate(PROMPTS, GREEDY)])


def generate_for_ever(llm: LLM) -> None:
    say("for ever")
    while True:
        llm.generate(PROMPTS, ENDLESS)


model_dir, log, mode = sys.argv[1:]
with open(log, "a") as file:
    file.write(f"{os.getpid()}\n")
if mode == "collective":
    MultiprocExecutor.worker_module = "faulty_worker"
engines: list[LLM] = []


def make() -> None:
    engines.append(LLM(model_dir, **OPTIONS))


if mode == "thread":
    maker = threading.Thread(target=make)
    maker.start()
    maker.join()
else:
    make()
(engine,) = engines
generate(engine)
if mode == "thread":
    if os.fork() > 0:
        say("waiting")
    signal.pause()
elif mode == "fork":
    child = os.fork()
    if child == 0:
        sys.exit(0)
    os.waitpid(child, 0)
    generate(engine)
elif mode == "interrupt":
    try:
        generate_for_ever(engine)
    except KeyboardInterrupt:
        generate(engine)
    generate_for_ever(engine)
