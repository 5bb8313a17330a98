"""A server under load, and its end: many streams with random aborts, signals, and an engine that dies."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit import ROOT, checkpoint, wait_until
from server_kit import DEMO, ENGINE, ScriptedLLM, demo_llm, events, running, tiny_llm

from nanoinfer import LLM, SamplingParams
from nanoinfer.bench import serving
from nanoinfer.bench.client import Client, HTTPError
from nanoinfer.entrypoints.openai.config import ServerConfig
from nanoinfer.entrypoints.openai.server import run_server

NUM_STREAMS = 64
CHAT = {"messages": [{"role": "user", "content": "hi"}]}
LONG = {"prompt": "1, 2,", "ignore_eos": True, "max_tokens": 900, "temperature": 0}


def test_many_streams_with_random_aborts_get_what_they_would_get_alone(request: pytest.FixtureRequest) -> None:
    """64 at a time over a pool that makes them preempt each other; --load-requests makes it longer."""
    total = request.config.getoption("--load-requests")
    rng = random.Random(0)
    model = checkpoint(tokenizer=True)
    prompts = [[rng.randrange(3, 250) for _ in range(rng.randint(1, 40))] for _ in range(24)]
    params = [
        SamplingParams(temperature=rng.choice([0, 1.0]), seed=i, max_tokens=rng.randint(1, 60), ignore_eos=True)
        for i in range(len(prompts))
    ]
    with LLM(str(model.directory), **{**ENGINE, "kvcache_block_size": 8}) as llm:
        expected = [output.token_ids for output in llm.generate(prompts, params, use_tqdm=False)]

    llm = tiny_llm(model.directory, num_kvcache_blocks=40, max_num_seqs=32, max_num_batched_tokens=64)
    counts = {"whole": 0, "aborted": 0}
    process = psutil.Process()
    with running(llm, max_waiting=1000, generation_config="none") as server:
        client = Client(server.url)

        async def one(rng: random.Random) -> None:
            which = rng.randrange(len(prompts))
            body = {
                "prompt": prompts[which], "temperature": params[which].temperature, "seed": params[which].seed,
                "max_tokens": params[which].max_tokens, "ignore_eos": True, "stream": True, "return_token_ids": True,
            }  # fmt: skip
            stop_after = rng.randint(0, 20) if rng.random() < 0.4 else None
            found: list[int] = []
            stream = client.stream("/v1/completions", body)
            num_events = 0
            async for event in stream:
                found += event["choices"][0]["token_ids"]
                num_events += 1
                if stop_after is not None and num_events > stop_after:
                    await stream.aclose()
                    assert found == expected[which][: len(found)]
                    counts["aborted"] += 1
                    return
            assert found == expected[which]
            counts["whole"] += 1

        async def load(num_requests: int, seed: int) -> None:
            left = iter(range(num_requests))

            async def worker(index: int) -> None:
                rng = random.Random(1000 * seed + index)
                for _ in left:
                    await one(rng)

            await asyncio.gather(*(worker(i) for i in range(NUM_STREAMS)))

        async def settled() -> None:
            while (await asyncio.to_thread(llm.stats)).num_running or server.server.gate.num_active:
                await asyncio.sleep(0.01)
            await llm.check_health()

        asyncio.run(load(NUM_STREAMS, 0))  # what is made once and kept is there after this
        server.call(settled)
        gc.collect()
        files, memory = process.num_fds(), process.memory_info().rss
        asyncio.run(load(total, 1))
        server.call(settled)
        gc.collect()
        assert counts["whole"] > total / 3 and counts["aborted"] > total / 10
        assert llm.stats().num_preemptions > 0 and llm.stats().finished["abort"] > 0
        assert llm.stats().kv_cache_usage == 0 and llm.stats().num_waiting == 0
        assert process.num_fds() <= files + 8
        assert process.memory_info().rss - memory < 64 * 2**20
        assert not llm._loop._mailboxes and not llm._loop._live
    assert_idle_scheduler(llm)


def assert_idle_scheduler(llm: Any) -> None:
    scheduler = llm._engine.scheduler
    scheduler.check()
    assert scheduler.block_manager.num_free_blocks == scheduler.config.num_blocks


def test_a_full_queue_is_a_429_and_others_go_on() -> None:
    llm = demo_llm(max_waiting=2, max_num_seqs=1)
    with running(llm) as server:

        async def flood() -> list[int]:
            client = Client(server.url)

            async def one() -> int:
                try:
                    return len(
                        [
                            event
                            async for event in client.stream(
                                "/v1/completions", {**LONG, "max_tokens": 200, "stream": True}
                            )
                        ]
                    )
                except HTTPError as error:
                    assert json.loads(error.body)["error"]["code"] == "queue_full"
                    return error.status

            return await asyncio.gather(*(one() for _ in range(12)))

        found = asyncio.run(flood())
    assert 429 in found and any(number != 429 for number in found)


def test_a_client_that_hangs_up_frees_its_request() -> None:
    llm = demo_llm()
    with running(llm) as server, server.client() as client:
        for stream in (True, False):
            before = llm.stats().finished["abort"]
            sock = socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1])))
            body = json.dumps({**LONG, "stream": stream}).encode()
            head = (
                "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                f"Content-Length: {len(body)}\r\n\r\n"
            )
            sock.sendall(head.encode() + body)
            wait_until(lambda: llm.stats().num_running == 1, "running")
            sock.close()
            wait_until(lambda: llm.stats().finished["abort"] == before + 1, "aborted")  # noqa: B023
            assert llm.stats().num_running == 0
        assert client.get("/health").status_code == 200


def test_headers_are_bounded() -> None:
    with running(ScriptedLLM()) as server:
        sock = socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1])), timeout=20)
        answer = b""
        with sock, contextlib.suppress(ConnectionError):  # it may hang up while the rest is still being sent
            sock.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Long: ")
            for _ in range(64):
                sock.sendall(b"x" * 4096)
            sock.sendall(b"\r\n\r\n")
            answer = sock.recv(4096)
        assert not answer or answer.startswith(b"HTTP/1.1 400")
        with server.client() as client:
            assert client.get("/health").status_code == 200


def test_the_benchmark_of_serving_counts_what_it_asked_for() -> None:
    with running(demo_llm()) as server:
        client = Client(server.url)
        timing = serving.timing_of(asyncio.run(serving.send(client, [5, 6, 7], 6)), 6)
        assert timing.num_tokens == 6 and 1 <= len(timing.event_seconds) <= 7
        assert timing.event_seconds == sorted(timing.event_seconds)
        with pytest.raises(HTTPError, match="1024 tokens long"):
            serving.timing_of(asyncio.run(serving.send(client, [5], 5000)), 5000)
    ordered = [float(i) for i in range(100)]
    assert [serving.percentile(ordered, q) for q in (0, 0.5, 0.99, 1)] == [0, 50, 99, 99]


@settings(max_examples=50, deadline=None)
@given(lens=st.lists(st.integers(1, 40), min_size=1, max_size=12), budget=st.integers(1, 64))
def test_first_tokens_come_as_fast_as_the_budget_lets_prompts_be_read(lens: list[int], budget: int) -> None:
    """With steps of a second each: the number of steps that hold the prompts up to and with one's own."""
    total = sum(lens)
    steps = [(min(budget, total - start), 1.0) for start in range(0, total, budget)]
    found = serving.first_token_seconds(lens, [*steps, (0, 1.0)])
    assert found == [-(-sum(lens[: i + 1]) // budget) for i in range(len(lens))]


# --- The end -----------------------------------------------------------------------------------------------------


def test_draining_lets_requests_finish_and_refuses_new_ones() -> None:
    llm = ScriptedLLM(lambda prompt, i: "word " * 40)
    llm.pause = 0.02
    results: list[httpx.Response] = []
    with running(llm, shutdown_timeout=60) as server, server.client() as client:
        body = {**CHAT, "stream": True}
        thread = threading.Thread(target=lambda: results.append(client.post("/v1/chat/completions", json=body)))
        thread.start()
        wait_until(lambda: len(llm.requests) == 1, "one request there")
        server.loop.call_soon_threadsafe(server.server.stop)
        wait_until(lambda: server.server.gate.is_draining, "draining")
        refused = client.post("/v1/chat/completions", json=CHAT)
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "shutting_down"
        assert not results and client.get("/health").status_code == 503
        thread.join(30)
    found = events(results[0].text)
    assert found[-1] == "[DONE]" and found[-2]["choices"][0]["finish_reason"] == "stop"
    assert server.server.exit_code == 0


@contextlib.contextmanager
def served(*flags: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The command in a process of its own, and its address."""
    command = [sys.executable, "-m", "nanoinfer", "serve", "--port", "0", "--num-kvcache-blocks", "64", *flags]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    lines: list[str] = []
    try:
        assert process.stderr is not None
        for line in process.stderr:
            lines.append(line)
            if match := re.search(r"Serving .* at (http://\S+) ", line):
                break
        else:
            pytest.fail("".join(lines))
        drain = threading.Thread(target=lambda: lines.extend(process.stderr or ()), daemon=True)
        drain.start()
        yield process, match[1]
    finally:
        process.kill()
        process.wait()


def streamed(url: str, into: list[str], started: threading.Event) -> None:
    """A long stream, as raw text; tells when its first tokens have come."""
    body = {**LONG, "stream": True}
    with httpx.Client(timeout=60) as client, client.stream("POST", f"{url}/v1/completions", json=body) as response:
        for text in response.iter_text():
            into.append(text)
            started.set()


@pytest.mark.parametrize(
    ("number", "code", "ending"),
    [(signal.SIGTERM, 0, "abort"), (signal.SIGKILL, 1, "engine_dead"), (signal.SIGSTOP, 1, "engine_dead")],
)
def test_the_process_ends_in_seconds_and_leaves_no_child(number: int, code: int, ending: str) -> None:
    """SIGTERM to the server: its requests are aborted. A rank that dies or hangs: they are told, and the code is 1."""
    flags = ["--step-timeout", "3"] if number == signal.SIGSTOP else []
    with served(*flags) as (process, url):
        children = psutil.Process(process.pid).children(recursive=True)
        ranks = [
            child for child in children if "multiprocessing" in " ".join(child.cmdline()) or "rank" in child.name()
        ]
        assert children
        texts: list[str] = []
        wholes: list[httpx.Response] = []
        started = threading.Event()
        threads = [
            threading.Thread(target=streamed, args=(url, texts, started)),
            threading.Thread(target=lambda: wholes.append(httpx.post(f"{url}/v1/completions", json=LONG, timeout=60))),
        ]
        for thread in threads:
            thread.start()
        assert started.wait(60)
        wait_until(lambda: num_running(httpx.get(f"{url}/metrics").text) == 2, "two running")
        if number == signal.SIGTERM:
            process.send_signal(number)
        else:
            for rank in ranks or children:
                os.kill(rank.pid, number)
        assert process.wait(20) == code
        for thread in threads:
            thread.join(20)
            assert not thread.is_alive()
        found, (whole,) = events("".join(texts)), wholes
        if ending == "abort":
            assert found[-2]["choices"][0]["finish_reason"] == "abort" and found[-1] == "[DONE]"
            assert whole.status_code == 200 and whole.json()["choices"][0]["finish_reason"] == "abort"
        else:
            assert found[-1]["error"]["code"] == ending
            assert whole.status_code == 503 and whole.json()["error"]["code"] == ending
        _, alive = psutil.wait_procs(children, timeout=10)
        assert not alive


def num_running(metrics: str) -> float:
    match = re.search(r"^nanoinfer:num_requests_running\{.*\} (\S+)$", metrics, re.M)
    return float(match[1]) if match else -1


def test_a_grammar_that_compiles_for_ever_does_not_hold_up_the_end() -> None:
    patterns = [{"type": "string", "pattern": f"^.*a.{{{i}}}$"} for i in range(1, 60)]
    body = {"prompt": "x", "structured_outputs": {"json": {"allOf": patterns}}}
    results: list[httpx.Response] = []

    def compilers() -> list[psutil.Process]:
        children = psutil.Process().children()
        return [child for child in children if any("grammar_worker" in word for word in child.cmdline())]

    before = len(compilers())
    with running(ScriptedLLM(), grammar_timeout=600) as server, server.client() as client:
        thread = threading.Thread(target=lambda: results.append(client.post("/v1/completions", json=body)))
        thread.start()
        wait_until(lambda: len(compilers()) > before, "compiling")
        server.loop.call_soon_threadsafe(server.server.stop)
        thread.join(30)
        assert not thread.is_alive()
    assert results[0].status_code == 400 and len(compilers()) == before


def test_who_reads_that_it_serves_may_connect_and_stop_it_at_once() -> None:
    connections: list[socket.socket] = []

    class Reader(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if match := re.search(r"Serving .* at http://127.0.0.1:(\d+) ", record.getMessage()):
                connections.append(socket.create_connection(("127.0.0.1", int(match[1])), timeout=20))
                signal.raise_signal(signal.SIGTERM)

    reader, log = Reader(), logging.getLogger("nanoinfer.entrypoints.openai.server")
    level = log.level
    log.addHandler(reader)
    log.setLevel(logging.INFO)
    try:
        assert run_server(DEMO, ENGINE, ServerConfig(port=0)) == 0
    finally:
        log.removeHandler(reader)
        log.setLevel(level)
    (connection,) = connections
    with connection, contextlib.suppress(ConnectionError):
        assert connection.recv(1) == b"", "the server has hung up"


def test_a_port_in_use_is_told_before_the_model_is_loaded() -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        port = str(sock.getsockname()[1])
        command = [sys.executable, "-m", "nanoinfer", "serve", "--port", port]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.returncode == 1 and f"port {port}" in done.stderr and "KV pool" not in done.stderr
