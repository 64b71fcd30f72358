"""`Traces`: OpenTelemetry's spans of requests, where `--otlp-traces-endpoint` asks for them; else nothing is imported.

A span has the attributes of OpenTelemetry's semantic conventions for generative AI, and vLLM's latencies. What was said
is in no span.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol
from urllib.parse import urlsplit

from starlette.datastructures import Headers

from tandem.engine.protocol import GenerateRequest, SamplingSettings, TokenOutput
from tandem.errors import ConfigError
from tandem.flags.engine_config import EngineConfig

log = logging.getLogger("tandem.server")

CLOSE_SECONDS = 2.0  # for a collector that takes the last spans
_USUAL = "http://localhost:4318/v1/traces"
_CHATS = ("/v1/chat/", "/v1/messages", "/v1/responses", "/api/chat")


class Span(Protocol):
    """Trace of the work that one HTTP request asks of the engine."""

    def add(self, outputs: Sequence[TokenOutput]) -> None: ...
    def failed(self, error: Exception) -> None: ...
    def end(self) -> None:
        """Once or more often."""
        ...


class Traces(Protocol):
    def begin(self, path: str, headers: Headers, requests: Sequence[GenerateRequest]) -> Span: ...
    def close(self) -> None:
        """Sends what has not been sent, to a collector that takes it soon."""
        ...


class _NoTraces:
    """Where nobody asked for spans: both in one."""

    def begin(self, path: str, headers: Headers, requests: Sequence[GenerateRequest]) -> Span:
        return self

    def close(self) -> None: ...
    def add(self, outputs: Sequence[TokenOutput]) -> None: ...
    def failed(self, error: Exception) -> None: ...
    def end(self) -> None: ...


def traces_of(config: EngineConfig, model: Callable[[], str]) -> Traces:
    """model: the name that answers have. Raises ConfigError where the packages are missing, or the endpoint cannot be
    one."""
    if config.otlp_traces_endpoint is None:
        return _NoTraces()
    _check(config.otlp_traces_endpoint)
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        message = f"--otlp-traces-endpoint needs more packages ({error}): pip install 'tandem-moe[otel]'"
        raise ConfigError(message) from error
    return OpenTelemetry(BatchSpanProcessor(OTLPSpanExporter(config.otlp_traces_endpoint)), model)


def _check(endpoint: str) -> None:
    """The endpoint is in no message: it may hold a password."""
    try:
        url = urlsplit(endpoint)
        possible = url.scheme in ("http", "https") and url.hostname and url.port != 0
    except ValueError:  # no port is a word, or larger than 65535
        possible = False
    if not possible:
        raise ConfigError(f"--otlp-traces-endpoint must be http:// or https:// and a host, such as {_USUAL}")
    if url.path in ("", "/"):
        log.warning("--otlp-traces-endpoint has no path; OTLP over HTTP is usually %s", _USUAL)


def shown_endpoint(endpoint: str) -> str:
    """Without what may be secret: user, password, query. endpoint: one that a server was started with."""
    url = urlsplit(endpoint)
    return url._replace(netloc=url.netloc.rpartition("@")[2], query="", fragment="").geturl()


class OpenTelemetry:
    """Implements `Traces`."""

    def __init__(self, processor: Any, model: Callable[[], str]) -> None:
        """processor: an OpenTelemetry SpanProcessor, which takes spans that have ended."""
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        # Not at exit: that would wait as long as it likes.
        resource = Resource.create({SERVICE_NAME: "tandem"})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("tandem.server")
        self._parent_of, self._model = TraceContextTextMapPropagator().extract, model

    def begin(self, path: str, headers: Headers, requests: Sequence[GenerateRequest]) -> Span:
        """A child of the span that `traceparent` names."""
        from opentelemetry.trace import SpanKind

        kind = "chat" if path.startswith(_CHATS) else "text_completion"
        model = self._model()
        attributes = {
            "gen_ai.operation.name": kind, "gen_ai.provider.name": "tandem", "gen_ai.request.model": model,
            "gen_ai.response.model": model, "gen_ai.response.id": requests[0].id, **_attributes(requests[0].sampling),
        }  # fmt: skip
        parent = self._parent_of(carrier=dict(headers))
        span = self._tracer.start_span(f"{kind} {model}", parent, SpanKind.SERVER, attributes)
        return _RequestSpan(span)

    def close(self) -> None:
        """The SDK itself would wait half a minute for a collector that does not answer."""
        ending = threading.Thread(target=self._provider.shutdown, name="traces-end", daemon=True)
        ending.start()
        ending.join(CLOSE_SECONDS)


class _RequestSpan:
    def __init__(self, span: Any) -> None:
        self._span, self._began = span, time.monotonic()
        self._reasons: list[str] = []
        self._prompts: dict[str, int] = {}
        self._tokens: dict[tuple[str, int], int] = {}
        self._first = True

    def add(self, outputs: Sequence[TokenOutput]) -> None:
        for output in outputs:
            self._prompts[output.id] = max(self._prompts.get(output.id, 0), output.prompt_tokens)
            key = output.id, output.index
            self._tokens[key] = max(self._tokens.get(key, 0), output.completion_tokens)
            if output.finish_reason is not None:
                self._reasons.append(output.finish_reason)
            if output.first_token is not None and self._first:
                self._first = False
                self._span.set_attribute("gen_ai.latency.time_in_queue", output.first_token.queue)
                self._span.set_attribute("gen_ai.latency.time_in_model_prefill", output.first_token.prefill)
                self._span.set_attribute("gen_ai.latency.time_to_first_token", time.monotonic() - self._began)

    def failed(self, error: Exception) -> None:
        from opentelemetry.trace import Status, StatusCode

        self._span.set_attribute("error.type", type(error).__name__)
        self._span.set_status(Status(StatusCode.ERROR, type(error).__name__))

    def end(self) -> None:
        """An SDK's span takes no attributes once it has ended."""
        if not self._span.is_recording():
            return
        self._span.set_attribute("gen_ai.response.finish_reasons", self._reasons)
        self._span.set_attribute("gen_ai.usage.input_tokens", sum(self._prompts.values()))
        self._span.set_attribute("gen_ai.usage.output_tokens", sum(self._tokens.values()))
        self._span.set_attribute("gen_ai.latency.e2e", time.monotonic() - self._began)
        self._span.end()


def _attributes(sampling: SamplingSettings) -> dict[str, Any]:
    """Only what says something."""
    attributes = {
        "max_tokens": sampling.max_tokens, "temperature": sampling.temperature, "top_p": sampling.top_p,
        "top_k": sampling.top_k if sampling.top_k > 0 else None, "seed": sampling.seed,
        "frequency_penalty": sampling.frequency_penalty or None,
        "presence_penalty": sampling.presence_penalty or None,
        "choice.count": sampling.n if sampling.n > 1 else None,
    }  # fmt: skip
    return {f"gen_ai.request.{name}": value for name, value in attributes.items() if value is not None}
