"""Logits on disk: a safetensors file that is written row by row, so that it may be larger than memory.

Tensors: logits float32 [rows, K]; ids int32 [rows, K], absent where all of the vocabulary is kept; log_total float64
[rows], the logsumexp of the whole row; target float32 [rows]. Metadata: what the rows are of.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tandem.errors import CheckpointError, ConfigError
from tandem.quality.measures import KeptRows
from tandem.quality.text import Windows

KIND = "tandem-logits-1"
_TYPES = {"logits": "F32", "ids": "I32", "log_total": "F64", "target": "F32"}
_NUMPY: dict[str, Any] = {"F32": np.float32, "I32": np.int32, "F64": np.float64}


@dataclass(frozen=True, slots=True)
class Origin:
    """Source of a file's rows of logits."""

    label: str
    text_digest: str  # Windows.digest
    rows: int
    vocab: int
    kept: int  # logits per row

    @property
    def complete(self) -> bool:
        """Whether divergences from these rows are exact, not lower bounds."""
        return self.kept == self.vocab

    def check(self, windows: Windows, vocab: int, file: Path) -> None:
        """Raises ConfigError when the file is of another text or vocabulary."""
        if self.vocab != vocab:
            raise ConfigError(f"{file} has logits of {self.vocab} tokens, the model has {vocab}")
        if self.text_digest != windows.digest:
            raise ConfigError(
                f"{file} is of another text, tokenizer, --window or --tokens: give those it was saved with"
            )


class LogitsWriter:
    """Fills a file of the right size from front to back."""

    def __init__(self, file: Path, origin: Origin) -> None:
        self._row = 0
        shapes = {"log_total": [origin.rows], "target": [origin.rows], "logits": [origin.rows, origin.kept]}
        if not origin.complete:
            shapes["ids"] = [origin.rows, origin.kept]
        header, size = _header(origin, shapes)
        with file.open("wb") as stream:
            stream.write(len(header).to_bytes(8, "little") + header)
            stream.flush()
            # Not truncate: a full disk must be an error here, not a SIGBUS at some later row.
            os.posix_fallocate(stream.fileno(), 0, 8 + len(header) + size)
        self._arrays = {
            name: np.memmap(file, _NUMPY[_TYPES[name]], "r+", 8 + len(header) + at, tuple(shape))
            for name, (shape, at) in _layout(shapes).items()
        }

    def append(self, rows: KeptRows) -> None:
        end = self._row + len(rows.target)
        for name, array in self._arrays.items():
            array[self._row : end] = getattr(rows, name).numpy()
        self._row = end

    def close(self) -> None:
        for array in self._arrays.values():
            array.flush()
        self._arrays.clear()


@contextmanager
def writing(file: Path, origin: Origin) -> Iterator[LogitsWriter]:
    """The file appears under its name when all is written, or not at all. Raises ConfigError where it cannot be."""
    if file.exists() and not file.is_file():  # to replace /dev/null would break the machine
        raise ConfigError(f"--save-logits {file} is no file: give one")
    partial = file.with_name(f".{file.name}.partial")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        writer = LogitsWriter(partial, origin)
        try:
            yield writer
        finally:
            writer.close()
        partial.replace(file)
    except OSError as error:
        raise ConfigError(f"--save-logits {file} cannot be written: {error}") from error
    finally:
        with suppress(OSError):
            partial.unlink()


class SavedLogits:
    """Reads what `writing` wrote. Raises CheckpointError for a file that is something else."""

    def __init__(self, file: Path) -> None:
        self.file = file
        try:
            handle: Any = safe_open(str(file), framework="pt")
            self._open, metadata = handle, handle.metadata() or {}
            self.origin = Origin(
                metadata["label"],
                metadata["text_digest"],
                *(int(metadata[k]) for k in ("rows", "vocab", "kept")),
            )
            self._check_tensors(metadata)
        except (SafetensorError, OSError, KeyError, ValueError) as error:
            raise CheckpointError(
                f"{file} is not a file of --save-logits, or is cut off ({error})"
            ) from error

    def rows(self, first: int, end: int) -> KeptRows:
        ids = None if self.origin.complete else self._slice("ids", first, end).long()
        logits, total, target = (self._slice(name, first, end) for name in ("logits", "log_total", "target"))
        return KeptRows(ids, logits, total, target)

    def _slice(self, name: str, first: int, end: int) -> Tensor:
        part: Tensor = self._open.get_slice(name)[first:end]
        return part

    def _check_tensors(self, metadata: dict[str, str]) -> None:
        if metadata.get("kind") != KIND:
            raise ValueError(f"its kind is {metadata.get('kind')!r}")
        wide = [self.origin.rows, self.origin.kept]
        for name in ("logits",) if self.origin.complete else ("logits", "ids"):
            if self._open.get_slice(name).get_shape() != wide:
                raise ValueError(f"{name} is not of shape {wide}")
        for name in ("log_total", "target"):
            if self._open.get_slice(name).get_shape() != wide[:1]:
                raise ValueError(f"{name} is not of shape {wide[:1]}")


def _layout(shapes: dict[str, list[int]]) -> dict[str, tuple[list[int], int]]:
    """Shape and byte offset of each tensor; wide types come first, so all are aligned."""
    laid, offset = {}, 0
    for name, shape in shapes.items():
        laid[name] = (shape, offset)
        offset += int(np.prod(shape)) * np.dtype(_NUMPY[_TYPES[name]]).itemsize
    return laid


def _header(origin: Origin, shapes: dict[str, list[int]]) -> tuple[bytes, int]:
    """The safetensors header, padded to 8 bytes, and the bytes of all tensors."""
    entries: dict[str, Any] = {
        "__metadata__": {
            "kind": KIND, "label": origin.label, "text_digest": origin.text_digest,
            "rows": str(origin.rows), "vocab": str(origin.vocab), "kept": str(origin.kept),
        }
    }  # fmt: skip
    end = 0
    for name, (shape, offset) in _layout(shapes).items():
        end = offset + int(np.prod(shape)) * np.dtype(_NUMPY[_TYPES[name]]).itemsize
        entries[name] = {"dtype": _TYPES[name], "shape": shape, "data_offsets": [offset, end]}
    text = json.dumps(entries).encode()
    return text + b" " * (-len(text) % 8), end
