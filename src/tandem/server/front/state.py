"""`FrontState`: what the gate and the routes of a front need, and its metrics."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.parser import text_string_to_metric_families

from tandem.errors import EngineError
from tandem.flags.engine_config import EngineConfig
from tandem.server.front.child import Life
from tandem.server.front.models import Models


class GateCounters:
    """A front's counters of its own requests."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.http_active = Gauge("tandem_front_http_active", "Requests in progress", registry=self.registry)
        self._responses = Counter(
            "tandem_front_http_responses", "Responses by status", ["status"], registry=self.registry
        )

    def responded(self, status: int) -> None:
        self._responses.labels(str(status)).inc()

    def text(self, accept: str) -> tuple[bytes, str]:
        """As Prometheus reads it, and its media type."""
        encode, media_type = choose_encoder(accept)
        return encode(self.registry), media_type


class FrontMetrics(GateCounters):
    """The front's own numbers, and those of every loaded model with its name as a label."""

    def __init__(self, models: Models) -> None:
        super().__init__()
        self._models = models

    async def render(self, accept: str) -> tuple[bytes, str]:
        """The text and its media type. A model that is not loaded has no numbers, and is not loaded for them."""
        families = [*self.registry.collect(), *_of_models(self._models)]
        for child in self._models.loaded():
            with contextlib.suppress(EngineError):
                text = (await child.wire.get("/metrics"))[1].decode()
                families += (_labelled(family, child.name) for family in text_string_to_metric_families(text))
        registry = CollectorRegistry()
        registry.register(_Merged(families))
        encode, media_type = choose_encoder(accept)
        return encode(registry), media_type


class _Merged:
    """Families of one name are one."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families: dict[str, Metric] = {}
        for family in families:
            mine = self._families.setdefault(
                family.name, Metric(family.name, family.documentation, family.type)
            )
            mine.samples += family.samples

    def collect(self) -> Iterator[Metric]:
        yield from self._families.values()


def _labelled(family: Metric, model: str) -> Metric:
    metric = Metric(family.name, family.documentation, family.type)
    metric.samples = [
        sample._replace(labels={**sample.labels, "model": model}) for sample in family.samples
    ]
    return metric


def _of_models(models: Models) -> Iterator[Metric]:
    loaded = GaugeMetricFamily("tandem_front_model_loaded", "1 while the model is loaded", labels=["model"])
    loads = CounterMetricFamily("tandem_front_model_loads", "Times that it was loaded", labels=["model"])
    active = GaugeMetricFamily("tandem_front_model_requests", "Requests that it has or waits for", labels=["model"])
    for child in models.all():
        loaded.add_metric([child.name], float(child.life is Life.LOADED))
        loads.add_metric([child.name], child.loads)
        active.add_metric([child.name], child.in_flight)
    yield from (loaded, loads, active)


class FrontState:
    """Implements `Gated`."""

    def __init__(self, config: EngineConfig, models: Models) -> None:
        self.config = config
        self.models = models
        self.metrics = FrontMetrics(models)
        self.started_at = int(time.time())
        self.http_active = 0
        self.draining = False


