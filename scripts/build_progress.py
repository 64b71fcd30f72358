"""Runs a command that builds the extension, and says how many of its files are compiled: pip says nothing of that.

`build_progress.py FOLDER COMMAND …`: CMake builds in FOLDER/*. Ends with the command's own status.
"""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

LOOK_SECONDS = 1.0


def compiled(folder: Path, since: float) -> tuple[int, int]:
    """Files that were compiled since then, and all: of the build that was begun last. (0, 0) where none is known."""
    plans, text = sorted(folder.glob("*/build.ninja"), key=_written), ""
    with suppress(IndexError, OSError):  # none, or one that goes away now: the build itself goes on
        text = plans[-1].read_text(errors="replace")
    objects = [line.split()[1].removesuffix(":") for line in text.splitlines() if line.startswith("build ")]
    objects = [name for name in objects if name.endswith(".o")]
    return sum(_written(plans[-1].parent / name) > since for name in objects), len(objects)


def _written(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except OSError:
        return -1.0


def watch(command: list[str], folder: Path, live: bool) -> int:
    """live: one line that is written over, for terminals. Else a line for every further tenth. Files that an earlier
    build compiled may be taken as they are."""
    others = "" if compiled(folder, -1.0)[0] == 0 else "at most "
    started, told, status = time.time(), 0, None
    child = subprocess.Popen(command)
    while status is None:
        with suppress(subprocess.TimeoutExpired):
            status = child.wait(LOOK_SECONDS)
        done, total = compiled(folder, started)
        if done > told and (live or done - told >= total / 10 or done == total):
            told = done
            begin, end = ("\r" if live else "", "" if live and done < total else "\n")
            print(f"{begin}  compiled {done} of {others}{total} files", end=end, flush=True)
    return status


def main(argv: list[str]) -> int:
    return watch(argv[1:], Path(argv[0]), sys.stdout.isatty())


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:  # the command has had it, too
        sys.exit(130)
