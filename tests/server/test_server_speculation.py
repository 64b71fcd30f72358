"""Several tokens a step, as clients see it: the same answers in fewer pieces, and what /metrics says of it."""

from __future__ import annotations

import asyncio
import json

import echo_engine
from server_harness import LocalServer, local_server
from tandem.planner.choices.speculation import SpeculationPlan

WORDS = "one two three one two three one two three four one two three"
SPECULATION = SpeculationPlan("NGRAM", 7, governed=False, least_match=3)


def answers(speculation: SpeculationPlan | None) -> list[list[dict]]:
    """Chunks of a completion with log-probabilities and of a chat, then /get_server_info and /metrics."""

    async def scenario() -> list[list[dict]]:
        async with local_server(echo_engine.build(speculation=speculation)) as server:
            asked = {"model": "echo", "max_tokens": 60, "temperature": 0, "stream": True}
            text = await chunks(server, "/v1/completions", prompt=WORDS, logprobs=2, **asked)
            messages = [{"role": "user", "content": WORDS}]
            chat = await chunks(server, "/v1/chat/completions", messages=messages, logprobs=True, **asked)
            info = (await server.client.get("/get_server_info")).json()
            metrics = (await server.client.get("/metrics")).text
            return [text, chat, [info["stats"] | {"metrics": metrics}]]

    return asyncio.run(asyncio.wait_for(scenario(), 60))


async def chunks(server: LocalServer, path: str, **body) -> list[dict]:
    response = await server.post(path, **body)
    assert response.status_code == 200, response.text
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


def test_clients_see_the_same_answer_in_fewer_pieces() -> None:
    (text, chat, [stats]), (plain_text, plain_chat, [plain_stats]) = answers(SPECULATION), answers(None)
    assert said(text) == said(plain_text) and said(chat) == said(plain_chat)
    assert WORDS in said(chat)["text"]
    assert len(text) < 0.7 * len(plain_text) and len(chat) < 0.7 * len(plain_chat)
    assert stats["generated_tokens"] == plain_stats["generated_tokens"]
    assert plain_stats["speculation"] is None and "speculation" not in plain_stats["metrics"]
    told = stats["speculation"]
    assert told["algorithm"] == "NGRAM" and 0 < told["right_guesses"] <= told["guesses"]
    assert f"tandem_speculation_guesses_total {float(told['guesses'])}" in stats["metrics"]
    assert f'tandem_speculation_widths_total{{guesses="7"}} {float(told["widths"][7])}' in stats["metrics"]
    assert "\ntandem_speculation_saved_seconds " in stats["metrics"]


def said(pieces: list[dict]) -> dict:
    """What all chunks say together; token by token where they have log-probabilities."""
    choices = [choice for piece in pieces for choice in piece["choices"]]
    scored = [choice["logprobs"] for choice in choices if choice.get("logprobs")]
    names = sorted({name for each in scored for name in each if each[name]})
    return {
        "text": "".join(c["text"] if "text" in c else c["delta"].get("content") or "" for c in choices),
        "reasons": [c["finish_reason"] for c in choices if c["finish_reason"]],
        "scores": {name: [entry for each in scored for entry in each[name] or ()] for name in names},
    }
