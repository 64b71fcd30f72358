"""`GpuLocks`: GPUs whose memory this process is about to take, so that servers which start at once see it.

A file for each GPU, by its UUID, which is locked meanwhile. The kernel drops a lock with its process.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import re
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tandem.flags.env import lock_dir
from tandem.machine.gpus import GpuHolder

_log = logging.getLogger(__name__)


class GpuLocks:
    """Nothing fails where files cannot be written or locked: then nobody learns of this process."""

    def __init__(self, folder: Path, model: str) -> None:
        """folder: is made when the first GPU is locked. model: whose name others are told."""
        self._folder, self._model = folder, model
        self._files: dict[str, int] = {}  # by UUID

    def take(self, left_bytes: Mapping[str, int]) -> dict[str, GpuHolder]:
        """Locks these GPUs, and no others any longer. left_bytes: of each, by UUID, that will be free later. Returns
        the processes that hold those which cannot be had."""
        self._give_back([uuid for uuid in self._files if uuid not in left_bytes])
        holders = {}
        for uuid in sorted(left_bytes):
            try:
                if holder := self._taken(uuid, left_bytes[uuid]):
                    holders[uuid] = holder
            except OSError as error:
                _log.debug("%s is not locked: %s", uuid, error)
        return holders

    def release(self) -> None:
        """Memory is taken now, which the driver shows."""
        self._give_back([*self._files])

    def _taken(self, uuid: str, left_bytes: int) -> GpuHolder | None:
        """None: the lock is this process's. Raises OSError."""
        if uuid not in self._files:
            file = os.open(self._path(uuid), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                text = os.pread(file, 4096, 0)
                os.close(file)
                if isinstance(error, BlockingIOError):
                    return _holder(text)
                raise
            self._files[uuid] = file
        content = {"pid": os.getpid(), "model": self._model, "left_bytes": left_bytes}
        os.ftruncate(self._files[uuid], 0)
        os.pwrite(self._files[uuid], json.dumps(content).encode(), 0)
        return None

    def _path(self, uuid: str) -> Path:
        """Raises OSError where the folder is another user's: who might have put links there."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = self._folder.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
            raise PermissionError(f"{self._folder} is another user's")
        return self._folder / f"{re.sub(r'[^A-Za-z0-9-]', '_', uuid)}.lock"

    def _give_back(self, uuids: list[str]) -> None:
        for uuid in uuids:
            file = self._files.pop(uuid)
            with contextlib.suppress(OSError):
                os.ftruncate(file, 0)
                fcntl.flock(file, fcntl.LOCK_UN)  # a child process may have the same file open
            os.close(file)


@contextmanager
def gpu_locks(model: str) -> Iterator[GpuLocks]:
    """This user's locks, until the memory is taken, or the start fails."""
    locks = GpuLocks(lock_dir(), model)
    try:
        yield locks
    finally:
        locks.release()


def _holder(text: bytes) -> GpuHolder:
    """As its file says; of one that has not written it yet, or in another way, nothing is known."""
    try:
        content = json.loads(text)
        return GpuHolder(int(content["pid"]), str(content["model"]), int(content["left_bytes"]))
    except (ValueError, KeyError, TypeError):
        return GpuHolder()
