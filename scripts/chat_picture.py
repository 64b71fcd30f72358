"""Draws docs/images/chat.svg: a real `kt chat` session with the server that runs on port 30000.

kt serve demo &
python scripts/chat_picture.py
"""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import threading
import time
from io import StringIO
from pathlib import Path

from rich.console import Console
from rich.text import Text

QUESTIONS = ["What is the capital of France?", "Write one sentence about its most famous tower.", "/exit"]
PROMPT = "you ›"
SECONDS = 120
WIDTH = 84
PICTURE = Path(__file__).parent.parent / "docs" / "images" / "chat.svg"


class Recorder:
    """A program in a terminal of WIDTH columns, and all that it prints."""

    def __init__(self, command: list[str]) -> None:
        own, theirs = pty.openpty()
        size = {**os.environ, "COLUMNS": str(WIDTH), "TERM": "xterm-256color"}
        self.process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=size)
        os.close(theirs)
        self._fd, self.output = own, b""
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        try:
            while data := os.read(self._fd, 65536):
                self.output += data
        except OSError:
            return  # the program has ended

    def answer_prompt(self, number: int, line: str) -> None:
        """Types `line` at the prompt that is the number-th."""
        deadline = time.monotonic() + SECONDS
        while self.output.decode(errors="replace").count(PROMPT) <= number:
            if time.monotonic() > deadline or self.process.poll() is not None:
                sys.exit(f"no prompt came; the terminal shows:\n{self.output.decode(errors='replace')}")
            time.sleep(0.05)
        os.write(self._fd, line.encode() + b"\r")


def main() -> None:
    recorder = Recorder([sys.executable, "-m", "tandem", "chat", "--temperature", "0", "--max-tokens", "60"])
    for number, line in enumerate(QUESTIONS):
        recorder.answer_prompt(number, line)
    recorder.process.wait(SECONDS)
    # Colours stay; what only moves the cursor or marks a paste goes.
    shown = re.sub(r"\x1b\[\?[0-9]+[hl]|\x1b\[K|\r", "", recorder.output.decode())
    console = Console(record=True, width=WIDTH, file=StringIO(), force_terminal=True)
    console.print(Text.from_ansi("$ kt chat --temperature 0 --max-tokens 60\n" + shown.rstrip()))
    PICTURE.parent.mkdir(parents=True, exist_ok=True)
    console.save_svg(str(PICTURE), title="kt chat")
    print(PICTURE)


if __name__ == "__main__":
    main()
