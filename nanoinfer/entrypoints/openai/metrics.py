"""`Metrics`: vLLM's metrics under the prefix `nanoinfer:`, in Prometheus' text form, and the periodic log line.

Counters and gauges are read from the engine when they are asked for. Histograms are fed after each step by the engine's
thread, which must not wait long: hence plain lists of counts instead of a library's locked objects.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Iterator
from threading import Lock
from time import monotonic

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from nanoinfer.async_llm import AsyncLLM
from nanoinfer.engine.stats import EngineStats, IterationStats

logger = logging.getLogger(__name__)

PREFIX = "nanoinfer:"
_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
_LATENCIES = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_REQUESTS = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
_TOKENS = tuple(2**i for i in range(18))
_NUMBERS = (1, 2, 5, 10, 20, 50, 100, 200)

_HISTOGRAMS = {
    "time_to_first_token_seconds": ("Time to first token", _SECONDS),
    "inter_token_latency_seconds": ("Time between two tokens of a completion", _LATENCIES),
    "e2e_request_latency_seconds": ("Time from a request's arrival to its end", _REQUESTS),
    "request_queue_time_seconds": ("Time that a request waited", _REQUESTS),
    "request_prefill_time_seconds": ("Time from the first step to the first token", _REQUESTS),
    "request_decode_time_seconds": ("Time from the first token to the last", _REQUESTS),
    "request_prompt_tokens": ("Tokens of a prompt", _TOKENS),
    "request_generation_tokens": ("Tokens of a completion", _TOKENS),
    "request_params_n": ("The parameter n", _NUMBERS),
    "request_params_max_tokens": ("The parameter max_tokens", _TOKENS),
    "iteration_tokens_total": ("Tokens of a step, of prompts and generated", _TOKENS),
}


class _Histogram:
    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float | None) -> None:
        if value is not None:
            self._counts[bisect_left(self._bounds, value)] += 1
            self._sum += value

    def buckets(self) -> tuple[list[tuple[str, float]], float]:
        total = 0
        cumulative = []
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            total += count
            cumulative.append(("+Inf" if bound == float("inf") else str(float(bound)), float(total)))
        return cumulative, self._sum


class Metrics:
    def __init__(self, llm: AsyncLLM, model_name: str) -> None:
        self._llm = llm
        self._labels = {"model_name": model_name, "engine": "0"}
        self._histograms = {name: _Histogram(bounds) for name, (_, bounds) in _HISTOGRAMS.items()}
        self._lock = Lock()
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        llm.stats_listeners.append(self.observe)

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def observe(self, step: IterationStats) -> None:
        histograms = self._histograms
        with self._lock:
            for value in step.time_to_first_token:
                histograms["time_to_first_token_seconds"].observe(value)
            for value in step.queue_time:
                histograms["request_queue_time_seconds"].observe(value)
            between_tokens = histograms["inter_token_latency_seconds"]
            for value in step.inter_token_latency:
                between_tokens.observe(value)
            if num_tokens := step.num_prompt_tokens + step.num_generation_tokens:
                histograms["iteration_tokens_total"].observe(num_tokens)
            for request in step.finished:
                histograms["e2e_request_latency_seconds"].observe(request.e2e_latency)
                histograms["request_prefill_time_seconds"].observe(request.prefill_time)
                histograms["request_decode_time_seconds"].observe(request.decode_time)
                histograms["request_prompt_tokens"].observe(request.num_prompt_tokens)
                histograms["request_generation_tokens"].observe(request.num_generation_tokens)
                histograms["request_params_n"].observe(request.n)
                histograms["request_params_max_tokens"].observe(request.max_tokens)

    def collect(self) -> Iterator[Metric]:
        """What Prometheus' registry calls."""
        stats = self._llm.stats()
        names = list(self._labels)
        values = list(self._labels.values())

        def gauge(name: str, text: str, value: float) -> Metric:
            family = GaugeMetricFamily(PREFIX + name, text, labels=names)
            family.add_metric(values, value)
            return family

        def counter(name: str, text: str, value: float) -> Metric:
            family = CounterMetricFamily(PREFIX + name, text, labels=names)
            family.add_metric(values, value)
            return family

        yield gauge("num_requests_running", "Sequences that run", stats.num_running)
        yield gauge("num_requests_waiting", "Sequences that wait", stats.num_waiting)
        yield gauge("kv_cache_usage_perc", "Fraction of the KV blocks in use; 1 is all", stats.kv_cache_usage)
        yield counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache", stats.prefix_cache_queries)
        yield counter("prefix_cache_hits", "Prompt tokens found in the prefix cache", stats.prefix_cache_hits)
        yield counter("num_preemptions", "Preemptions", stats.num_preemptions)
        yield counter("prompt_tokens", "Tokens of prompts", stats.prompt_tokens)
        yield counter("generation_tokens", "Tokens generated", stats.generation_tokens)
        finished = CounterMetricFamily(
            PREFIX + "request_success", "Completions that have ended", labels=[*names, "finished_reason"]
        )
        for reason, count in stats.finished.items():
            finished.add_metric([*values, reason], count)
        yield finished
        with self._lock:
            for name, histogram in self._histograms.items():
                family = HistogramMetricFamily(PREFIX + name, _HISTOGRAMS[name][0], labels=names)
                buckets, total = histogram.buckets()
                family.add_metric(values, buckets, total)
                yield family


class LogLine:
    """What has happened since the last line. now: a clock in seconds."""

    def __init__(self, stats: Callable[[], EngineStats], now: Callable[[], float] = monotonic) -> None:
        self._stats, self._now = stats, now
        self._last, self._last_time = stats(), now()

    def write(self) -> str | None:
        """None when nothing has happened and nothing runs."""
        stats, time = self._stats(), self._now()
        last, seconds = self._last, time - self._last_time
        self._last, self._last_time = stats, time

        def rate(name: str) -> float:
            return (getattr(stats, name) - getattr(last, name)) / seconds if seconds > 0 else 0.0

        generated = rate("generation_tokens")
        if not (generated or rate("prompt_tokens") or stats.num_running or stats.num_waiting):
            return None
        queries = stats.prefix_cache_queries - last.prefix_cache_queries
        hits = stats.prefix_cache_hits - last.prefix_cache_hits
        return (
            f"Engine 000: Avg prompt throughput: {rate('prompt_tokens'):.1f} tokens/s, "
            f"Avg generation throughput: {generated:.1f} tokens/s, "
            f"Running: {stats.num_running} reqs, Waiting: {stats.num_waiting} reqs, "
            f"KV cache usage: {100 * stats.kv_cache_usage:.1f}%, "
            f"Prefix cache hit rate: {100 * hits / queries if queries else 0:.1f}%"
        )
