"""`kt bench serve`: what it sends and counts, against a real server with the echo model."""

from __future__ import annotations

import json
from collections.abc import Iterator

import msgspec
import pytest

from echo_engine import CONTEXT
from plans import plan, with_gpu
from server_harness import ServerProcess, running, spawn_echo
from tandem.bench import load_client
from tandem.bench import serve as bench_serve
from tandem.bench.load_client import LoadClient, LoadError, LoadShape, SentRequest, ServedExperts, prompts_of
from tandem.bench.own_server import own_server
from tandem.bench.prompt_file import read_prompts
from tandem.bench.serve import LoadFlags

MOVING = {"kt_enable_dynamic_expert_update": True}


@pytest.fixture(scope="module")
def echo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with running(spawn_echo(tmp_path_factory.mktemp("echo") / "server.log", api_key="key")) as server:
        yield server


@pytest.fixture(autouse=True)
def small_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_client, "FIRST_ID", 10)
    monkeypatch.setattr(load_client, "LAST_ID", 250)


def request(url: str, *loads: LoadShape, api_key: str | None = "key") -> LoadFlags:
    return LoadFlags("echo", url, loads, api_key, ())


def test_prompts_are_the_same_for_a_seed_and_share_their_beginning() -> None:
    load = LoadShape(20, input_len=40, output_len=10, spread=0.5, shared_prefix=8, seed=3)
    made = prompts_of(load)
    assert made == prompts_of(load) != prompts_of(LoadShape(20, 40, 10, spread=0.5, shared_prefix=8, seed=4))
    assert (
        len({tuple(prompt[:8]) for prompt, _ in made}) == 1 < len({tuple(prompt[8:]) for prompt, _ in made})
    )
    assert all(28 <= len(prompt) <= 68 and 5 <= length <= 15 for prompt, length in made)
    assert {len(p) for p, _ in prompts_of(LoadShape(5, 40, 10))} == {40}


def test_times_of_an_answer() -> None:
    answer = SentRequest(sent=1.0, prompt_tokens=5, pieces=[1.5, 2.0, 4.5], tokens=7)
    assert (answer.first_token_seconds, answer.seconds_per_token, answer.gaps) == (0.5, 0.5, [0.5, 2.5])
    assert SentRequest(0.0, 5, [1.0], tokens=1).seconds_per_token is None


def test_all_tokens_are_counted(echo, tmp_path, capsys) -> None:
    loads = LoadShape(6, 20, 12, concurrency=3), LoadShape(4, 20, 5, rate=200.0, spread=0.4)
    bench_serve.run(request(echo.url, *loads), tmp_path / "out" / "serve.json")
    closed, open_ = json.loads((tmp_path / "out" / "serve.json").read_text())
    assert (closed["requests"], closed["failed"], closed["concurrency"], closed["rate"]) == (6, 0, 3, None)
    assert (closed["gpu_share"], closed["placement"], closed["live"], closed["flags"]) == (0.0, None, False, "")
    assert closed["tok_s"] * closed["seconds"] == pytest.approx(6 * 12, rel=0.01)
    assert closed["prompt_tok_s"] * closed["seconds"] == pytest.approx(6 * 20, rel=0.01)
    assert 0 < closed["ttft_ms_p50"] <= closed["ttft_ms_p99"] <= 1e3 * closed["seconds"]
    assert open_["rate"] == 200.0 and open_["failed"] == 0 and open_["bound_tok_s"] == 0
    shown = capsys.readouterr().out
    assert "x 3" in shown and "200/s" in shown and "Written to" in shown


@pytest.mark.parametrize(
    ("flags", "expected", "text"),
    [
        ({"device": "cpu"}, ServedExperts(0.0, None, False), ""),
        ({}, ServedExperts(1.0, "uniform", False), "100% of the experts on the GPU (uniform)"),
        (
            {"kt_gpu_experts_ratio": 0.25, "kt_expert_placement_strategy": "random", **MOVING},
            ServedExperts(0.25, "random", True),
            "25% of the experts on the GPU (random), which change places",
        ),
    ],
)
def test_where_experts_are_is_read_from_the_servers_plan(flags, expected: ServedExperts, text: str) -> None:
    """From JSON, as `/server_info` has it."""
    found = ServedExperts.of(json.loads(msgspec.json.encode(plan(with_gpu(), **flags))))
    assert found == expected and found.text() == text


def test_a_server_that_is_no_tandem_says_nothing_of_experts(echo) -> None:
    assert LoadClient(echo.url, "key").served_experts("echo") == ServedExperts(0.0, None, False)
    assert LoadClient(echo.url, "wrong").served_experts("echo") == ServedExperts()
    assert LoadClient("http://127.0.0.1:1").served_experts("echo") == ServedExperts()
    assert ServedExperts.of(None).text() == ""


def test_no_more_requests_are_in_flight_than_asked(echo) -> None:
    answers, _ = LoadClient(echo.url, "key").run("echo", LoadShape(9, 10, 8, concurrency=2), lambda _n: None)
    moments = [(a.sent, 1) for a in answers] + [(a.ended, -1) for a in answers]
    running_now, most = 0, 0
    for _, change in sorted(moments):
        running_now += change
        most = max(most, running_now)
    assert len(answers) == 9 and most <= 2


def test_refused_requests_are_shown_and_the_others_count(echo, capsys) -> None:
    load = LoadShape(8, input_len=CONTEXT, output_len=4, concurrency=4, spread=1.0)
    bench_serve.run(request(echo.url, load), None)
    shown = capsys.readouterr().out
    assert "failed: 400" in shown


def test_what_is_wrong_is_said(echo) -> None:
    with pytest.raises(LoadError, match="answers 401; give --api-key"):
        list(bench_serve.measure(request(echo.url, LoadShape(1, 1, 1), api_key=None)))
    with pytest.raises(
        LoadError, match="no OpenAI server answers at http://127.0.0.1:1 .* start one with kt serve"
    ):
        list(bench_serve.measure(request("http://127.0.0.1:1", LoadShape(1, 1, 1))))
    with (
        pytest.raises(LoadError, match=r"kt serve ended with 1:(.|\n)*nonsense does not exist"),
        own_server("nonsense", ()),
    ):
        pass


TURNS = [{"from": "human", "value": "What is rain?"}, {"from": "gpt", "value": "Water that falls from clouds."}]
CONVERSATIONS = [
    {"id": "1", "conversations": TURNS},
    {"conversations": [{"from": "user", "value": "Count."}, {"from": "assistant", "value": "1, 2"}, *TURNS]},
    {"conversations": TURNS[1:]}, {"conversations": []}, {"conversations": [1, 2]}, 7,
    {"conversations": [TURNS[0], {"from": "gpt", "value": ""}]},
]  # fmt: skip


def test_prompts_of_a_file(tmp_path) -> None:
    """First questions, each with its answer's length; entries without both are left out."""
    file = tmp_path / "prompts.json"
    file.write_text(json.dumps(CONVERSATIONS))
    texts = read_prompts(file, None)
    assert texts == (("What is rain?", 7), ("Count.", 1))
    assert [length for _, length in read_prompts(file, 5)] == [5, 5]
    sent = prompts_of(LoadShape(5, 1, 1, texts=texts, seed=3))
    assert sent == prompts_of(LoadShape(5, 1, 1, texts=texts, seed=3)) and set(sent) == set(texts)


@pytest.mark.parametrize("text", ["", "{}", "[]", "[1]", '{"conversations": []}'])
def test_a_file_of_another_form_is_refused(tmp_path, text: str) -> None:
    file = tmp_path / "prompts.json"
    file.write_text(text)
    with pytest.raises(LoadError, match="--prompts"):
        read_prompts(file, None)
    with pytest.raises(LoadError, match="--prompts"):
        read_prompts(tmp_path / "none.json", None)


def test_texts_are_sent_and_counted(echo, tmp_path) -> None:
    """The echo model has a token for each letter; usage says how many."""
    load = LoadShape(4, 999, 999, concurrency=2, texts=(("What is rain?", 7), ("Count.", 5)))
    bench_serve.run(request(echo.url, load), tmp_path / "serve.json")
    (row,) = json.loads((tmp_path / "serve.json").read_text())
    assert (row["requests"], row["failed"], row["output_len"]) == (4, 0, 6)
    assert row["tok_s"] * row["seconds"] == pytest.approx(2 * (7 + 5), rel=0.01)
    assert 6 <= row["input_len"] <= 13
