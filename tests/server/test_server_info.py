"""What clients, routers and people ask about the server: tokens, load, metrics, methods, the page of routes."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
import threading
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

import echo_engine
from echo_tokenizer import END, EchoTokenizer
from server_harness import LocalServer, listening_server
from server_requests import CHAT, error_of, run, user
from tandem import __version__
from tandem.flags.engine_config import EngineConfig


def test_tokens():
    async def scenario(server: LocalServer):
        answer = (await server.post("/tokenize", prompt="ab", return_token_strs=True)).json()
        assert answer["tokens"] == [97, 98, END] and answer["count"] == 3
        assert answer["max_model_len"] == echo_engine.CONTEXT and answer["token_strs"][:2] == ["a", "b"]
        several = (await server.post("/tokenize", prompt=["a", "bcd"])).json()
        assert several["count"] == [2, 4] and several["tokens"][0] == [97, END]
        chat = (await server.post("/tokenize", messages=user("xyz"))).json()
        used = (await server.post(CHAT, messages=user("xyz"))).json()["usage"]
        assert chat["count"] == used["prompt_tokens"]
        back = (await server.post("/detokenize", tokens=answer["tokens"])).json()
        assert back == {"prompt": "ab", "text": "ab"}
        for body in ({}, {"prompt": "a", "messages": user("a")}):
            error_of(await server.post("/tokenize", **body), 400)
        refused = error_of(await server.post("/detokenize", tokens=[10**6]), 400)
        assert refused["param"] == "tokens" and refused["message"].startswith("token ids must be within 0 and ")

    run(scenario)


@pytest.mark.parametrize("route", ["/detokenize", "/tokenize", "/v1/completions"])
def test_many_ids_hold_up_nobody(route, monkeypatch):
    """Their texts are looked up on a thread: the loop answers others meanwhile."""
    begun, may_end = threading.Event(), threading.Event()

    def slow(self, *arguments, right=EchoTokenizer.decode):
        if threading.current_thread() is not threading.main_thread():
            begun.set()
            assert may_end.wait(60)
        return right(self, *arguments)

    async def scenario(server: LocalServer):
        monkeypatch.setattr(EchoTokenizer, "decode", lambda self, ids, skip_special_tokens=True: slow(self, ids))
        many = [97] * 2000
        body = {
            "/detokenize": {"tokens": many},
            "/tokenize": {"prompt": "a" * 2000, "return_token_strs": True},
            "/v1/completions": {"prompt": many, "echo": True, "max_tokens": 1},
        }[route]
        asked = asyncio.create_task(server.post(route, **body))
        while not begun.is_set():
            await asyncio.sleep(0.002)
        assert (await server.client.get("/version")).status_code == 200 and not asked.done()
        may_end.set()
        answer = await asked
        assert answer.status_code == 200 and answer.text.count("a") >= 2000
        assert server.state.prompts.busy is False

    run(scenario)


def test_load():
    async def scenario(server: LocalServer):
        get = server.client.get
        idle = (await get("/get_load")).json()
        assert len(idle) == 1 and idle[0]["num_reqs"] == idle[0]["num_waiting_reqs"] == 0
        sampling = {"max_new_tokens": 3000, "ignore_eos": True, "n": 3}
        long = asyncio.create_task(
            server.post("/generate", input_ids=[97], rid="long", sampling_params=sampling)
        )
        while server.state.client.stats.running < 3:
            await asyncio.sleep(0.005)
        [load] = (await get("/v1/loads")).json()["loads"]
        assert load["num_running_reqs"] == load["num_reqs"] == 3 and load["num_used_tokens"] > 0
        assert 0 < load["token_usage"] < 1
        await server.post("/abort_request", rid="long")
        await long

    run(scenario)


def test_names_under_which_others_have_the_same():
    async def scenario(server: LocalServer):
        get = server.client.get
        assert (await get("/version")).json() == {"version": __version__}
        assert (await get("/ping")).status_code == 200
        assert (await get("/model_info")).json() == (await get("/get_model_info")).json()
        info = (await get("/server_info")).json()
        assert not info.keys() & {"api_key", "explicit", "former", "way_chosen"}
        assert info["served_model_name"] == (await get("/v1/models")).json()["data"][0]["id"]
        assert (await get("/favicon.ico")).status_code == 204

    run(scenario)


def test_any_model_name_is_taken_and_the_answer_says_which_answered():
    async def scenario(server: LocalServer):
        for name in ("model-name", "echo", None):
            assert (await server.post(CHAT, messages=user("x"), model=name)).json()["model"] == "echo"

    run(scenario)


def test_methods_and_slashes():
    async def scenario():
        async with listening_server() as server:
            head = await server.client.head("/v1/models")
            assert head.status_code == 200 and head.content == b""
            assert int(head.headers["content-length"]) == len((await server.client.get("/v1/models")).content)
            assert (await server.client.get("/v1/models/")).json()["data"][0]["id"] == "echo"
            assert (await server.client.post(CHAT + "/", json={"messages": user("x")})).status_code == 200
            allowed = (await server.client.post("/health")).headers["allow"]
            assert allowed == "GET, HEAD"
            assert (await server.client.get("/flush_cache")).headers["allow"] == "POST"

    asyncio.run(scenario())


def test_metrics_in_both_formats():
    async def scenario(server: LocalServer):
        plain = await server.client.get("/metrics")
        assert plain.headers["content-type"].startswith("text/plain; version=")
        assert f"tandem_pages {float(echo_engine.PAGES)}" in plain.text and "pages_total" not in plain.text
        accept = {"Accept": "application/openmetrics-text; version=1.0.0"}
        text = await server.client.get("/metrics", headers=accept)
        assert text.headers["content-type"].startswith("application/openmetrics-text")
        families = {family.name for family in text_string_to_metric_families(text.text)}
        assert {"tandem_pages", "tandem_answers", "tandem_http_responses"} <= families

    run(scenario)


HISTOGRAMS = (
    "request_queue_time_seconds", "request_prefill_time_seconds", "time_to_first_token_seconds", "answer_seconds",
)  # fmt: skip


def test_latencies_are_counted_once_an_answer():
    async def scenario(server: LocalServer):
        assert (await server.post(CHAT, messages=user("xyz"), n=2)).status_code == 200
        text = (await server.client.get("/metrics")).text
        for name in HISTOGRAMS:
            assert f"tandem_{name}_count 2.0" in text, name
        queue, prefill, first, _ = (float(re.search(f"tandem_{name}_sum (.*)", text)[1]) for name in HISTOGRAMS)
        assert 0 <= queue + prefill <= first  # the way to the engine and back comes on top

    run(scenario)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (Debian: prometheus)")
def test_promtool_finds_nothing():
    async def scenario(server: LocalServer):
        await server.post(CHAT, messages=user("xyz"))
        text = (await server.client.get("/metrics")).text
        done = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0 and not done.stdout + done.stderr, done.stdout + done.stderr

    run(scenario, loaded=echo_engine.load_routed(EngineConfig(model="echo"), 2, 16))


def test_the_page_of_routes_needs_nothing_from_elsewhere():
    async def scenario(server: LocalServer):
        page = await server.client.get("/docs")
        assert page.headers["content-type"].startswith("text/html")
        assert "//" not in page.text.replace("<!doctype", "") and "<script" not in page.text
        for path in server.app.openapi()["paths"]:
            assert path in page.text
        assert "max_tokens" in page.text and "(required)" in page.text

    run(scenario)


def test_embeddings_are_refused_with_a_reason():
    async def scenario(server: LocalServer):
        error = error_of(await server.post("/v1/embeddings", input="x", model="echo"), 400)
        assert error["code"] == "not_available" and "embeddings" in error["message"]

    run(scenario)


# --- docs/grafana.json: its queries name only what /metrics has

DASHBOARD = json.loads((Path(__file__).parents[2] / "docs" / "grafana.json").read_text())
QUERIES = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]


def test_every_query_names_metrics_and_labels_that_exist() -> None:
    async def scenario(server: LocalServer) -> None:
        await server.post("/generate", text="x")
        samples = re.findall(r"^(\w+)(?:\{(.*)\})? ", (await server.client.get("/metrics")).text, re.M)
        labels = {name: set(re.findall(r'(\w+)="', text)) for name, text in samples}
        for query in QUERIES:
            named = re.findall(r"\btandem_\w+", query)
            assert named and set(named) <= set(labels), query
            used = {
                word
                for group in re.findall(r"by \((.*?)\)|\{(\w+)=", query)
                for word in group
                if word
            }
            assert all(used <= labels[name] for name in named), query

    run(scenario, loaded=echo_engine.load_routed(EngineConfig(model="echo"), 2, 16))


def test_panels_do_not_overlap() -> None:
    places = [panel["gridPos"] for panel in DASHBOARD["panels"]]
    assert len({(place["x"], place["y"]) for place in places}) == len(places)
    assert all(place["x"] + place["w"] <= 24 for place in places)
