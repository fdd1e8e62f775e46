"""What the service counts, and how it tells: for Prometheus, and as JSON for people and for the terminal client.

Names and buckets follow vLLM's, with our prefix, so that its dashboards need but another prefix.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry

from crucible.serve.channel import Ready, Stats

PREFIX: Final = "crucible"

_FIRST_TOKEN: Final = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_INTER_TOKEN: Final = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_REQUEST: Final = (0.005, 0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480)


class Histogram:
    """Counts of values by upper bounds."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value that occurred so many times: tokens that came at once share what they took."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def json(self) -> dict[str, Any]:
        """The counts of each bucket, not added up; the last one is of what is above all bounds."""
        return {"bounds": self._bounds, "counts": self._counts, "sum": self._sum}

    def family(self, name: str, text: str) -> HistogramMetricFamily:
        """What Prometheus is told."""
        total, buckets = 0, []
        for bound, number in zip((*map(str, self._bounds), "+Inf"), self._counts, strict=True):
            total += number
            buckets.append((bound, total))
        return HistogramMetricFamily(name, text, buckets=buckets, sum_value=self._sum)


class Metrics:
    """The HTTP process' own counters. Times are of its own clock, but for those that the engine measured itself."""

    def __init__(self) -> None:
        self.started_at = time.monotonic()
        self.prompt_tokens = self.generation_tokens = 0
        self.requests = self.cancelled = self.refused = 0
        self.finished: Counter[str] = Counter({"stop": 0, "length": 0, "error": 0})
        self.http_requests: Counter[tuple[str, str, int]] = Counter()
        self.first_token_time = Histogram(_FIRST_TOKEN)
        self.inter_token_time = Histogram(_INTER_TOKEN)
        self.request_time = Histogram(_REQUEST)
        self.queue_time = Histogram(_REQUEST)
        self.prefill_time = Histogram(_REQUEST)

    def begin(self, num_prompt_tokens: int) -> None:
        """A choice was given to the engine."""
        self.requests += 1
        self.prompt_tokens += num_prompt_tokens

    def end(self, finish_reason: str, seconds: float) -> None:
        """A choice has ended by itself."""
        self.finished[finish_reason] += 1
        self.request_time.observe(seconds)

    # ---- told -----------------------------------------------------------------------------------------------------

    def text(self, ready: Ready | None, stats: Stats, in_flight: int, restarts: int) -> bytes:
        """In Prometheus' text format."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Once(self._families(ready, stats, in_flight, restarts)))
        return generate_latest(registry)

    def json(self, ready: Ready | None, stats: Stats, in_flight: int, restarts: int) -> dict[str, Any]:
        """The same for people, in short."""
        total = 0 if ready is None else ready.num_pages
        return {
            "active": stats.running,
            "prefilling": stats.prefilling,
            "queued": _waiting(stats, in_flight),
            "in_flight": in_flight,
            "completed": sum(self.finished.values()),
            "cancelled": self.cancelled,
            "refused": self.refused,
            "finished": dict(self.finished),
            "pages": {"total": total, "free": stats.free_pages, "used": total - stats.free_pages},
            "batch": {
                "last": stats.batch,
                "mean": stats.decode_rows / stats.decode_plans if stats.decode_plans else 0.0,
            },
            "tokens": {"prompt": self.prompt_tokens, "generated": self.generation_tokens},
            "steps": stats.steps,
            "prefill": {"plans": stats.prefill_plans, "chunks": stats.prefill_chunks, "rows": stats.prefill_rows},
            "decode": {"plans": stats.decode_plans, "rows": stats.decode_rows},
            "latency": {
                "first_token": self.first_token_time.json(),
                "inter_token": self.inter_token_time.json(),
                "queue": self.queue_time.json(),
            },
            "restarts": restarts,
            "uptime": time.monotonic() - self.started_at,
        }

    def _families(self, ready: Ready | None, stats: Stats, in_flight: int, restarts: int) -> Iterator[Metric]:
        total = 0 if ready is None else ready.num_pages
        used = (total - stats.free_pages) / total if total else 0.0
        gauges: list[tuple[str, str, float]] = [
            ("num_requests_running", "Requests that the engine computes.", stats.running + stats.prefilling),
            ("num_requests_prefilling", "Of these, requests whose prompt is not done.", stats.prefilling),
            ("num_requests_waiting", "Requests that wait for a slot.", _waiting(stats, in_flight)),
            ("kv_cache_usage_perc", "Share of the key/value cache's pages in use, 0 to 1.", used),
            ("kv_cache_pages", "Pages of the key/value cache.", total),
            ("batch_size", "Requests in the last step.", stats.batch),
            ("uptime_seconds", "Since the service began.", time.monotonic() - self.started_at),
        ]
        for name, text, value in gauges:
            yield GaugeMetricFamily(f"{PREFIX}:{name}", text, value=value)
        counters = [
            ("prompt_tokens", "Tokens of prompts taken.", self.prompt_tokens),
            ("generation_tokens", "Tokens delivered.", self.generation_tokens),
            ("requests", "Requests taken.", self.requests),
            ("requests_cancelled", "Requests that ended before they were done.", self.cancelled),
            ("requests_refused", "Requests for which there was no room.", self.refused),
            ("engine_restarts", "Engines started after the first.", restarts),
            ("engine_steps", "Steps of this engine.", stats.steps),
            ("prefill_plans", "Steps with rows of prompts.", stats.prefill_plans),
            ("prefill_chunks", "Chunks of prompts in them.", stats.prefill_chunks),
            ("prefill_rows", "Tokens of prompts in them.", stats.prefill_rows),
            ("decode_plans", "Steps with rows of running requests.", stats.decode_plans),
            ("decode_rows", "Rows of running requests in them.", stats.decode_rows),
        ]
        for name, text, number in counters:
            yield CounterMetricFamily(f"{PREFIX}:{name}", text, value=number)
        success = CounterMetricFamily(f"{PREFIX}:request_success", "Requests by end.", labels=["finished_reason"])
        for reason, number in self.finished.items():
            success.add_metric([reason], number)
        yield success
        http = CounterMetricFamily("http_requests", "HTTP requests.", labels=["handler", "method", "status"])
        for (handler, method, status), number in self.http_requests.items():
            http.add_metric([handler, method, str(status)], number)
        yield http
        yield self.first_token_time.family(f"{PREFIX}:time_to_first_token_seconds", "To the first token.")
        yield self.inter_token_time.family(f"{PREFIX}:inter_token_latency_seconds", "Between tokens.")
        yield self.request_time.family(f"{PREFIX}:e2e_request_latency_seconds", "Of a request.")
        yield self.queue_time.family(f"{PREFIX}:request_queue_time_seconds", "Waiting for a slot.")
        yield self.prefill_time.family(f"{PREFIX}:request_prefill_time_seconds", "From slot to first token.")


def _waiting(stats: Stats, in_flight: int) -> int:
    """Requests that are neither computed nor done, on the way to the engine or in its queue."""
    return max(0, in_flight - stats.running - stats.prefilling)


class _Once(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = list(families)

    def collect(self) -> Iterable[Metric]:
        return self._families
