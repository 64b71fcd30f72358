"""`model_files`: how large the served model is on disk, and in which format, for clients that show it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tandem.errors import HubError
from tandem.hub.files import GGUF, INDEX, gguf_variants, shards
from tandem.planner.plan import Plan


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """format: "gguf", "safetensors", or "" where there are none."""

    nbytes: int = 0
    format: str = ""


def model_files(path: Path) -> ModelFiles:
    """Files of a directory, or of a GGUF model in parts. One that cannot be looked at counts nothing."""
    with contextlib.suppress(OSError, HubError):
        if path.is_dir():
            return ModelFiles(_bytes(path / name for name in _safetensors(path)), "safetensors")
        if path.is_file():
            names = [file.name for file in path.parent.iterdir() if file.name.endswith(GGUF)]
            parts = next((files for files in gguf_variants(names).values() if path.name in files), [path.name])
            return ModelFiles(_bytes(path.parent / name for name in parts), "gguf")
    return ModelFiles()


def weight_format(plan: Plan) -> str:
    """The format of the routed experts, where it is one for all; else ""."""
    return "" if plan.expert_format == "stored" else plan.expert_format


def _safetensors(directory: Path) -> list[str]:
    index = directory / INDEX
    return shards([file.name for file in directory.iterdir()], index.read_bytes() if index.is_file() else None)


def _bytes(files: Iterable[Path]) -> int:
    return sum(file.stat().st_size for file in files)
