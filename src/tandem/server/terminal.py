"""Output of an engine's process. `outlive_terminal`: it may have no reader any more, which must not end it.
`tell_lost_ranks`: that another rank is gone is a line, no trace. `log_to_terminal`: as much as the server logs."""

from __future__ import annotations

import io
import logging
import os
import sys
from typing import TextIO

from tandem.errors import RankLost


class LastingStream(io.TextIOWrapper):
    """Goes on into /dev/null once its pipe is closed, its terminal gone or its disk full."""

    def write(self, text: str) -> int:
        try:
            return super().write(text)
        except OSError:
            self._silence()
            return len(text)

    def flush(self) -> None:
        try:
            super().flush()
        except OSError:
            self._silence()

    def _silence(self) -> None:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self.fileno())
        os.close(null)


def outlive_terminal() -> None:
    """For this process's stdout and stderr, from here on."""
    sys.stdout, sys.stderr = _lasting(sys.stdout), _lasting(sys.stderr)


def _lasting(stream: TextIO) -> TextIO:
    """Over a copy of the file: the old stream closes its own when it is forgotten."""
    file = os.fdopen(os.dup(stream.fileno()), "wb")
    return LastingStream(file, encoding="utf-8", errors="backslashreplace", line_buffering=True)


def tell_lost_ranks() -> None:
    """Where nothing else was set up: logging's last resort prints traces of them, which hide what the server says."""
    if logging.lastResort is not None:
        logging.lastResort.addFilter(_without_traceback)


def log_to_terminal(level: str) -> None:
    """The package's log records from this level on, in the form of the API process's. level: as --log-level."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    handler.addFilter(_without_traceback)
    log = logging.getLogger("tandem")
    log.addHandler(handler)
    log.setLevel(level.upper())


def _without_traceback(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, RankLost):
        record.msg, record.args, record.exc_info = f"{record.getMessage()}: {error}", (), None
    return True
