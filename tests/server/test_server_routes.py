"""What holds for all routes: information, keys, load, failures, the documentation."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

import echo_engine
from echo_tokenizer import EchoTokenizer
from server_harness import LocalServer
from server_requests import CHAT, error_of, run, user
from tandem.engine import limits as engine_limits
from tandem.engine.sampling import parameters
from tandem.flags.engine_config import EngineConfig
from tandem.server import limits


def test_information_routes():
    async def scenario(server: LocalServer):
        get = server.client.get
        assert (await get("/health")).status_code == 200
        assert (await server.client.head("/health")).status_code == 200
        assert (await get("/health_generate")).status_code == 200
        assert (await get("/v1/models")).json()["data"][0]["id"] == "echo"
        assert (await get("/v1/models/echo")).json()["max_model_len"] == echo_engine.CONTEXT
        assert (await get("/get_model_info")).json()["is_generation"] is True
        info = (await get("/get_server_info")).json()
        assert info["plan"]["num_pages"] == echo_engine.PAGES and "api_key" not in info
        metrics = (await get("/metrics")).text
        assert (
            "tandem_engine_up 1.0" in metrics
            and 'tandem_answers_total{finish_reason="length"} 1.0' in metrics
        )
        assert "Tandem" in (await get("/")).text

    run(scenario)


# The letter case of the scheme does not matter (RFC 9110, 11.1), and more than one space may stand behind it.
RIGHT_KEYS = [
    ("Authorization", "Bearer s3cret"), ("Authorization", "bearer s3cret"), ("authorization", "BEARER s3cret"),
    ("Authorization", "Bearer  s3cret"), ("x-api-key", "s3cret"),
]  # fmt: skip
WRONG_KEYS = [
    ("Authorization", "Bearer S3cret"), ("Authorization", "Basic s3cret"), ("Authorization", "s3cret"),
    ("Authorization", "bearers3cret"), ("Authorization", "Bearer"), ("x-api-key", "Bearer s3cret"), ("x-api-key", ""),
]  # fmt: skip
METHODS = [
    ("/start_expert_distribution_record", "GET", "POST"), ("/flush_cache", "GET", "POST"),
    ("/v1/chat/completions", "GET", "POST"), ("/health", "POST", "GET and HEAD"),
    ("/v1/responses/resp-1", "POST", "DELETE and GET and HEAD"), ("/v1/responses/input_tokens", "PUT", "POST"),
]  # fmt: skip


def test_api_key():
    async def scenario(server: LocalServer):
        assert (await server.client.get("/health")).status_code == 200
        assert error_of(await server.client.get("/v1/models"), 401)["code"] == "invalid_api_key"
        wrong = {"Authorization": "Bearer nope"}
        error_of(await server.client.get("/v1/models", headers=wrong), 401)
        for name, value in RIGHT_KEYS:
            assert (await server.client.get("/v1/models", headers={name: value})).status_code == 200, value
        for name, value in WRONG_KEYS:
            error_of(await server.client.get("/v1/models", headers={name: value}), 401)

    run(scenario, api_key="s3cret")


def test_a_method_that_a_route_does_not_take_is_told_which_it_takes():
    async def scenario(server: LocalServer):
        for path, method, told in METHODS:
            response = await server.client.request(method, path)
            assert error_of(response, 405)["message"] == f"this route takes {told}, not {method}"
            assert response.headers["allow"] == told.replace(" and ", ", ")

    run(scenario)


def test_overload_and_drain(monkeypatch):
    async def scenario(server: LocalServer):
        monkeypatch.setattr("tandem.server.state.MAX_OPEN_ANSWERS", 0)
        response = await server.post(CHAT, messages=user("a"))
        assert error_of(response, 429)["code"] == "overloaded" and response.headers["retry-after"] == "1"
        assert (await server.client.get("/health")).status_code == 200  # busy is not ill
        server.state.drains.set()
        error_of(await server.post(CHAT, messages=user("a")), 503)
        error_of(await server.client.get("/health"), 503)

    run(scenario)


def test_a_busy_engine_is_healthy(monkeypatch):
    """Its turn does not come in time, but others' tokens do."""
    monkeypatch.setattr("tandem.server.sglang_control.HEALTH_SECONDS", 0.5)

    async def scenario(server: LocalServer):
        sampling = {"max_new_tokens": 3000, "ignore_eos": True, "n": 64}  # as many as may run
        long = asyncio.create_task(
            server.post("/generate", input_ids=[97], rid="long", sampling_params=sampling)
        )
        while server.state.client.stats.running < 64:
            await asyncio.sleep(0.01)
        assert (await server.client.get("/health_generate")).status_code == 200
        await server.post("/abort_request", rid="long")
        await long

    run(scenario)


def test_an_engine_that_makes_nothing_is_not_healthy(monkeypatch):
    monkeypatch.setattr("tandem.server.sglang_control.HEALTH_SECONDS", 0.2)

    async def scenario(server: LocalServer):
        server.state.client.attach(lambda message: None)  # nobody there
        error_of(await server.client.get("/health_generate"), 503)

    run(scenario)


def test_every_answer_of_a_batch_counts(monkeypatch):
    async def scenario(server: LocalServer):
        monkeypatch.setattr("tandem.server.state.MAX_OPEN_ANSWERS", 8)
        many = await server.post("/v1/completions", prompt=["a", "b", "c"], n=3)
        assert error_of(many, 400)["param"] == "n"
        sampling = {"max_new_tokens": 3000, "ignore_eos": True, "n": 6}
        long = asyncio.create_task(
            server.post("/generate", input_ids=[97], rid="long", sampling_params=sampling)
        )
        while not server.state.client.open_answers:
            await asyncio.sleep(0.01)
        error_of(await server.post("/v1/completions", prompt=["a", "b", "c"]), 429)
        assert (await server.post("/v1/completions", prompt=["a", "b"])).status_code == 200
        await server.post("/abort_request", rid="long")
        await long

    run(scenario)


@pytest.mark.parametrize(("path", "field"), [("/v1/completions", "prompt"), ("/generate", "text")])
def test_a_batch_is_tokenised_off_the_event_loop_as_a_whole(monkeypatch, path, field):
    threads: list[int] = []
    encode = EchoTokenizer.encode

    def noted(self, text: str, add_special_tokens: bool = True) -> list[int]:
        threads.append(threading.get_ident())
        return encode(self, text, add_special_tokens)

    async def scenario(server: LocalServer):
        monkeypatch.setattr(EchoTokenizer, "encode", noted)
        texts = [f"{i:04}" * 250 for i in range(21)]  # each is short
        response = await server.post(path, **{field: texts})
        assert response.status_code == 200
        assert len(threads) == 21 and threading.get_ident() not in threads

    run(scenario)


def test_a_failing_step_fails_its_request_only():
    async def scenario(server: LocalServer):
        other = asyncio.create_task(server.post(CHAT, messages=user("fine " * 100)))
        await asyncio.sleep(0.05)
        response = await server.post(CHAT, messages=user("raise! now"))
        assert error_of(response, 503)
        assert (await other).status_code in (200, 503)  # 503 if it was in the very same step
        assert (await server.post(CHAT, messages=user("next"))).status_code == 200

    run(scenario)


def test_the_documentation_says_what_is_so():
    """docs/http.md names every route and the limits that the code has."""
    text = (Path(__file__).parents[2] / "docs" / "http.md").read_text()

    async def scenario(server: LocalServer):
        for path in server.app.openapi()["paths"]:
            assert (
                path == "/" or path.replace("/v1/models/{model_id}", "/v1/models/{id}").split("{")[0] in text
            )

    run(scenario)
    for number in (
        limits.MAX_PROMPTS, limits.MAX_MESSAGES, limits.MAX_TOP_LOGPROBS, limits.MAX_OPEN_ANSWERS,
        parameters.MAX_ANSWERS,
        engine_limits.MAX_STOP_STRINGS, engine_limits.MAX_STOP_CHARS, engine_limits.MAX_STOP_TOKENS,
        engine_limits.MAX_LOGIT_BIAS,
    ):  # fmt: skip
        assert f"{number:,}" in text, number
    assert f"{limits.MAX_UNREAD_OUTPUTS:,}" in text and f"{limits.MAX_HEADERS} lines" in text
    for size in (limits.MAX_BODY_BYTES >> 20, limits.MAX_UNFINISHED_BYTES >> 20):
        assert f"{size} MiB" in text
    for size in (limits.MAX_URL_BYTES >> 10, limits.MAX_HEAD_BYTES >> 10):
        assert f"{size} KiB" in text
    shutdown = EngineConfig(model="m").shutdown_timeout
    for seconds in (shutdown, limits.HEAD_SECONDS, limits.UNREAD_SECONDS, limits.TEMPLATE_SECONDS):
        assert f"{seconds:g} seconds" in text
