"""Property-based requests made from our own OpenAPI document: whatever is sent, the answer is a documented one."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest
import schemathesis
from fastapi import FastAPI
from schemathesis.checks import not_a_server_error
from schemathesis.config import SchemathesisConfig
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

import echo_engine
import scheduling
from server_harness import LocalServer, LocalSocket, local_state
from server_requests import run
from tandem.server import engine_client
from tandem.server.app import create_app
from tandem.server.messages import ToEngine

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
EXAMPLES = 12  # of each operation; tests/clients/test_schemathesis.py goes on for minutes (make test-all)
# Of which each field's bounds, and other methods, are tried, too: a thousand cases of one body. Those of the other
# bodies come with --full.
COVERED = ("POST /v1/chat/completions", "GET ", "DELETE ")


def self_turning_app() -> FastAPI:
    """Schemathesis runs every request on an event loop of its own: each message turns the engine on that loop."""
    state, loop, wire = local_state(echo_engine.build(context_length=200))
    turning: list[asyncio.Task[None]] = []

    async def turn_until_idle(wire: LocalSocket) -> None:
        while wire.inbox or loop.has_work():
            loop.turn()
            await asyncio.sleep(0)

    def send(message: ToEngine) -> None:
        wire.inbox.append(engine_client.encode(message))
        if not turning or turning[-1].done() or turning[-1].get_loop().is_closed():
            turning[:] = [asyncio.get_running_loop().create_task(turn_until_idle(wire))]

    state.client.attach(send)
    return create_app(state)


def schema_of(app: FastAPI, *, coverage: bool):
    phases = {"phases": {"coverage": {"enabled": coverage}}}
    config = SchemathesisConfig.from_dict(phases)
    return schemathesis.openapi.from_asgi("/openapi.json", app, config=config)


app = self_turning_app()
schema, covered = (schema_of(app, coverage=coverage) for coverage in (False, True))


def documented_answers_only(operation: str):
    """A test of one operation; schemathesis gives the tests of several the same id."""

    cases = covered if scheduling.full or operation.startswith(COVERED) else schema

    @cases.include(name=operation).parametrize()
    @hypothesis.settings(
        max_examples=EXAMPLES,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    def check(case: schemathesis.Case):
        case.call_and_validate(checks=CHECKS, timeout=120)  # the first grammar starts a process

    return check


for each in schema.get_all_operations():
    label = each.ok().label
    globals()["test_documented_answers_only_" + re.sub(r"\W+", "_", label).strip("_")] = (
        documented_answers_only(label)
    )


USER = [{"role": "user", "content": "x"}]
BOUNDED = {
    "ChatRequest": ("/v1/chat/completions", lambda f: {"messages": USER, "logprobs": True, "max_tokens": 4} | f),
    "CompletionRequest": ("/v1/completions", lambda f: {"prompt": "x"} | f),
    "SglangSampling": ("/generate", lambda f: {"text": "x", "sampling_params": f}),
    "MessagesRequest": (
        "/v1/messages", lambda f: {"messages": USER, "max_tokens": 9} | f,
    ),
    "ResponsesRequest": ("/v1/responses", lambda f: {"input": "x"} | f),
    "Options": ("/api/generate", lambda f: {"prompt": "x", "options": {"num_predict": 4} | f}),
}  # fmt: skip


@pytest.mark.parametrize("body", BOUNDED)
def test_bounds_are_those_of_the_document(body):
    """What is just outside is refused, what is on a bound is not refused for the field."""
    path, ask = BOUNDED[body]

    async def scenario(server: LocalServer):
        checked = 0
        for name, field in schema.raw_schema["components"]["schemas"][body]["properties"].items():
            if name.startswith("thinking"):  # which the echo cannot be told
                continue
            for number in field.get("anyOf", [field]):
                for value, right in values_at(number):
                    answer = await server.post(path, **ask({name: value}))
                    assert answer.status_code == 200 or (not right and name in answer.text), (name, value)
                    assert right or answer.status_code == 400, (name, value)
                    checked += 1
        assert checked >= 6

    run(scenario)


def values_at(number: dict[str, Any]) -> Iterator[tuple[float, bool]]:
    """Values beside the bounds of a schema, and whether they fit. Int64's own bounds are left out."""
    step = 1 if number.get("type") == "integer" else 1e-6
    if number.get("minimum", -(2**40)) > -(2**40):
        yield from ((number["minimum"], True), (number["minimum"] - step, False))
    if "exclusiveMinimum" in number:
        yield from ((number["exclusiveMinimum"], False), (number["exclusiveMinimum"] + step, True))
    if number.get("maximum", 2**40) < 2**31 - 1:
        yield from ((number["maximum"], True), (number["maximum"] + step, False))


def test_every_route_is_documented():
    paths = schema.raw_schema["paths"]
    routes = {
        "/v1/models", "/v1/models/{model_id}", "/v1/chat/completions", "/v1/completions", "/generate", "/health",
        "/v1/messages", "/v1/messages/count_tokens", "/tokenize", "/detokenize", "/version", "/ping", "/get_load",
        "/api/chat", "/api/generate", "/api/tags", "/api/ps", "/api/show", "/api/version",
        "/v1/responses", "/v1/responses/{response_id}", "/v1/responses/input_tokens",
        "/props", "/api/v0/models", "/api/v0/models/{model_id}",
        "/v1/loads", "/server_info", "/model_info",
        "/health_generate", "/get_model_info", "/get_server_info", "/flush_cache", "/abort_request", "/metrics", "/",
        "/tandem/live", "/release_memory_occupation", "/resume_memory_occupation",
        *(f"/{action}_expert_distribution_record" for action in ("start", "stop", "dump")),
    }  # fmt: skip
    assert set(paths) == routes
    for path in ("/v1/chat/completions", "/v1/completions", "/generate", "/abort_request"):
        assert paths[path]["post"]["requestBody"]["content"]["application/json"]["schema"]


def test_the_document_refuses_what_the_server_refuses():
    """Each was once taken by the document alone: an unknown role, neither text nor ids, an abort of nothing."""
    document = schema.raw_schema
    role = document["components"]["schemas"]["ChatMessage"]["properties"]["role"]
    assert set(role["enum"]) == {"assistant", "developer", "system", "tool", "user"}
    needed = {}
    for path, one_of in (("/generate", "oneOf"), ("/abort_request", "anyOf")):
        content = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
        needed[path] = [each["required"] for each in content["schema"]["allOf"][1][one_of]]
    assert needed == {"/generate": [["text"], ["input_ids"]], "/abort_request": [["rid"], ["abort_all"]]}
