"""Images in every other dialect: /v1/responses, /v1/messages, Ollama's and SGLang's routes, counting, and what clients
are told of the model."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from pictures import png
from seeing_server import SEEN, Seeing, image_part, run_seeing, url, user
from server_requests import CHAT
from tandem.engine.images.decode import decoded
from tandem.engine.images.question import Ask

ASK = Ask(side=32, min_pixels=4 * 1024, max_pixels=1024 * 1024)
RED, BLUE = png(64, 64, 1), png(96, 64, 2)
BARE = base64.b64encode(RED).decode()
PIXELS = decoded(RED, ASK)[1]
ADDRESS = "https://example.org/a.png"
RESPONSES, MESSAGES, OLLAMA, OLLAMA_ONE = "/v1/responses", "/v1/messages", "/api/chat", "/api/generate"


def block(data: bytes = RED) -> dict[str, Any]:
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(data).decode()}
    return {"type": "image", "source": source}


def codex_image() -> dict[str, Any]:
    """`codex -i FILE`: the image between texts that name it."""
    return {
        "input": [
            {
                "type": "message", "role": "user",
                "content": [
                    {"type": "input_text", "text": "<image name=[Image #1] path=a.png>"},
                    {"type": "input_image", "image_url": url(RED)},
                    {"type": "input_text", "text": "</image>"},
                    {"type": "input_text", "text": "What is this?"},
                ],
            },
        ],
        "store": False,
    }  # fmt: skip


def codex_view() -> dict[str, Any]:
    """Codex' tool `view_image`: the image is a call's output."""
    return {
        "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Look at a.png"}]},
            {"type": "function_call", "call_id": "c1", "name": "view_image", "arguments": '{"path":"a.png"}'},
            {
                "type": "function_call_output", "call_id": "c1",
                "output": [{"type": "input_image", "image_url": url(RED)}],
            },
        ],
        "tools": [{"type": "function", "name": "view_image", "parameters": {"type": "object"}, "strict": False}],
        "store": False,
    }  # fmt: skip


def claude_read() -> dict[str, Any]:
    """Claude Code's tool `Read` of an image."""
    return {
        "max_tokens": 16,
        "messages": [
            {"role": "user", "content": "Look at a.png"},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "Read", "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": [block()]}]},
        ],
        "tools": [{"name": "Read", "input_schema": {"type": "object"}}],
    }


def pi_image() -> dict[str, Any]:
    """`pi @a.png`."""
    return {"messages": [user("What is this?", image_part(RED))], "stream": True, "store": False}


SHOWN: dict[str, tuple[str, dict[str, Any], str]] = {
    "codex -i": (RESPONSES, codex_image(), f"path=a.png>{SEEN}</image>What is this?<|done|>"),
    "codex view_image": (RESPONSES, codex_view(), f"<|turn|>tool:{SEEN}<|done|>"),
    "claude code Read": (MESSAGES, claude_read(), f"<|turn|>tool:{SEEN}<|done|>"),
    "pi": (CHAT, pi_image(), f"<|turn|>user:What is this?{SEEN}<|done|>"),
    "a block": (
        MESSAGES,
        {"max_tokens": 16, "messages": [{"role": "user", "content": [block(), {"type": "text", "text": "?"}]}]},
        f"<|turn|>user:{SEEN}?<|done|>",
    ),
    "a failed tool": (
        MESSAGES,
        claude_read() | {
            "messages": [
                *claude_read()["messages"][:2],
                {"role": "user", "content": [
                    {"type": "tool_result", "tool_use_id": "t1", "content": [block()], "is_error": True}]},
            ]
        },
        f"<|turn|>tool:Error: {SEEN}<|done|>",
    ),
    "ollama": (
        OLLAMA, {"messages": [{"role": "user", "content": "What is this?", "images": [BARE]}], "stream": False},
        f"<|turn|>user:{SEEN}What is this?<|done|>",
    ),
    "ollama, a URL": (
        OLLAMA, {"messages": [{"role": "user", "content": "?", "images": [url(RED)]}], "stream": False},
        f"<|turn|>user:{SEEN}?<|done|>",
    ),
    "ollama, one prompt": (
        OLLAMA_ONE, {"prompt": "What?", "system": "S", "images": [BARE], "stream": False},
        f"<|turn|>user:{SEEN}What?<|done|>",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SHOWN)
def test_images_reach_the_model(case):
    path, body, text = SHOWN[case]

    async def scenario(server: Seeing) -> None:
        answer = await server.post(path, **body)
        assert answer.status_code == 200, answer.text
        assert text in server.last.text
        assert server.last.pixels == [PIXELS]
        ignored = answer.headers.get("x-tandem-ignored", "")
        assert "image" not in ignored and "content" not in ignored

    run_seeing(scenario, tool_call_parser="none")


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "responses": (
        RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": ADDRESS}]}]},
        "input[0].content[0].image_url",
    ),
    "responses, a file": (
        RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "file-1"}]}]},
        "input[0].content[0].image_url",
    ),
    "messages": (
        MESSAGES, {"max_tokens": 9, "messages": [
            {"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": ADDRESS}}]}]},
        "messages[0].content[0].source",
    ),
    "ollama": (
        OLLAMA, {"messages": [{"role": "user", "content": "?", "images": [ADDRESS]}]}, "messages[0].images[0]",
    ),
    "ollama, one prompt": (OLLAMA_ONE, {"prompt": "?", "images": [ADDRESS]}, "images[0]"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_addresses_are_refused_by_name(case):
    path, body, where = REFUSED[case]

    async def scenario(server: Seeing) -> None:
        answer = await server.post(path, **body)
        assert answer.status_code == 400 and f"{where}: " in answer.text, answer.text
        assert not server.seen

    run_seeing(scenario)


def test_a_raw_prompt_of_ollama_has_no_images():
    async def scenario(server: Seeing) -> None:
        answer = await server.post(OLLAMA_ONE, prompt="x", raw=True, images=[BARE])
        assert answer.status_code == 400 and "raw" in answer.text

    run_seeing(scenario)


def test_counts_are_those_of_the_prompt_and_nothing_is_decoded():
    async def scenario(server: Seeing) -> None:
        body = {"messages": [user("See", image_part(RED), image_part(BLUE))]}
        counted = (await server.post("/tokenize", **body)).json()
        blocks = [{"role": "user", "content": [block(), {"type": "text", "text": "?"}]}]
        claude = (await server.post("/v1/messages/count_tokens", messages=blocks)).json()
        codex = (await server.post("/v1/responses/input_tokens", **codex_image())).json()
        assert server.state.images.counts.decoded == 0 and not server.seen
        await server.post(CHAT, **body)
        assert counted["count"] == len(server.last.request.prompt_ids)
        assert counted["tokens"] == server.last.request.prompt_ids
        await server.post(MESSAGES, messages=blocks, max_tokens=9)
        assert claude["input_tokens"] == len(server.last.request.prompt_ids)
        await server.post(RESPONSES, **codex_image())
        assert codex["input_tokens"] == len(server.last.request.prompt_ids)

    run_seeing(scenario)


def test_a_stored_response_keeps_its_images_once():
    async def scenario(server: Seeing) -> None:
        first = (await server.post(RESPONSES, **(codex_image() | {"store": True}))).json()
        again = {"role": "user", "content": [{"type": "input_image", "image_url": url(RED)}]}
        second = await server.post(RESPONSES, input=[again], previous_response_id=first["id"])
        assert second.status_code == 200, second.text
        third = await server.post(RESPONSES, input="And?", previous_response_id=second.json()["id"])
        assert third.status_code == 200, third.text
        assert server.last.text.count(SEEN) == 2 and server.last.pixels == [PIXELS] * 2

    run_seeing(scenario)


def test_clients_are_told():
    for sees in (True, False):

        async def scenario(server: Seeing, sees: bool = sees) -> None:
            shown = (await server.post("/api/show", model="echo")).json()
            assert ("vision" in shown["capabilities"]) == sees
            [model] = (await server.client.get("/v1/models")).json()["data"]
            assert model["architecture"]["input_modalities"] == (["text", "image"] if sees else ["text"])
            assert model["capabilities"]["vision"] == sees
            props = (await server.client.get("/props")).json()
            assert props["modalities"]["vision"] == sees
            info = (await server.client.get("/get_model_info")).json()
            assert info["has_image_understanding"] == sees
            [studio] = (await server.client.get("/api/v0/models")).json()["data"]
            assert studio["type"] == ("vlm" if sees else "llm")

        run_seeing(scenario, sees=sees)


PROMPT = f"<|turn|>user:See {SEEN}<|done|>"


def test_generate_takes_images_for_the_placeholders_of_its_text():
    async def scenario(server: Seeing) -> None:
        for given in (BARE, [BARE], [[BARE]], url(RED)):
            answer = await server.post("/generate", text=PROMPT, image_data=given)
            assert answer.status_code == 200, answer.text
            assert server.last.pixels == [PIXELS] and server.last.text == PROMPT
        answer = await server.post("/generate", text=[PROMPT, "none", PROMPT * 2], image_data=[BARE, None, [BARE] * 2])
        assert answer.status_code == 200, answer.text
        assert [len(shown.pixels) for shown in server.seen[-3:]] == [1, 0, 2]

    run_seeing(scenario)


def test_generate_names_what_is_wrong_with_images():
    async def scenario(server: Seeing) -> None:
        for text, given, said in (
            ("no place", BARE, "write it once for each"), (PROMPT, [BARE, BARE], "write it once for each"),
            (PROMPT, [ADDRESS], "image_data[0]: send the image itself"),
            ([PROMPT], [BARE, BARE], "2 entries for 1 prompts"), (PROMPT, [BARE, None], "texts in base64"),
        ):  # fmt: skip
            answer = await server.post("/generate", text=text, image_data=given)
            assert answer.status_code == 400 and said in answer.text, answer.text

    async def blind(server: Seeing) -> None:
        answer = await server.post("/generate", text="x", image_data=BARE)
        assert answer.status_code == 400 and "image_data is not available" in answer.text

    run_seeing(scenario)
    run_seeing(blind, sees=False)
