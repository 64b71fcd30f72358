"""`private_endpoint`: where the API process and its engine meet."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import zmq

from tandem.errors import EngineError

_FALLBACKS = ("/tmp", "/dev/shm")  # where the temporary folder cannot be used
_NAME = "engine"
_PREFIX = "tandem-"
_RANDOM_CHARS = 16  # of mkdtemp, and its prefix
_LISTENS_SECONDS = 60.0  # a younger socket may be one that is about to listen


@contextlib.contextmanager
def private_endpoint() -> Iterator[str]:
    """ZeroMQ address of a socket in a new folder of mode 700: nobody else can connect. Raises EngineError."""
    for parent in _parents():
        _remove_left_over(Path(parent))
    folder = _new_folder()
    try:
        yield f"ipc://{folder}/{_NAME}"
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def forget(endpoint: str) -> None:
    """Both have met, and need no name any more: nothing is left over, whatever ends them."""
    shutil.rmtree(Path(endpoint.removeprefix("ipc://")).parent, ignore_errors=True)


def _remove_left_over(parent: Path) -> None:
    """Folders of servers that were killed before they met their engines."""
    for name in parent.glob(f"{_PREFIX}*/{_NAME}"):
        with contextlib.suppress(OSError):
            if name.is_socket() and _is_ours_and_old(name.stat()) and not _answers(name):
                shutil.rmtree(name.parent, ignore_errors=True)


def _is_ours_and_old(found: os.stat_result) -> bool:
    return found.st_uid == os.getuid() and time.time() - found.st_mtime > _LISTENS_SECONDS


def _answers(name: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(name))
        except ConnectionRefusedError:
            return False
        return True


def _new_folder() -> Path:
    """In the first folder whose path leaves room for a socket's name: the system allows 107 characters in all."""
    why: OSError | str = "their names are too long"
    for parent in _parents():
        if len(f"{parent}/{_NAME}") + _RANDOM_CHARS > zmq.IPC_PATH_MAX_LEN:
            continue
        try:
            return Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        except OSError as error:
            why = error
    raise EngineError(
        f"no socket can be made in {', '.join(_parents())} ({why}); set TMPDIR to a folder that can be written"
    )


def _parents() -> list[str]:
    try:
        return [tempfile.gettempdir(), *_FALLBACKS]
    except OSError:  # it tries all that the system knows
        return list(_FALLBACKS)
