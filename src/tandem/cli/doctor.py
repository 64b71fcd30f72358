"""`kt doctor`."""

from __future__ import annotations


def doctor() -> None:
    """What this machine has, and what is missing, each with the fix.

    Example: kt doctor
    """
