"""DRY, XTC and typical_p over HTTP. The echo model would repeat its prompt."""

from __future__ import annotations

import pytest

from echo_tokenizer import END, EchoTokenizer
from server_harness import LocalServer
from server_requests import CHAT, error_of, run, user

LOOP = "abcabcabcabc"
ON = {"dry_multiplier": 100.0, "dry_base": 10.0, "temperature": 0}


@pytest.mark.parametrize("path", ["/v1/completions", "/generate"])
def test_dry_ends_a_repetition(path, monkeypatch):
    def encode(self: EchoTokenizer, text: str, add_special_tokens: bool = True) -> list[int]:
        return [*text.encode(), *([END] if add_special_tokens else [])]

    monkeypatch.setattr(EchoTokenizer, "encode", encode)

    async def said(server: LocalServer, **sampling) -> str:
        if path == "/generate":
            return (await server.post(path, text=LOOP, sampling_params=sampling)).json()["text"]
        return (await server.post(path, prompt=LOOP, **sampling)).json()["choices"][0]["text"]

    async def scenario(server: LocalServer):
        assert await said(server, temperature=0) == LOOP
        assert not (await said(server, **ON)).startswith("abca")
        assert await said(server, **ON, dry_sequence_breakers=["a", "b", "c"]) == LOOP
        assert await said(server, **ON, dry_penalty_last_n=3) == LOOP

    run(scenario)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("typical_p", 0), ("typical_p", 1.5), ("xtc_probability", -0.1), ("xtc_threshold", 2), ("dry_multiplier", -1),
        ("dry_base", 0.5), ("dry_allowed_length", 0), ("dry_penalty_last_n", -2),
    ],
)  # fmt: skip
def test_ranges(field, value):
    async def scenario(server: LocalServer):
        error = error_of(await server.post(CHAT, messages=user("x"), **{field: value}), 400)
        assert error["param"] == field
        error = error_of(await server.post("/generate", text="x", sampling_params={field: value}), 400)
        assert field in error["message"]

    run(scenario)


def test_they_are_taken_without_a_word():
    async def scenario(server: LocalServer):
        fields = {"typical_p": 0.9, "xtc_probability": 0.5, "xtc_threshold": 0.2, "dry_multiplier": 0.8}
        response = await server.post("/v1/completions", prompt="xyz", **fields, dry_sequence_breakers=["\n"])
        assert response.json()["choices"][0]["text"] == "xyz"
        assert "x-tandem-ignored" not in response.headers

    run(scenario)
