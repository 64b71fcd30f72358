"""OpenTelemetry's spans of requests: one each, with what was asked and what it took, and never what was said."""

from __future__ import annotations

import asyncio
import dataclasses
import subprocess
import sys
import threading
import time

import pytest

import echo_engine
from quiet_clock import PATIENCE
from server_harness import LocalServer
from server_requests import CHAT, run, user
from supervision import until
from tandem.errors import ConfigError
from tandem.flags.engine_config import EngineConfig
from tandem.server.guard import traces as module
from tandem.server.guard.traces import OpenTelemetry, traces_of

sdk = pytest.importorskip("opentelemetry.sdk.trace.export")
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def traced(scenario, **flags):
    """The spans that ended while it ran."""
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()

    async def with_spans(server: LocalServer):
        server.state.traces = OpenTelemetry(sdk.SimpleSpanProcessor(exporter), lambda: "echo")
        await scenario(server)

    run(with_spans, **flags)
    return exporter.get_finished_spans()


def test_a_span_says_what_was_asked_and_what_it_took():
    async def scenario(server: LocalServer):
        body = {"messages": user("one two three"), "temperature": 0.5, "seed": 7, "n": 2, "max_tokens": 5}
        answer = await server.client.post(CHAT, json=body, headers={"traceparent": PARENT})
        usage = answer.json()["usage"]
        told.update(usage, id=answer.json()["id"])

    told: dict = {}
    [span] = traced(scenario)
    assert span.name == "chat echo" and span.kind.name == "SERVER" and span.status.is_ok
    assert span.context.trace_id == int(PARENT.split("-")[1], 16) and span.parent.span_id == int(PARENT[36:52], 16)
    has = dict(span.attributes)
    assert has["gen_ai.response.id"] == told["id"] and has["gen_ai.request.model"] == "echo"
    assert has["gen_ai.usage.input_tokens"] == told["prompt_tokens"]
    assert has["gen_ai.usage.output_tokens"] == told["completion_tokens"]
    assert has["gen_ai.response.finish_reasons"] == ("length", "length")
    asked = {name: has[f"gen_ai.request.{name}"] for name in ("temperature", "seed", "choice.count", "max_tokens")}
    assert asked == {"temperature": 0.5, "seed": 7, "choice.count": 2, "max_tokens": 5}
    parts = [has[f"gen_ai.latency.{name}"] for name in ("time_in_queue", "time_in_model_prefill")]
    assert 0 <= sum(parts) <= has["gen_ai.latency.time_to_first_token"] <= has["gen_ai.latency.e2e"]
    assert "three" not in str(has)


def test_streams_and_other_routes_have_one_each():
    async def scenario(server: LocalServer):
        await server.post(CHAT, messages=user("x"), stream=True)
        await server.post("/v1/completions", prompt=["a", "b"], max_tokens=3)
        await server.post("/generate", text="x")

    spans = traced(scenario)
    assert [span.name for span in spans] == ["chat echo", "text_completion echo", "text_completion echo"]
    assert all(span.attributes["gen_ai.usage.output_tokens"] > 0 and span.parent is None for span in spans)


def test_a_failure_is_told_without_its_words():
    async def scenario(server: LocalServer):
        client = server.state.client
        client.attach(lambda message: None)  # an engine that never answers
        asked = asyncio.create_task(server.post(CHAT, messages=user("x")))
        await until(lambda: client.open_answers)
        client.detach("the engine has died of a secret")
        assert (await asked).status_code == 503

    [span] = traced(scenario)
    assert span.attributes["error.type"] == "EngineError" and not span.status.is_ok
    assert "secret" not in str(span.attributes) + str(span.status.description)


def test_nothing_is_imported_unless_it_is_asked_for():
    # FastAPI imports OpenTelemetry's interface where that is installed.
    code = "import sys, tandem.server.app; print([name for name in sys.modules if '.sdk' in name])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_missing_packages_are_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter", None)
    config = EngineConfig(model="echo", otlp_traces_endpoint="http://localhost:4318/v1/traces")
    with pytest.raises(ConfigError, match=r"pip install 'tandem-moe\[otel\]'"):
        traces_of(config, lambda: "echo")


def test_what_has_not_been_sent_is_sent_at_the_end(monkeypatch):
    """A batch that waits for its time is not lost when the server ends."""
    monkeypatch.setattr(module, "CLOSE_SECONDS", PATIENCE)
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    traces = OpenTelemetry(sdk.BatchSpanProcessor(exporter, schedule_delay_millis=3_600_000), lambda: "echo")

    async def scenario(server: LocalServer):
        server.state.traces = traces
        await server.post("/generate", text="x")
        server.state.close()

    run(scenario, loaded=echo_engine.build())
    assert len(exporter.get_finished_spans()) == 1


def test_a_collector_that_does_not_answer_holds_up_no_end(monkeypatch):
    """The SDK would wait half a minute, and once more when the process ends."""
    monkeypatch.setattr(module, "CLOSE_SECONDS", 0.2)
    asked, may_end = threading.Event(), threading.Event()

    class Dead:
        def export(self, spans):
            asked.set()
            may_end.wait(PATIENCE)
            return sdk.SpanExportResult.FAILURE

        def shutdown(self): ...

    traces = OpenTelemetry(sdk.BatchSpanProcessor(Dead()), lambda: "echo")
    traces._tracer.start_span("x").end()
    began = time.monotonic()
    traces.close()
    took = time.monotonic() - began
    waits = [each.name for each in threading.enumerate()]
    assert asked.wait(PATIENCE) and traces._provider._atexit_handler is None
    may_end.set()
    assert took >= 0.2 and "traces-end" in waits  # the SDK's end still waits, and nobody for it


@pytest.mark.parametrize(
    "endpoint",
    ["localhost:4318", "grpc://s3cret@host:4317", "http://", "https:///v1/traces", "http://s3cret@host:port", "http://["],
)
def test_an_endpoint_that_cannot_be_one_is_refused(endpoint):
    with pytest.raises(ConfigError, match="--otlp-traces-endpoint must be http:// or https:// and a host") as refused:
        traces_of(EngineConfig(model="echo", otlp_traces_endpoint=endpoint), lambda: "echo")
    assert "s3cret" not in str(refused.value)


@pytest.mark.parametrize(("path", "told"), [("", True), ("/", True), ("/v1/traces", False), ("/otlp", False)])
def test_an_endpoint_without_a_path_is_told(path, told, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter", None)  # after the check
    with pytest.raises(ConfigError, match="needs more packages"):
        traces_of(EngineConfig(model="echo", otlp_traces_endpoint="http://me:s3cret@host:4318" + path), lambda: "")
    assert ("usually http://localhost:4318/v1/traces" in caplog.text) is told and "s3cret" not in caplog.text


def test_the_information_route_shows_no_password():
    async def scenario(server: LocalServer):
        async def shown(endpoint):
            server.state.config = dataclasses.replace(server.state.config, otlp_traces_endpoint=endpoint)
            return (await server.client.get("/get_server_info")).json()["otlp_traces_endpoint"]

        secret = "https://me:s3cret@[::1]:4318/v1/traces?token=s3cret#s3cret"
        assert await shown(secret) == "https://[::1]:4318/v1/traces"
        assert await shown("http://host:4318") == "http://host:4318"
        assert await shown(None) is None

    run(scenario)
