"""An image in a tool's result: the model is told of it. A refusal would come again with each later request."""

from __future__ import annotations

from typing import Any

import pytest

from echo_tokenizer import seen_by_the_template
from server_harness import LocalServer
from server_requests import CHAT, error_of, run
from tandem.server.chat.conversation import UNSEEN

CALL = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
IMAGE: dict[str, Any] = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
SOURCE = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
DIALECTS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (CHAT, {"messages": [
        {"role": "user", "content": "Look."}, {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "a.png "}, IMAGE]},
        {"role": "user", "content": "Well?"},
    ]}),
    "messages": ("/v1/messages", {"max_tokens": 99, "messages": [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "call_1", "name": "look", "input": {}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "call_1", "content": [{"type": "image", "source": SOURCE}]},
            {"type": "text", "text": "Well?"},
        ]},
    ]}),
    "responses": ("/v1/responses", {"input": [
        {"role": "user", "content": "Look."},
        {"type": "function_call", "call_id": "call_1", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "call_1",
         "output": [{"type": "input_image", "image_url": "data:image/png;base64,AAAA"}]},
        {"role": "user", "content": "Well?"},
    ]}),
}  # fmt: skip


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_model_is_told_of_an_image_that_a_tool_gave(monkeypatch, dialect):
    path, body = DIALECTS[dialect]
    seen = seen_by_the_template(monkeypatch)

    async def scenario(server: LocalServer):
        response = await server.post(path, **body)
        assert response.status_code == 200, response.text
        [result] = [message for message in seen if message["role"] == "tool"]
        assert result["content"].endswith(UNSEEN)
        assert "image" in response.headers["x-tandem-ignored"] or "source" in response.headers["x-tandem-ignored"]

    run(scenario, tool_call_parser="hermes")


def test_what_a_user_shows_is_refused():
    async def scenario(server: LocalServer):
        shown = [{"role": "user", "content": [IMAGE]}]
        assert error_of(await server.post(CHAT, messages=shown), 400)["code"] == "not_available"

    run(scenario)
