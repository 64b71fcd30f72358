"""Values of `--out` and its like: checked before what they are to hold is measured, which takes minutes."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryFile

import typer

from tandem.errors import ConfigError


def output_file(parameter: typer.CallbackParam, path: Path | None) -> Path | None:
    """A Typer callback. Raises ConfigError where no such file can be made."""
    if path is not None and path.is_dir():
        raise ConfigError(f"{_flag(parameter)} {path} is a folder: give a file")
    return output_place(parameter, path)


def output_place(parameter: typer.CallbackParam, path: Path | None) -> Path | None:
    """The same, where a folder will do, too. A device or a pipe is taken as it is."""
    if path is None or (path.exists() and not path.is_dir() and not path.is_file()):
        return path
    folder = path if path.is_dir() else next(each for each in path.absolute().parents if each.exists())
    try:
        with TemporaryFile(dir=folder):
            return path
    except OSError as error:
        reason = error.strerror if folder.is_dir() else f"{folder} is no folder"
        raise ConfigError(f"{_flag(parameter)} {path} cannot be written: {reason}") from error


def _flag(parameter: typer.CallbackParam) -> str:
    return max(parameter.opts, key=len)
