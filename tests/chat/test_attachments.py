"""Images, documents and files in a conversation: plain text is given to the model, of the rest it is told. A refusal
would come again with each later request, so only what a user shows in the newest turn is refused, and not to agents."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from echo_tokenizer import seen_by_the_template
from server_harness import LocalServer
from server_requests import CHAT, run
from tandem.server.chat.attachments import file_text, refused_turn

IMAGE_NOTE, FILE_NOTE, PDF_NOTE, SOUND_NOTE, VIDEO_NOTE = (
    f"[{what}. You cannot {verb} it: you read text only. Say so if it matters.]"
    for what, verb in (
        ("an image", "see"), ("a file", "read"), ("a file: a.pdf", "read"), ("a sound", "hear"), ("a video", "see"),
    )
)  # fmt: skip
CALL = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
PNG, PDF, TEXT = "data:image/png;base64,AAAA", "JVBERi0=", base64.b64encode("Grüße".encode()).decode()
CHAT_PARTS: dict[str, tuple[dict[str, Any], str]] = {
    "image": ({"type": "image_url", "image_url": {"url": PNG}}, IMAGE_NOTE),
    "pdf": (
        {"type": "file", "file": {"filename": "a.pdf", "file_data": f"data:application/pdf;base64,{PDF}"}},
        PDF_NOTE,
    ),
    "file by id": ({"type": "file", "file": {"file_id": "file-1"}}, FILE_NOTE),
    "sound": (
        {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
        SOUND_NOTE,
    ),
    "video": ({"type": "video_url", "video_url": {"url": PNG}}, VIDEO_NOTE),
    "text file": ({"type": "file", "file": {"filename": "a.md", "file_data": TEXT}}, "Grüße"),
    "text in a URL": ({"type": "file", "file": {"file_data": f"data:text/plain;base64,{TEXT}"}}, "Grüße"),
}
RESPONSES_PARTS: dict[str, tuple[dict[str, Any], str]] = {
    "image": ({"type": "input_image", "image_url": PNG, "detail": "auto"}, IMAGE_NOTE),
    "pdf": (
        {"type": "input_file", "filename": "a.pdf", "file_data": f"data:application/pdf;base64,{PDF}"},
        PDF_NOTE,
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
        PDF_NOTE,
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
FUNCTION = {"name": "look", "parameters": {"type": "object"}}
AGENT: dict[str, list[dict[str, Any]]] = {
    CHAT: [{"type": "function", "function": FUNCTION}],
    "/v1/responses": [{"type": "function", **FUNCTION}],
    "/v1/messages": [{"name": "look", "input_schema": {"type": "object"}}],
}
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


@pytest.mark.parametrize("path,kind", CASES)
def test_an_agent_is_not_refused(monkeypatch, path, kind):
    """Some agents append the next prompt to the message that was refused: each later request would be refused, too."""
    make, parts = DIALECTS[path]
    part, expected = parts[kind]
    seen = seen_by_the_template(monkeypatch)

    async def scenario(server: LocalServer):
        for place in PLACES:
            seen.clear()
            response = await server.post(path, **make([part], place), tools=AGENT[path])
            assert response.status_code == 200, response.text
            assert expected in [message["content"] for message in seen], place
            named = "content[0]" in response.headers.get("x-tandem-ignored", "").replace("output[0]", "content[0]")
            assert named == expected.endswith("matters.]") or place == "beside the result"

    run(scenario, tool_call_parser="hermes")


@pytest.mark.parametrize("path,count", [
    ("/v1/messages", "/v1/messages/count_tokens"), ("/v1/responses", "/v1/responses/input_tokens"), (CHAT, "/tokenize"),
])  # fmt: skip
def test_what_is_answered_is_counted(path, count):
    make, parts = DIALECTS[path]

    async def scenario(server: LocalServer):
        body = make([parts["image"][0]], "newest")
        for tools, status in ((AGENT[path], 200), ([], 400)):
            for each in (path, count):
                response = await server.post(each, **body, tools=tools)
                assert response.status_code == status, response.text

    run(scenario, tool_call_parser="hermes")


def test_a_kept_response_goes_on_with_the_note(monkeypatch):
    seen = seen_by_the_template(monkeypatch)
    body = responses([RESPONSES_PARTS["image"][0]], "newest")

    async def scenario(server: LocalServer):
        first = await server.post("/v1/responses", **body, tools=AGENT["/v1/responses"])
        later = {"input": "Well?", "previous_response_id": first.json()["id"], "max_output_tokens": 16}
        response = await server.post("/v1/responses", **later)
        assert response.status_code == 200, response.text
        assert seen[0]["content"] == IMAGE_NOTE

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
        response = await server.post("/api/chat", messages=[shown], tools=AGENT[CHAT], stream=False)
        assert response.status_code == 200, response.text
        assert seen[0]["content"] == f"Look.\n{IMAGE_NOTE}"
        assert response.headers["x-tandem-ignored"] == "messages[0].images[0]"
        response = await server.post("/api/generate", prompt="x", images=["AAAA"], stream=False)
        assert response.status_code == 400 and "images[0]" in response.json()["error"]

    run(scenario, tool_call_parser="hermes")


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
def test_which_turn_is_refused(roles, expected):
    assert refused_turn(roles, None) == refused_turn(roles, []) == expected
    assert refused_turn(roles, ["a tool"]) is None


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
