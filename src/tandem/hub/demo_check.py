"""Record that the demo model was whole before: reading its 829 MB anew takes seconds, and importing its builder too.

A file whose size or time has changed is read again, and so is everything once the builder is another.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable
from importlib.resources import files
from pathlib import Path
from typing import Any

STAMP = ".checked"
_BUILDER = ("demo.py", "demo_source.py", "demo_text.py", "demo_weights.py")  # of checkpoint/


def known_whole(directory: Path) -> bool:
    """Whether nothing in `directory` has changed since `remember_whole`."""
    try:
        stamp = json.loads((directory / STAMP).read_text(encoding="utf-8"))
        return bool(stamp == state_of(directory, stamp["files"]))
    except (OSError, ValueError, KeyError, TypeError):
        return False


def state_of(directory: Path, names: Iterable[str]) -> dict[str, Any]:
    """State of the files, for `remember_whole`; call it before they are read. Raises OSError where one is missing."""
    stats = {name: (directory / name).stat() for name in names}
    return {"builder": _builder(), "files": {name: [s.st_size, s.st_mtime_ns] for name, s in stats.items()}}


def remember_whole(directory: Path, state: dict[str, Any]) -> None:
    """Where this process may only read, or the disk is full, nothing is kept."""
    part = directory / f"{STAMP}.{os.getpid()}"
    with contextlib.suppress(OSError):
        try:
            part.write_text(json.dumps(state) + "\n", encoding="utf-8")
            part.replace(directory / STAMP)
        finally:
            part.unlink(missing_ok=True)


def _builder() -> str:
    sources = files("tandem") / "checkpoint"
    return hashlib.sha256(b"".join((sources / name).read_bytes() for name in _BUILDER)).hexdigest()
