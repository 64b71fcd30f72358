"""What a user types as MODEL → a directory."""

from __future__ import annotations

import re
from pathlib import Path

from tandem.config.env import cache_dir
from tandem.errors import CheckpointError

DEMO = "demo"
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def demo_dir() -> Path:
    """Where the demo model lives once it is built."""
    return cache_dir() / "demo"


def resolve_model(name_or_path: str | Path) -> Path:
    """ "demo" → its cache directory (built or not); else an existing directory. Nothing is downloaded.

    Raises CheckpointError saying what to do instead.
    """
    if str(name_or_path) == DEMO:
        return demo_dir()
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        return path
    if path.is_file():
        raise CheckpointError(
            f"{path} is a file: give the directory that holds config.json and *.safetensors"
        )
    if _HUB_NAME.fullmatch(str(name_or_path)):
        raise CheckpointError(
            f"{name_or_path} is no directory here, and models are not downloaded by name: "
            f"run `hf download {name_or_path} --local-dir DIR`, then give DIR"
        )
    raise CheckpointError(f"{path} does not exist: give a model directory, or 'demo'")
