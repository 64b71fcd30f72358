"""`fit_images`: whose messages a checkpoint's chat template shows images in, found by trying it when the model is
loaded; `with_rows`: the rows of images in a prompt's ids."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tandem.errors import RequestError
from tandem.server.chat.conversation import Role
from tandem.server.chat.template_fit import Render
from tandem.server.chat.turns import CALL
from tandem.server.errors import ApiError

_PARTS = ({"type": "text", "text": "Alpha"}, {"type": "image"}, {"type": "text", "text": "Beta"})

Encode = Callable[[str], list[int]]


def fit_images(render: Render, encode: Encode, placeholder: int) -> frozenset[Role]:
    """The roles of whose image the template writes exactly one placeholder, between the texts around it. Raises what
    `render` raises besides RequestError."""
    shown: dict[str, Any] = {"content": list(_PARTS)}
    user, called = {"role": "user", "content": "Gamma"}, {"role": "assistant", "content": "", "tool_calls": [CALL]}
    result = {"role": "tool", "tool_call_id": CALL["id"], "name": "probe"} | shown
    tried: dict[Role, list[dict[str, Any]]] = {
        "user": [{"role": "user"} | shown],
        "tool": [user, called, result],
        "system": [{"role": "system"} | shown, user],
    }
    return frozenset(role for role, messages in tried.items() if _shows(render, encode, placeholder, messages))


def _shows(render: Render, encode: Encode, placeholder: int, messages: list[dict[str, Any]]) -> bool:
    try:
        text = render(messages)
    except RequestError:
        return False
    return encode(text).count(placeholder) == 1 and 0 <= text.find("Alpha") < text.find("Beta")


def with_rows(ids: list[int], placeholder: int, rows: Sequence[int]) -> tuple[list[int], list[int]]:
    """The ids with each placeholder as often as its image has rows, and where each image begins. Raises ApiError 500
    where the template wrote more or fewer placeholders than there are images: none may stand for another."""
    if ids.count(placeholder) != len(rows):
        text = f"the model's chat template wrote {ids.count(placeholder)} images for {len(rows)}; send fewer messages"
        raise ApiError(500, text, kind="server_error", code="chat_template_failed")
    longer, firsts, at = list[int](), list[int](), 0
    for count in rows:
        place = ids.index(placeholder, at)
        longer += ids[at:place]
        firsts.append(len(longer))
        longer += [placeholder] * count
        at = place + 1
    return longer + ids[at:], firsts
