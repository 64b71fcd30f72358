"""`conversion.json` in the output directory: what is being converted, and how. A conversion resumes only as itself."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tandem.errors import CheckpointError, ConfigError
from tandem.spec.json_keys import read_json
from tandem.spec.small_files import write_whole

RECORD = "conversion.json"


@contextmanager
def only_one(out: Path) -> Iterator[None]:
    """Holds the directory `out` for this process; ConfigError when another conversion is writing there, or it cannot be
    made. The lock dies with its process."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = "it is no folder" if out.exists() else error.strerror
        raise ConfigError(f"{out} cannot be made ({reason}): give another directory") from error
    directory = os.open(out, os.O_RDONLY)
    try:
        fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise ConfigError(
            f"another conversion is writing to {out}: wait for it, or give another directory"
        ) from None
    finally:
        os.close(directory)


def begin_or_resume(out: Path, settings: Mapping[str, Any]) -> None:
    """Notes `settings` before anything is written. ConfigError when `out` holds another conversion or other files."""
    file = out / RECORD
    if not file.exists():
        _refuse_other_files(out)
        write_whole(file, (json.dumps(settings, indent=2) + "\n").encode())
        return
    before = read_json(file)
    changed = [key for key in sorted({*before, *settings}) if before.get(key) != settings.get(key)]
    if changed:
        differ = ", ".join(f"{key} {before.get(key)!r} became {settings.get(key)!r}" for key in changed)
        raise ConfigError(f"{out} holds a conversion with other settings ({differ}): give another directory")


def remove_unfinished(out: Path) -> None:
    """Removes what a killed conversion was writing. Only called while `out` is held."""
    for file in out.glob(".*.part"):
        file.unlink()


def _refuse_other_files(out: Path) -> None:
    names = sorted(file.name for file in out.iterdir() if not file.name.endswith(".part"))
    if names:
        raise ConfigError(f"{out} is not empty (it holds {names[0]}): give a new directory")


def need_free_bytes(out: Path, needed: int) -> None:
    """CheckpointError when the disk of `out` cannot take `needed` more bytes."""
    stat = os.statvfs(out)
    free = stat.f_bavail * stat.f_frsize
    if needed > free:
        raise CheckpointError(
            f"{out}: {needed / 1e9:.1f} GB are still to be written and {free / 1e9:.1f} GB are free"
        )
