"""`/metrics` in Prometheus' text format. Counters are kept here; what the engine knows is read at each scrape."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder

from tandem.engine.protocol import EngineStats, ExpertStats

_TTFT_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_ITL_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2, 5)
_E2E_SECONDS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)

_GAUGES = {
    "running": ("running", "Sequences in the current batch"),
    "waiting": ("waiting", "Sequences waiting for a place"),
    "pages": ("pages_total", "KV cache pages"),  # a gauge must not be called …_total
    "pages_free": ("pages_free", "KV cache pages that a new request could have"),
    "pages_cached": ("pages_cached", "KV cache pages that only the prefix cache holds"),
}
_COUNTERS = {
    "prompt_tokens": "Prompt tokens",
    "cached_tokens": "Prompt tokens taken from the prefix cache",
    "generated_tokens": "Generated tokens",
    "preemptions": "Sequences pushed out because pages ran out",
    "steps": "Engine steps",
    "step_seconds": "Time spent in engine steps",
}


_HANDOFF = {
    "swaps": ("expert_swaps", "Experts that came to the GPU while serving"),
    "swap_rests": ("expert_swap_rests", "Times that this was paused because it did not pay"),
    "swap_seconds": (
        "expert_swap_seconds",
        "Time that the engine's thread took to decide on swaps and make them",
    ),
    "swap_wait_seconds": ("expert_swap_wait_seconds", "What the GPU may have waited of that"),
    "handoff_posts": ("handoff_posts", "Batches that the GPU handed to the CPU's experts"),
    "handoff_wait_seconds": (
        "handoff_wait_seconds",
        "Time that the CPU waited for such batches during steps",
    ),
    "handoff_serve_seconds": ("handoff_serve_seconds", "Time that the CPU computed such batches"),
    "hinted": ("expert_hints", "Experts in CPU memory that were foreseen, each once per batch and layer"),
    "hint_hits": ("expert_hint_hits", "Foreseen experts that were used"),
    "hint_bytes": (
        "expert_hint_bytes",
        "Bytes of foreseen experts fetched before they were computed",
    ),
}


class EngineCollector:
    """Turns the newest `EngineStats` into metrics. Counters restart with the engine, as Prometheus expects."""

    def __init__(
        self, stats: Callable[[], EngineStats], up: Callable[[], bool], restarts: Callable[[], int]
    ) -> None:
        self._stats = stats
        self._up = up
        self._restarts = restarts

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        yield GaugeMetricFamily("tandem_engine_up", "1 when the engine takes requests", float(self._up()))
        yield CounterMetricFamily(
            "tandem_engine_restarts", "Engine processes started again", self._restarts()
        )
        for name, (field, text) in _GAUGES.items():
            yield GaugeMetricFamily(f"tandem_{name}", text, getattr(stats, field))
        for name, text in _COUNTERS.items():
            yield CounterMetricFamily(f"tandem_{name}", text, getattr(stats, name))
        if stats.experts is not None:
            yield from _of_experts(stats.experts)


def _of_experts(stats: ExpertStats) -> Iterator[Metric]:
    tokens = CounterMetricFamily(
        "tandem_routed_tokens",
        "Tokens routed to experts, once for each expert, by where it was",
        labels=["side", "layer"],
    )
    nbytes = CounterMetricFamily(
        "tandem_expert_read_bytes",
        "Expert weights read, once per step and expert, by memory",
        labels=["side", "layer"],
    )
    for side in ("gpu", "cpu"):
        for family, kind in ((tokens, "tokens"), (nbytes, "bytes")):
            for layer, value in zip(stats.layers, getattr(stats, f"{side}_{kind}"), strict=True):
                family.add_metric([side, str(layer)], value)
    yield tokens
    yield nbytes
    text = "Share of the routed tokens, since start, whose expert was on the GPU"
    yield GaugeMetricFamily("tandem_expert_hit_rate", text, stats.hit_rate)
    for field, (name, text) in _HANDOFF.items():
        yield CounterMetricFamily(f"tandem_{name}", text, getattr(stats, field))


class ServerMetrics:
    """What the API process sees. Implements `StreamObserver`."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._answers = Counter(
            "tandem_answers", "Answers by how they ended", ["finish_reason"], registry=self.registry
        )
        self._responses = Counter(
            "tandem_http_responses", "Responses by status", ["status"], registry=self.registry
        )
        self.http_active = Gauge("tandem_http_active", "HTTP requests in progress", registry=self.registry)
        self._ttft = self._histogram(
            "time_to_first_token_seconds", "From request to first token", _TTFT_SECONDS
        )
        self._itl = self._histogram("inter_token_seconds", "Between two tokens of an answer", _ITL_SECONDS)
        self._e2e = self._histogram("answer_seconds", "From request to the end of an answer", _E2E_SECONDS)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"tandem_{name}", text, buckets=buckets, registry=self.registry)

    def watch_engine(
        self, stats: Callable[[], EngineStats], up: Callable[[], bool], restarts: Callable[[], int]
    ) -> None:
        self.registry.register(EngineCollector(stats, up, restarts))

    def first_token(self, seconds: float) -> None:
        self._ttft.observe(seconds)

    def next_token(self, seconds: float, tokens: int) -> None:
        self._itl.observe(seconds / tokens)

    def finished(self, reason: str, seconds: float) -> None:
        self._answers.labels(reason).inc()
        self._e2e.observe(seconds)

    def responded(self, status: int) -> None:
        self._responses.labels(str(status)).inc()

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """The text and its media type: OpenMetrics where `accept` asks for it."""
        encode, media_type = choose_encoder(accept)
        return encode(self.registry), media_type
