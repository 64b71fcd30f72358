"""What a user types as MODEL → a directory, or a GGUF file."""

from __future__ import annotations

import re
from pathlib import Path

from tandem.checkpoint.gguf_model import SUFFIX, is_gguf, split_files
from tandem.config.env import cache_dir
from tandem.errors import CheckpointError

DEMO = "demo"
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def demo_dir() -> Path:
    """Where the demo model lives once it is built."""
    return cache_dir() / "demo"


def resolve_model(name_or_path: str | Path) -> Path:
    """ "demo" → its cache directory (built or not); else an existing directory or GGUF file. Nothing is downloaded.

    A directory that holds one GGUF model and no config.json is that model.

    Raises CheckpointError saying what to do instead.
    """
    if str(name_or_path) == DEMO:
        return demo_dir()
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        return path if (path / "config.json").exists() else _only_gguf(path)
    if path.is_file():
        if is_gguf(path):
            return path
        raise CheckpointError(
            f"{path} is not GGUF: give a GGUF file, or the directory that holds config.json and *.safetensors"
        )
    if _HUB_NAME.fullmatch(str(name_or_path)):
        raise CheckpointError(
            f"{name_or_path} is no directory here, and models are not downloaded by name: "
            f"run `hf download {name_or_path} --local-dir DIR`, then give DIR"
        )
    raise CheckpointError(f"{path} does not exist: give a model directory, or 'demo'")


def _only_gguf(directory: Path) -> Path:
    """The one GGUF model in `directory`; `directory` itself when it has none."""
    files = sorted(directory.glob(f"*{SUFFIX}"))
    models = {next(split_files(file)) for file in files}
    if len(models) > 1:
        names = ", ".join(file.name for file in sorted(models)[:4])
        raise CheckpointError(f"{directory} holds several models: give one of the files, for example {names}")
    return models.pop() if models else directory
