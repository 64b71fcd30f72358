"""`UnrenderedPrompt`: a conversation as a chat template is given it; `Prompt`: what the template made of it.

Control tokens that messages spell are guarded (`markers.py`). Where the answer goes on with the last message, a mark
behind its text shows where the prompt ends, whatever the template writes behind a turn.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import takewhile
from string import ascii_letters
from typing import Any

from tandem.errors import RequestError
from tandem.text.markers import MarkerGuard

Messages = list[dict[str, Any]]
OwnMarkers = Callable[[str, str], Collection[str]]  # (role, key): markers that this text of a message may spell

_MARK = "TheAnswerGoesOnHere"  # letters alone, which templates leave as they are


@dataclass(frozen=True, slots=True)
class Prompt:
    """A rendered conversation. `sign`: what its messages were guarded with; "" where nothing had to be.

    `begun`: what of the answer the prompt's end has already, without the sign; `before` is all in front of it. Both
    matter only where the answer goes on with the last message (`goes_on`).
    """

    text: str
    sign: str = ""
    goes_on: bool = False
    before: str = ""
    begun: str = ""
    content: str = ""  # of the last message: `begun` may have what a template writes before it, too


@dataclass(frozen=True, slots=True)
class UnrenderedPrompt:
    """`messages` and `variables` are guarded. `mark`: where it is in the rendered text, the prompt ends."""

    messages: Messages
    variables: dict[str, Any]
    sign: str = ""
    mark: str = ""
    content: str = ""  # of the last message, guarded, without the mark

    def prompt(self, text: str, opening: str | None = None) -> Prompt:
        """text: these messages, rendered. opening: the ones before the last with what begins an answer, rendered; None
        where the template refuses them. Raises RequestError."""
        text = self._signed(text)
        if not self.mark:
            return Prompt(text, self.sign)
        text = _up_to_mark(text, self.content, self.mark)
        at = _begins(text, self.content, self._signed(opening or ""))
        begun = text[at:].replace(self.sign, "") if self.sign else text[at:]
        content = self.content.replace(self.sign, "") if self.sign else self.content
        return Prompt(text, self.sign, True, text[:at], begun, content)

    def _signed(self, text: str) -> str:
        """Some templates write JSON in ASCII."""
        return text.replace(f"\\u{ord(self.sign):04x}", self.sign) if self.sign else text


def draft(
    messages: Messages,
    variables: dict[str, Any],
    guard: MarkerGuard | None,
    own: OwnMarkers | None = None,
    goes_on: bool = False,
) -> UnrenderedPrompt:
    """goes_on: the answer goes on with the last message, an assistant's. Raises RequestError."""
    sign = guard.sign("\n".join(_texts([messages, variables.get("tools")]))) if guard is not None else ""
    if guard is not None and sign:
        messages = [_guarded(message, guard, sign, own or _no_markers) for message in messages]
        variables = variables | {"tools": guard.guard(variables.get("tools"), sign)}
    one = UnrenderedPrompt(messages, variables, sign)
    return _marked(one) if goes_on else one


def _guarded(message: dict[str, Any], guard: MarkerGuard, sign: str, own: OwnMarkers) -> dict[str, Any]:
    role = str(message.get("role"))
    return {key: guard.guard(value, sign, own(role, key)) for key, value in message.items()}


def _no_markers(role: str, key: str) -> Collection[str]:
    return ()


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, one in value.items():
            yield from _texts(key)
            yield from _texts(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _texts(one)


def _marked(one: UnrenderedPrompt) -> UnrenderedPrompt:
    """With a mark behind the text of the last message. The space behind it shows whether the template trims."""
    last = one.messages[-1] if one.messages else {}
    mark = _unused(_MARK, _texts([one.messages, one.variables]))
    content, marked = _with(last.get("content"), f"{mark} ")
    if last.get("role") != "assistant" or last.get("tool_calls") or not content:
        raise _cannot("needs a last message of role assistant with text, and without tool calls")
    return replace(one, messages=[*one.messages[:-1], last | {"content": marked}], mark=mark, content=content)


def _unused(mark: str, texts: Iterable[str]) -> str:
    """mark, behind it random letters where a text has it: those that a client could foresee would be searched for once
    per letter."""
    text, chosen = _joined(texts), mark
    while chosen in text:
        chosen = mark + "".join(secrets.choice(ascii_letters) for _ in range(16))
    return chosen


def _joined(texts: Iterable[str]) -> str:
    return "\n".join(texts)


def _with(content: Any, mark: str) -> tuple[str, Any]:
    """The text that goes on, and the content with the mark behind it. "" where there is no text."""
    if isinstance(content, str):
        return content, content + mark
    parts = list(content) if isinstance(content, list | tuple) else []
    for at in reversed(range(len(parts))):
        if isinstance(parts[at], dict) and isinstance(text := parts[at].get("text"), str):
            parts[at] = parts[at] | {"text": text + mark}
            return text, parts
    return "", content


def _up_to_mark(text: str, content: str, mark: str) -> str:
    """Raises RequestError where the template does not show the content, or only a part of it."""
    at = text.rfind(mark)
    prefix = text[: max(at, 0)]
    if not text.startswith(f"{mark} ", at):  # the template trims; the mark kept the space before it
        space = content[len(content.rstrip()) :]
        prefix = prefix.removesuffix(space) if content.strip() else prefix
    if at < 0 or not "".join(prefix.split()).endswith("".join(content.split())):
        raise _cannot("needs a last message that the chat template shows as it is, and it leaves out a part")
    return prefix


def _begins(text: str, content: str, opening: str) -> int:
    """Where the answer begins. Templates may write something before its text that they write nowhere else, or the text
    in their own way; then only its last part is what the client sent."""
    if opening and text.startswith(opening):
        return len(opening)
    return len(text) - len(common_end(text, content))


def common_end(first: str, second: str) -> str:
    """The longest text with which both end."""
    same = takewhile(lambda pair: pair[0] == pair[1], zip(reversed(first), reversed(second), strict=False))
    return first[len(first) - sum(1 for _ in same) :]


def _cannot(why: str) -> RequestError:
    return RequestError(f"continue_final_message {why}", "continue_final_message")
