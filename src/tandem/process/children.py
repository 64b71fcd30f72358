"""How a child process and its parent learn of each other's end."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # linux/prctl.h
_LIKELY = {
    "SIGKILL": "perhaps memory ran out, see dmesg",
    "SIGBUS": "perhaps a file of the model was changed or cannot be read",
}


def signal_at_end_of(parent: int, number: signal.Signals) -> None:
    """This process gets the signal when `parent`, which started it, ends; it exits where that has happened already."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # it died before prctl could see it
        sys.exit(0)


def exit_reason(code: int) -> str:
    """code: of a child that has ended; negative: the signal that ended it."""
    if code >= 0:
        return f"exit code {code}"
    with contextlib.suppress(ValueError):
        name = signal.Signals(-code).name
        return f"{name}: {_LIKELY[name]}" if name in _LIKELY else name
    return f"signal {-code}"
