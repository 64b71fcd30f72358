"""Starts a stub for a replica of Ray Serve. Ray's processes import this, and so nothing else of the tests."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from tandem.server.front.models_file import ModelEntry

STUB = Path(__file__).parents[1] / "stub_model.py"


def stub(folder: str, entry: ModelEntry, socket: str) -> tuple[Sequence[str], bytes]:
    """A `Command` of `tandem.server.front.child`, once `folder` is bound."""
    return [sys.executable, str(STUB), socket, entry.name, folder], b""
