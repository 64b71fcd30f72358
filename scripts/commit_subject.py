#!/usr/bin/env python3
"""The commit-msg hook: holds subjects to `[area] what` in 72 characters, as much as `git log` and web pages show.

    make hooks                          # installs it
    scripts/commit_subject.py FILE      # FILE: the message, as git gives it
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

MOST_CHARACTERS = 72
GIT_S_OWN = re.compile(r"(Merge|Revert|fixup!|squash!|amend!) ?")


def fault(message: str) -> str | None:
    """Reason why a message is refused; None: it is taken. Lines of comments do not count."""
    lines = [line.rstrip() for line in message.splitlines() if not line.startswith("#")]
    subject = next((line for line in lines if line), "")
    if not subject or GIT_S_OWN.match(subject):
        return None
    if len(subject) > MOST_CHARACTERS:
        return f"the subject has {len(subject)} characters, and at most {MOST_CHARACTERS} are shown: shorten it"
    if not re.match(r"\[[\w.,/ -]+\] \S", subject):
        return f"the subject is {subject!r}; begin it with its area, as in [kernels] int4 rows of 8"
    return None


def main() -> None:
    reason = fault(Path(sys.argv[1]).read_text(encoding="utf-8"))
    if reason is not None:
        sys.exit(reason)


if __name__ == "__main__":
    main()
