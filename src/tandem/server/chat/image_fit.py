"""`fit_images`: whose messages a checkpoint's chat template shows images in, found by trying it when the model is
loaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tandem.errors import RequestError
from tandem.server.chat.conversation import Role
from tandem.server.chat.template_fit import Render
from tandem.server.chat.turns import CALL

_PARTS = ({"type": "text", "text": "Alpha"}, {"type": "image"}, {"type": "text", "text": "Beta"})

Encode = Callable[[str], list[int]]


def fit_images(render: Render, encode: Encode, placeholder: int) -> frozenset[Role]:
    """The roles of whose image the template writes exactly one placeholder, between the texts around it. Raises what
    `render` raises besides RequestError."""
    content: dict[str, Any] = {"content": list(_PARTS)}
    user, called = {"role": "user", "content": "Gamma"}, {"role": "assistant", "content": "", "tool_calls": [CALL]}
    reply = {"role": "tool", "tool_call_id": CALL["id"], "name": "probe"} | content
    turns: dict[Role, list[dict[str, Any]]] = {
        "user": [{"role": "user"} | content],
        "tool": [user, called, reply],
        "system": [{"role": "system"} | content, user],
    }
    return frozenset(role for role, messages in turns.items() if _shows(render, encode, placeholder, messages))


def _shows(render: Render, encode: Encode, placeholder: int, messages: list[dict[str, Any]]) -> bool:
    try:
        text = render(messages)
    except RequestError:
        return False
    return encode(text).count(placeholder) == 1 and 0 <= text.find("Alpha") < text.find("Beta")
