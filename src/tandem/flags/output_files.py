"""Values of `--out` and its like: checked before what they are to hold is measured, which takes minutes."""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import TemporaryFile

import typer

from tandem.errors import ConfigError


def output_file(parameter: typer.CallbackParam, path: Path | None) -> Path | None:
    """A Typer callback. Raises ConfigError where no such file can be made."""
    if path is not None and os.path.isdir(path):  # False where it cannot be looked at
        raise ConfigError(f"{_flag(parameter)} {path} is a folder: give a file")
    return output_place(parameter, path)


def output_place(parameter: typer.CallbackParam, path: Path | None) -> Path | None:
    """The same, where a folder will do, too. A device or a pipe is taken as it is. A link is followed: /dev/stdout may
    be one to a file."""
    if path is None:
        return None
    place = folder = path.resolve()
    try:
        if place.exists() and not place.is_dir() and not place.is_file():
            return path
        folder = place if place.is_dir() else next(each for each in place.parents if each.exists())
        with TemporaryFile(dir=folder):
            return path
    except OSError as error:
        reason = f"{folder} is no folder" if os.path.isfile(folder) else error.strerror
        raise ConfigError(f"{_flag(parameter)} {path} cannot be written: {reason}") from error


def _flag(parameter: typer.CallbackParam) -> str:
    return max(parameter.opts, key=len)
