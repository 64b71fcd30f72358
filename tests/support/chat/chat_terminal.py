"""`kt chat` in a real terminal (a pty)."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

CTRL_C, CTRL_D = "\x03", "\x04"


class Terminal:
    """A program in a pty: what it printed so far, without colours."""

    def __init__(self, process: subprocess.Popen[bytes], fd: int) -> None:
        self.process, self._fd, self._raw, self._seen = process, fd, b"", 0

    @property
    def text(self) -> str:
        # Of all bytes at once: a read may end inside a character or an escape sequence.
        return re.sub(r"\x1b(\[[0-9;?]*[A-Za-z]?)?|\x01|\x02", "", self._raw.decode(errors="ignore"))

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def press(self, key: str, shows: str, seconds: float = 60) -> str:
        """Presses `key` until `shows` is there. Python notices a Ctrl+C that falls between readline's prompt and its
        `select` only at the next one, which is what a person presses."""
        deadline = time.monotonic() + seconds
        while True:
            self.type(key)
            try:
                return self.expect(shows, seconds=2)
            except AssertionError:
                if time.monotonic() > deadline:
                    raise

    def expect(self, pattern: str, seconds: float = 60) -> str:
        """Reads until `pattern` appears after what was expected last."""
        deadline = time.monotonic() + seconds
        while True:
            found = re.search(pattern, self.text[self._seen :])
            if found:
                self._seen += found.end()
                return found.group()
            assert time.monotonic() < deadline, f"{pattern!r} did not come; the terminal shows:\n{self.text}"
            self._read()

    def settle(self) -> None:
        """Reads what the program prints until it is quiet, so that neither side's buffer is full."""
        while select.select([self._fd], [], [], 0.1)[0]:
            self._read()

    def _read(self) -> None:
        if not select.select([self._fd], [], [], 0.1)[0]:
            return
        try:
            self._raw += os.read(self._fd, 65536)
        except OSError:  # the program has ended
            time.sleep(0.05)


@contextmanager
def kt_chat(port: int, *flags: str, start: tuple[str, ...] = ("-m", "tandem")) -> Iterator[Terminal]:
    """start: what Python runs instead of the program."""
    own, theirs = pty.openpty()
    command = [sys.executable, *start, "chat", "--port", str(port), *flags]
    process = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
        preexec_fn=_own_terminal,  # noqa: PLW1509  the child only makes one system call before exec
    )  # fmt: skip
    os.close(theirs)
    try:
        yield Terminal(process, own)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
        process.wait()
        os.close(own)


def _own_terminal() -> None:
    """Makes the pty the controlling terminal, so that Ctrl+C becomes SIGINT; nohup and `&` have it ignored."""
    import fcntl
    import termios

    signal.signal(signal.SIGINT, signal.SIG_DFL)
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
