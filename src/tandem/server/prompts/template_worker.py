"""The process of a `TemplateProcess`: `python -m tandem.server.prompts.template_worker DESCRIPTOR`.

It says that it runs, and reads frames (four bytes of length, then JSON) from a socket: first the template, then prompts
to render. It ends with the socket, and it is bounded in memory and time even when nobody is there any more to end it.
"""

from __future__ import annotations

import resource
import signal
import socket
import sys
from typing import Any, NoReturn

import msgspec

from tandem.errors import TandemError
from tandem.process.frames import receive_frame, send_frame
from tandem.server.limits import MAX_RENDERED_CHARS, TEMPLATE_BYTES, TEMPLATE_SECONDS
from tandem.text.chat_template import ChatTemplate

DONE, REFUSED, NO_TEMPLATE = b"+", b"-", b"!"  # what an answer begins with; then a text


def work(ours: socket.socket) -> NoReturn:
    """Raises EOFError when nobody asks any more."""
    _answer(ours, DONE, "")
    sources = _next(ours)
    template = ChatTemplate(sources["source"], with_tools=sources["with_tools"])
    _answer(ours, DONE, _compiled(template))
    while True:
        question = _next(ours)
        _answer(ours, *_rendered(template, question["messages"], question["values"]))
        del question


def _next(ours: socket.socket) -> dict[str, Any]:
    question: dict[str, Any] = msgspec.json.decode(receive_frame(ours))
    return question


def _answer(ours: socket.socket, kind: bytes, text: str) -> None:
    send_frame(ours, kind + text.encode(errors="replace"))


def _compiled(template: ChatTemplate) -> str:
    _bound_time()
    template.compile()
    return ""


def _rendered(
    template: ChatTemplate, messages: list[dict[str, Any]], values: dict[str, Any]
) -> tuple[bytes, str]:
    _bound_time()
    try:
        text = template.render(messages, **values)
    except TandemError as error:
        return REFUSED, str(error)
    if len(text) > MAX_RENDERED_CHARS:
        return REFUSED, f"the model's chat template makes more than {MAX_RENDERED_CHARS} characters of this"
    return DONE, text


def _bound_time() -> None:
    """For the next prompt. Who asked kills us sooner, by the clock, if it still lives."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    seconds = int(used.ru_utime + used.ru_stime + 2 * TEMPLATE_SECONDS) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, resource.getrlimit(resource.RLIMIT_CPU)[1]))


def _bound_everything() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (TEMPLATE_BYTES, TEMPLATE_BYTES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def main() -> int:
    for number in (signal.SIGINT, signal.SIGTERM):  # the server drains first
        signal.signal(number, signal.SIG_IGN)
    with socket.socket(fileno=int(sys.argv[1])) as ours:
        _bound_everything()
        try:
            work(ours)
        except (EOFError, ConnectionError):
            return 0
        except TandemError as error:
            _answer(ours, NO_TEMPLATE, str(error))
            return 1


if __name__ == "__main__":
    sys.exit(main())
