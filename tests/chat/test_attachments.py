"""Images, documents and files in a conversation: plain text is given to the model, of the rest it is told. A refusal
would come again with each later request, so only what a user shows in the newest turn is refused."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from echo_tokenizer import seen_by_the_template
from server_harness import LocalServer
from server_requests import CHAT, run
from tandem.server.chat.attachments import file_text, newest_turn

IMAGE_NOTE, FILE_NOTE = "[an image, which this model cannot see]", "[a file, which this model cannot read]"
CALL = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
PNG, PDF, TEXT = "data:image/png;base64,AAAA", "JVBERi0=", base64.b64encode("Grüße".encode()).decode()
CHAT_PARTS: dict[str, tuple[dict[str, Any], str]] = {
    "image": ({"type": "image_url", "image_url": {"url": PNG}}, IMAGE_NOTE),
    "pdf": (
        {"type": "file", "file": {"filename": "a.pdf", "file_data": f"data:application/pdf;base64,{PDF}"}},
        "[a file, which this model cannot read: a.pdf]",
    ),
    "file by id": ({"type": "file", "file": {"file_id": "file-1"}}, FILE_NOTE),
    "sound": (
        {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
        "[a sound, which this model cannot hear]",
    ),
    "video": ({"type": "video_url", "video_url": {"url": PNG}}, "[a video, which this model cannot see]"),
    "text file": ({"type": "file", "file": {"filename": "a.md", "file_data": TEXT}}, "Grüße"),
    "text in a URL": ({"type": "file", "file": {"file_data": f"data:text/plain;base64,{TEXT}"}}, "Grüße"),
}
RESPONSES_PARTS: dict[str, tuple[dict[str, Any], str]] = {
    "image": ({"type": "input_image", "image_url": PNG, "detail": "auto"}, IMAGE_NOTE),
    "pdf": (
        {"type": "input_file", "filename": "a.pdf", "file_data": f"data:application/pdf;base64,{PDF}"},
        "[a file, which this model cannot read: a.pdf]",
    ),
    "file by address": ({"type": "input_file", "file_url": "https://example.org/a.pdf"}, FILE_NOTE),
    "text file": (
        {"type": "input_file", "filename": "a.json", "file_data": f"data:application/json;base64,{TEXT}"},
        "Grüße",
    ),
}
BLOCKS: dict[str, tuple[dict[str, Any], str]] = {
    "image": (
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}},
        IMAGE_NOTE,
    ),
    "pdf": (
        {"type": "document", "title": "a.pdf",
         "source": {"type": "base64", "media_type": "application/pdf", "data": PDF}},
        "[a file, which this model cannot read: a.pdf]",
    ),
    "pdf by address": (
        {"type": "document", "source": {"type": "url", "url": "https://example.org/a.pdf"}}, FILE_NOTE,
    ),
    "plain text": (
        {"type": "document", "title": "Notes", "context": "of May",
         "source": {"type": "text", "media_type": "text/plain", "data": "hello"}},
        "Notes\nof May\n\nhello",
    ),
    "blocks": (
        {"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "hello"}]}}, "hello",
    ),
    "search result": (
        {"type": "search_result", "source": "https://example.org", "title": "T",
         "content": [{"type": "text", "text": "q"}]},
        "T\nhttps://example.org\n\nq",
    ),
    "tool reference": ({"type": "tool_reference", "tool_name": "Read"}, "[the tool Read]"),
}  # fmt: skip


def chat(parts: list[dict[str, Any]], place: str) -> dict[str, Any]:
    shown = {"role": "user", "content": parts}
    called = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    result = {"role": "tool", "tool_call_id": "call_1", "content": parts if place == "result" else "done"}
    before = [{"role": "user", "content": "Look."}]
    turns: dict[str, list[dict[str, Any]]] = {
        "newest": [*before, {"role": "assistant", "content": "Where?"}, shown],
        "begun": [shown, {"role": "assistant", "content": "It", "prefix": True}],
        "older": [shown, {"role": "assistant", "content": "I"}, {"role": "user", "content": "Well?"}],
        "result": [*before, called, result],
        "beside the result": [*before, called, result, shown],
    }
    return {"messages": turns[place], "max_tokens": 4}


def responses(parts: list[dict[str, Any]], place: str) -> dict[str, Any]:
    shown, before = {"role": "user", "content": parts}, {"role": "user", "content": "Look."}
    called = {"type": "function_call", "call_id": "call_1", "name": "look", "arguments": "{}"}
    output = {
        "type": "function_call_output", "call_id": "call_1", "output": parts if place == "result" else "done",
    }  # fmt: skip
    turns: dict[str, list[dict[str, Any]]] = {
        "newest": [shown],
        "begun": [shown],
        "older": [shown, {"role": "assistant", "content": "I"}, {"role": "user", "content": "Well?"}],
        "result": [before, called, output],
        "beside the result": [before, called, output, shown],
    }
    return {"input": turns[place], "max_output_tokens": 16}


def messages(blocks: list[dict[str, Any]], place: str) -> dict[str, Any]:
    shown = {"role": "user", "content": blocks}
    called = {
        "role": "assistant", "content": [{"type": "tool_use", "id": "call_1", "name": "look", "input": {}}],
    }  # fmt: skip
    result = {
        "type": "tool_result", "tool_use_id": "call_1", "content": blocks if place == "result" else "done",
    }  # fmt: skip
    turns: dict[str, list[dict[str, Any]]] = {
        "newest": [shown],
        "begun": [shown, {"role": "assistant", "content": "It"}],
        "older": [shown, {"role": "assistant", "content": "I"}, {"role": "user", "content": "Well?"}],
        "result": [{"role": "user", "content": "Look."}, called, {"role": "user", "content": [result]}],
        "beside the result": [
            {"role": "user", "content": "Look."}, called, {"role": "user", "content": [result, *blocks]},
        ],
    }  # fmt: skip
    return {"messages": turns[place], "max_tokens": 4}


DIALECTS = {
    CHAT: (chat, CHAT_PARTS), "/v1/responses": (responses, RESPONSES_PARTS), "/v1/messages": (messages, BLOCKS),
}  # fmt: skip
PLACES = ("older", "result", "beside the result", "newest", "begun")
CASES = [(path, kind) for path, (_, parts) in DIALECTS.items() for kind in parts]


@pytest.mark.parametrize("path,kind", CASES)
def test_a_model_reads_what_is_text_and_is_told_of_the_rest(monkeypatch, path, kind):
    make, parts = DIALECTS[path]
    part, expected = parts[kind]
    note = expected.startswith("[") and kind != "tool reference"
    seen = seen_by_the_template(monkeypatch)

    async def scenario(server: LocalServer):
        for place in PLACES:
            seen.clear()
            response = await server.post(path, **make([part], place))
            if note and place in ("newest", "begun"):
                error = response.json()["error"]
                assert response.status_code == 400 and "only text is served" in error["message"]
                continue
            assert response.status_code == 200, response.text
            assert expected in [message["content"] for message in seen], place
            named = "content[0]" in response.headers.get("x-tandem-ignored", "").replace("output[0]", "content[0]")
            assert named == note or place == "beside the result"

    run(scenario, tool_call_parser="hermes")


@pytest.mark.parametrize("path", DIALECTS)
def test_text_beside_an_attachment_keeps_its_own_line(monkeypatch, path):
    make, parts = DIALECTS[path]
    part, note = parts["image"]
    text = {"type": "input_text" if path == "/v1/responses" else "text", "text": "What is it?"}
    seen = seen_by_the_template(monkeypatch)

    async def scenario(server: LocalServer):
        response = await server.post(path, **make([part, text], "older"))
        assert response.status_code == 200, response.text
        assert seen[0]["content"].split() == f"{note} What is it?".split()
        assert seen[0]["content"].startswith(f"{note}\n")

    run(scenario)


def test_images_of_ollama(monkeypatch):
    seen = seen_by_the_template(monkeypatch)
    shown = {"role": "user", "content": "Look.", "images": ["AAAA"]}
    later = [{"role": "assistant", "content": "I"}, {"role": "user", "content": "Well?"}]

    async def scenario(server: LocalServer):
        response = await server.post("/api/chat", messages=[shown, *later], stream=False)
        assert response.status_code == 200, response.text
        assert seen[0]["content"] == f"Look.\n{IMAGE_NOTE}"
        assert response.headers["x-tandem-ignored"] == "messages[0].images[0]"
        response = await server.post("/api/chat", messages=[shown], stream=False)
        assert response.status_code == 400 and "messages[0].images" in response.json()["error"]
        response = await server.post("/api/generate", prompt="x", images=["AAAA"], stream=False)
        assert response.status_code == 400 and "images[0]" in response.json()["error"]

    run(scenario)


def test_a_type_that_nobody_knows_is_refused_wherever_it_stands():
    async def scenario(server: LocalServer):
        for path, (make, _) in DIALECTS.items():
            response = await server.post(path, **make([{"type": "smell"}], "result"))
            assert response.status_code == 400 and "'smell'" in response.json()["error"]["message"], path

    run(scenario)


def test_what_another_server_ran_is_left_out(monkeypatch):
    """A conversation that was begun at Anthropic's or OpenAI's, and goes on here."""
    seen = seen_by_the_template(monkeypatch)
    searched = {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "x"}}
    found = {"type": "web_search_tool_result", "tool_use_id": "s", "content": []}
    begin, end = {"role": "user", "content": "x"}, {"role": "user", "content": "y"}

    async def scenario(server: LocalServer):
        said = {"role": "assistant", "content": [searched, found, {"type": "text", "text": "I see."}]}
        response = await server.post("/v1/messages", max_tokens=4, messages=[begin, said, end])
        assert response.status_code == 200, response.text
        assert [m["content"] for m in seen] == ["x", "I see.", "y"]
        seen.clear()
        items = [begin, {"type": "web_search_call", "id": "ws_1", "status": "completed"},
                 {"role": "assistant", "content": "I see."}, end]  # fmt: skip
        response = await server.post("/v1/responses", input=items, max_output_tokens=16)
        assert response.status_code == 200, response.text
        assert [m["content"] for m in seen] == ["x", "I see.", "y"]

    run(scenario)


@pytest.mark.parametrize("part", [
    {"type": "thinking", "thinking": "Hm."}, {"type": "thinking", "thinking": [{"type": "text", "text": "Hm."}]},
    {"type": "reasoning", "text": "Hm."},
])  # fmt: skip
def test_thinking_parts_of_an_assistant_are_reasoning(monkeypatch, part):
    seen = seen_by_the_template(monkeypatch)
    said = {"role": "assistant", "content": [part, {"type": "text", "text": "Four."}]}
    turns = [{"role": "user", "content": "2+2?"}, said, {"role": "user", "content": "Sure?"}]

    async def scenario(server: LocalServer):
        response = await server.post(CHAT, messages=turns, max_tokens=4)
        assert response.status_code == 200, response.text
        assert (seen[1]["reasoning_content"], seen[1]["content"]) == ("Hm.", "Four.")

    run(scenario)


@pytest.mark.parametrize("roles,expected", [
    (["user"], 0),
    (["system", "user", "system"], 1),
    (["user", "assistant", "user"], 2),
    (["user", "user"], 1),
    (["user", "assistant"], 0),
    (["user", "assistant", "assistant"], 0),
    (["user", "assistant", "tool"], None),
    (["user", "assistant", "tool", "user"], None),
    (["system"], None), ([], None),
])  # fmt: skip
def test_which_turn_is_the_newest(roles, expected):
    assert newest_turn(roles) == expected


@pytest.mark.parametrize("data,name,media_type,expected", [
    ("data:text/plain,a%20b", None, None, "a b"),
    ("data:,a", None, None, "a"),
    ("data:text/plain;charset=utf-8;base64,YQ==", None, None, "a"),
    ("YQ==", "a.txt", None, "a"),
    ("YQ==", None, "text/markdown", "a"),
    ("YQ==", None, "application/ld+json", "a"),
    ("YQ==", "a.pdf", None, None),
    ("YQ==", None, None, None),
    ("no base64!", "a.txt", None, None),
    ("/w==", "a.txt", None, None),
    ("data:image/png,x", None, None, None),
    ("", "a.txt", None, None), (None, "a.txt", None, None),
])  # fmt: skip
def test_the_text_of_a_file(data, name, media_type, expected):
    assert file_text(data, name, media_type) == expected
