"""`as_taken`: a conversation's turns in an order that the checkpoint's chat template takes, without losing a text.

Agents send several system messages, system messages in the midst, and two turns of one role. Many templates refuse
that, and some show only the first or the last system message. So each template is tried when the model is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tandem.errors import RequestError
from tandem.server.chat.content import Image, images_of, joined, text_of
from tandem.server.chat.conversation import Message, Role
from tandem.server.chat.template_fit import Render, TemplateMessages

_BETWEEN = "\n\n"  # messages that become one
CALL = {"id": "callnum00", "type": "function", "function": {"name": "probe", "arguments": dict[str, Any]()}}


@dataclass(frozen=True, slots=True)
class TurnOrders:
    """Orders of turns that a template takes. `system`: a system message at the beginning; `more_system`: several, and
    later ones. `repeated`: two turns of one role in a row; `user_after_results`: a user behind a tool's result."""

    system: bool = True
    more_system: bool = True
    repeated: bool = True
    user_after_results: bool = True


def fit_turns(render: Render) -> TurnOrders:
    """A template that refuses everything is left alone. Raises what `render` raises besides RequestError."""
    user, second_user, answer = _turn("user", "Alpha"), _turn("user", "Beta"), _turn("assistant", "Gamma")
    first, second = _turn("system", "Delta"), _turn("system", "Epsilon")
    called = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    result = _turn("tool", "Zeta") | {"tool_call_id": CALL["id"], "name": "probe"}
    if not _shows(render, user):
        return TurnOrders()
    system = _shows(render, first, user)
    return TurnOrders(
        system=system,
        more_system=system
        and _shows(render, first, second, user)
        and _shows(render, first, user, second)
        and _shows(render, user, answer, second, second_user),
        repeated=_shows(render, user, second_user) and _shows(render, user, answer, answer, second_user),
        user_after_results=not _shows(render, user, called, result)
        or _shows(render, user, called, result, second_user),
    )


def _turn(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def _shows(render: Render, *messages: dict[str, Any]) -> bool:
    """Whether the prompt has all their texts."""
    conversation: TemplateMessages = list(messages)
    try:
        text = render(conversation)
    except RequestError:
        return False
    return all(message["content"] in text for message in messages)


def shown_by_user(messages: Iterable[Message], roles: Collection[Role]) -> Iterator[Message]:
    """Images of other roles are shown by the user right behind: behind a tool's result comes the next one first. Where
    `roles` is empty there are none."""
    waiting: list[Image] = []
    for message in messages:
        if waiting and message.role != "tool":
            yield Message("user", tuple(waiting))
            waiting = []
        images = () if message.role in roles else images_of(message.content)
        waiting += images
        yield replace(message, content=text_of(message.content)) if images else message
    if waiting:
        yield Message("user", tuple(waiting))


def as_taken(messages: Iterable[Message], turns: TurnOrders) -> tuple[Message, ...]:
    if not turns.more_system:
        messages = _one_system(list(messages), turns.system)
    if not turns.repeated:
        messages = _paired(messages, _of_one_role)
    return tuple(messages if turns.user_after_results else _paired(messages, _in_result))


def _one_system(messages: Sequence[Message], system: bool) -> Iterator[Message]:
    """Those at the beginning as one message, if any is taken. Others are said by the user, where they stand: what was
    said before keeps its place in the prefix cache."""
    leading = 0
    while system and leading < len(messages) and messages[leading].role == "system":
        leading += 1
    if leading:
        yield Message("system", joined((m.content for m in messages[:leading]), _BETWEEN))
    for message in messages[leading:]:
        yield Message("user", message.content) if message.role == "system" else message


def _paired(messages: Iterable[Message], both: Callable[[Message, Message], Message | None]) -> Iterator[Message]:
    """both: a message and the one behind it as one; None: they stay two."""
    last: Message | None = None
    for message in messages:
        pair = None if last is None else both(last, message)
        if last is not None and pair is None:
            yield last
        last = pair or message
    if last is not None:
        yield last


def _of_one_role(first: Message, second: Message) -> Message | None:
    """Behind an assistant's calls their results come."""
    if first.role != second.role or first.role == "tool" or first.tool_calls:
        return None
    return replace(
        second,
        content=joined((first.content, second.content), _BETWEEN),
        name=first.name if first.name == second.name else None,
        reasoning=_BETWEEN.join(filter(None, (first.reasoning, second.reasoning))) or None,
    )


def _in_result(first: Message, second: Message) -> Message | None:
    """Tool result with the text that the user adds to it. None with images, which few templates show there, or for
    other roles."""
    if first.role != "tool" or second.role != "user" or images_of(second.content):
        return None
    return replace(first, content=joined((first.content, second.content), _BETWEEN))
