"""`TemplateProcess`: a model's chat template, rendered in a process of its own.

A template is a program that comes with the model. Jinja's sandbox keeps it from files and objects, but not from loops
without end or texts without bound, and Python cannot stop a thread. A process can be stopped, and its memory bounded.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn

import msgspec

from tandem.errors import CheckpointError, RequestError
from tandem.process.frames import receive_frame, send_frame
from tandem.server.errors import ApiError
from tandem.server.limits import TEMPLATE_SECONDS, TEMPLATE_START_SECONDS
from tandem.server.prompts.template_worker import NO_TEMPLATE, REFUSED
from tandem.text.chat_template import ChatTemplate


class TemplateProcess:
    """Renders one prompt after the other. A process that takes too long or dies is replaced at the next one."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._thread = ThreadPoolExecutor(1, "chat-template")  # waits for the process
        self._lock = threading.Lock()  # of the two below, which `close` takes away from the thread
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._closed = False

    async def render(self, messages: list[dict[str, Any]], **variables: Any) -> str:
        """Raises RequestError with the template's complaint, ApiError 500 when it takes too long or too much."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(
            self._thread, self._render, messages, self._template.values(**variables)
        )

    def render_now(self, messages: list[dict[str, Any]], **variables: Any) -> str:
        """The same, waiting for it."""
        return self._thread.submit(self._render, messages, self._template.values(**variables)).result()

    def start(self) -> None:
        """Raises CheckpointError where the template cannot be compiled."""
        self._thread.submit(self._connected).result()

    def close(self) -> None:
        """Also in the midst of a prompt. No process is started any more."""
        self._closed = True
        self._stop()

    def _stop(self) -> None:
        with self._lock:
            if self._process is not None:
                self._process.kill()
                self._process.wait()
            if self._socket is not None:
                with contextlib.suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
                self._socket.close()
            self._process = self._socket = None

    def _render(self, messages: list[dict[str, Any]], values: dict[str, Any]) -> str:
        try:
            return self._ask(self._connected(), {"messages": messages, "values": values})
        except (OSError, EOFError) as error:  # TimeoutError is an OSError
            self._stop()
            self._failed(error)

    def _connected(self) -> socket.socket:
        """Socket of a process that has compiled the template. Raises CheckpointError."""
        if self._socket is None:
            ours, theirs = socket.socketpair()
            command = [sys.executable, "-P", "-m", "tandem.server.prompts.template_worker", str(theirs.fileno())]
            with theirs, self._lock:
                if self._closed:
                    ours.close()
                    raise EOFError("closed")
                self._process = subprocess.Popen(
                    command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL
                )
                self._socket = ours
            self._compile(ours)
        return self._socket

    def _compile(self, ours: socket.socket) -> None:
        what, advice = f"begin within {TEMPLATE_START_SECONDS:g} s", "the machine may be too busy"
        try:
            ours.settimeout(TEMPLATE_START_SECONDS)
            receive_frame(ours)  # it runs, and has taken none of the template's time
            what, advice = f"compile it within {TEMPLATE_SECONDS:g} s", "give the model another"
            self._ask(ours, {"source": self._template.source, "with_tools": self._template.with_tools})
        except (OSError, EOFError) as error:
            self._stop()
            text = f"the process of the model's chat template did not {what} ({_why(error)}); {advice}"
            raise CheckpointError(text) from error

    def _ask(self, ours: socket.socket, question: dict[str, Any]) -> str:
        ours.settimeout(TEMPLATE_SECONDS)
        send_frame(ours, msgspec.json.encode(question))
        answer = receive_frame(ours)
        kind, text = answer[:1], answer[1:].decode()
        if kind == NO_TEMPLATE:
            raise CheckpointError(text)
        if kind == REFUSED:
            raise RequestError(text, "messages")
        return text

    def _failed(self, error: Exception) -> NoReturn:
        message = f"the model's chat template did not render this prompt within {TEMPLATE_SECONDS:g} s"
        if not isinstance(error, TimeoutError):
            message = f"the model's chat template failed ({_why(error)})"
        raise ApiError(
            500, f"{message}; send shorter messages", kind="server_error", code="chat_template_failed"
        )


def _why(error: Exception) -> str:
    return "no answer" if isinstance(error, TimeoutError) else "its process ended"
