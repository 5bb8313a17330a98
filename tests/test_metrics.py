"""Metrics and the log line say what happened: they are compared with what requests were answered."""

from __future__ import annotations

from dataclasses import replace

import pytest
from prometheus_client.parser import text_string_to_metric_families
from server_kit import ScriptedLLM, demo_llm, running

from nanoinfer.engine.stats import EngineStats, FinishedRequestStats, IterationStats
from nanoinfer.entrypoints.openai.metrics import LogLine, Metrics

MESSAGES = [{"role": "user", "content": "Sort these numbers from small to large, please: 5, 3, 9, 1, 7, 2, 8, 4, 6."}]


def samples(text: str) -> dict[str, float]:
    """Samples by name, with the label that tells them apart."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            assert sample.labels["model_name"] == "demo" and sample.labels["engine"] == "0"
            extra = [sample.labels[name] for name in ("finished_reason", "le") if name in sample.labels]
            found[" ".join([sample.name, *extra])] = sample.value
    return found


def test_counters_are_the_sums_of_the_answers() -> None:
    with running(demo_llm(kvcache_block_size=16)) as server, server.client() as client:

        def read() -> dict[str, float]:
            return samples(client.get("/metrics").text)

        before = read()
        usages = []
        for extra in ({"max_tokens": 5}, {"n": 3, "max_tokens": 4}, {"temperature": 0}):
            answer = client.post(
                "/v1/chat/completions", json={"messages": MESSAGES, "ignore_eos": True, "max_tokens": 7, **extra}
            )
            usages.append(answer.json()["usage"])
        after = read()

    def rise(name: str) -> float:
        return after[f"nanoinfer:{name}"] - before[f"nanoinfer:{name}"]

    assert rise("generation_tokens_total") == sum(usage["completion_tokens"] for usage in usages) == 5 + 12 + 7
    assert rise("prompt_tokens_total") == sum(usage["prompt_tokens"] for usage in usages)
    assert usages[2]["prompt_tokens_details"]["cached_tokens"] >= 16
    assert rise("prefix_cache_hits_total") >= sum(u["prompt_tokens_details"]["cached_tokens"] for u in usages)
    assert rise("prefix_cache_queries_total") >= rise("prefix_cache_hits_total")
    assert rise("request_success_total length") == 5
    assert rise("time_to_first_token_seconds_count") == 3 == rise("request_queue_time_seconds_count")
    assert rise("inter_token_latency_seconds_count") == 5 + 12 + 7 - 5
    assert rise("e2e_request_latency_seconds_count") == 5
    assert rise("request_generation_tokens_sum") == 5 + 12 + 7
    assert rise("request_generation_tokens_bucket 4.0") == 3
    assert after["nanoinfer:num_requests_running"] == after["nanoinfer:kv_cache_usage_perc"] == 0
    assert rise("num_preemptions_total") == 0


@pytest.mark.parametrize("value", [0.0, 0.001, 0.0011, 3.0, 1e9])
def test_a_histogram_counts_upwards_from_the_value(value: float) -> None:
    metrics = Metrics(ScriptedLLM(), "demo")  # type: ignore[arg-type]
    finished = FinishedRequestStats("stop", 3, 4, 5, 1, value, None, None, None)
    metrics.observe(IterationStats(2, 1, [value], [value], [value], [finished]))
    found = samples(metrics.text().decode())
    for name in ("time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds"):
        buckets = {k.split()[1]: v for k, v in found.items() if k.startswith(f"nanoinfer:{name}_bucket")}
        assert len(buckets) > 10
        for bound, count in buckets.items():
            assert count == (value <= float(bound))
        assert found[f"nanoinfer:{name}_sum"] == value and found[f"nanoinfer:{name}_count"] == 1
    assert found["nanoinfer:iteration_tokens_total_sum"] == 3
    assert found["nanoinfer:request_prefill_time_seconds_count"] == 0, "what did not happen has no time"


def test_the_log_line_tells_what_came_since_the_last_and_is_silent_when_idle() -> None:
    now = [0.0]
    stats = [EngineStats()]
    line = LogLine(lambda: stats[0], lambda: now[0])
    now[0] = 10.0
    assert line.write() is None
    stats[0] = replace(
        stats[0], num_running=3, num_waiting=1, kv_cache_usage=0.125, prompt_tokens=5120, generation_tokens=951,
        prefix_cache_queries=200, prefix_cache_hits=122,
    )  # fmt: skip
    now[0] = 20.0
    assert line.write() == (
        "Engine 000: Avg prompt throughput: 512.0 tokens/s, Avg generation throughput: 95.1 tokens/s, "
        "Running: 3 reqs, Waiting: 1 reqs, KV cache usage: 12.5%, Prefix cache hit rate: 61.0%"
    )
    now[0] = 30.0
    again = line.write()
    assert again is not None and "Avg prompt throughput: 0.0 tokens/s" in again and "hit rate: 0.0%" in again
    stats[0] = replace(stats[0], num_running=0, num_waiting=0)
    now[0] = 40.0
    assert line.write() is None
