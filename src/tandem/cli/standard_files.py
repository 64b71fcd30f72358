"""`open_standard_files`: for programs that are started without stdin, stdout or stderr (`kt serve MODEL >&-`)."""

from __future__ import annotations

import os
import sys

_NAMES = ("stdin", "stdout", "stderr")  # by their numbers


def open_standard_files() -> None:
    """Files that the shell has closed are /dev/null from here on. Python has None for one, which nobody can print to.
    The next file or socket would get its number. Called before anything else is opened."""
    for number, name in enumerate(_NAMES):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:
                os.dup2(null, number)
                os.close(null)
            os.set_inheritable(number, True)
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: SIM115
