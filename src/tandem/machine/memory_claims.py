"""`MemoryClaims`: memory that this process is about to take, so that servers which start at once see it.

Servers plan in turn. A file for each start says what it leaves, and is locked until that is taken. The kernel drops a
lock with its process.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import msgspec

from tandem.flags.env import lock_dir

TURN_SECONDS = 30.0  # the longest wait for another server's plan, which may stand still
_LOOK_SECONDS = 0.02
_log = logging.getLogger(__name__)


class Claim(msgspec.Struct, frozen=True):
    """Memory that a start will leave, after those that it saw: bytes of each of its GPUs, by UUID, and of CPU memory
    (None: its own control group limits that)."""

    pid: int
    model: str
    gpu_left_bytes: dict[str, int]
    ram_left_bytes: int | None

    @property
    def whose(self) -> str:
        return f"process {self.pid}, which loads {self.model}"


class MemoryClaims:
    """Nothing fails where files cannot be written or locked: then nobody learns of this process."""

    def __init__(self, folder: Path, model: str) -> None:
        """folder: is made when the first memory is claimed. model: whose name others are told."""
        self._folder, self._model = folder, model.encode(errors="backslashreplace").decode()
        self._file: tuple[Path, int] | None = None
        self._changed_at = self._last_change()

    @property
    def changed(self) -> bool:
        """True if a server has claimed memory, or was done, since this was made: other memory is free now."""
        return self._last_change() != self._changed_at

    @contextmanager
    def turn(self) -> Iterator[None]:
        """No other server plans meanwhile, unless one takes more than TURN_SECONDS."""
        with contextlib.ExitStack() as stack:
            try:
                file = os.open(self._own_folder() / "turn", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
                stack.callback(_close, file)
                _wait_for(file)
            except OSError as error:
                _log.debug("servers do not plan in turn: %s", error)
            yield

    def others(self) -> list[Claim]:
        """Claims of other processes that still start."""
        try:
            paths = sorted(self._own_folder().glob("*.claim"))
        except OSError:
            return []
        own = self._file and self._file[0]
        return [claim for path in paths if path != own and (claim := _claim_at(path)) is not None]

    def take(self, gpu_left_bytes: Mapping[str, int], ram_left_bytes: int | None) -> None:
        """Tells those that plan later, instead of what was told before."""
        self.release()
        claim = Claim(os.getpid(), self._model, dict(gpu_left_bytes), ram_left_bytes)
        try:
            self._file = _written(self._own_folder(), claim)
        except OSError as error:
            _log.debug("no memory is claimed: %s", error)

    def release(self) -> None:
        """Memory is taken now, which the driver and the system show."""
        if self._file is not None:
            path, file = self._file
            self._file = None
            with contextlib.suppress(OSError):
                path.unlink()
            _close(file)

    def _own_folder(self) -> Path:
        """Raises OSError where it is another user's: who might have put links there."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = self._folder.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
            raise PermissionError(f"{self._folder} is another user's")
        return self._folder

    def _last_change(self) -> int | None:
        try:
            return self._folder.stat().st_mtime_ns
        except OSError:
            return None


@contextmanager
def memory_claims(model: str) -> Iterator[MemoryClaims]:
    """This user's, until the memory is taken, or the start fails."""
    claims = MemoryClaims(lock_dir(), model)
    try:
        yield claims
    finally:
        claims.release()


def _wait_for(file: int) -> None:
    """Locks it, unless that takes too long. Raises OSError."""
    for _ in range(round(TURN_SECONDS / _LOOK_SECONDS) + 1):
        with contextlib.suppress(BlockingIOError):
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        time.sleep(_LOOK_SECONDS)
    _log.warning("another server plans for %.0f s already: this one does not wait for it", TURN_SECONDS)


def _written(folder: Path, claim: Claim) -> tuple[Path, int]:
    """The file, which others see once it is locked and complete. Raises OSError."""
    file, name = tempfile.mkstemp(prefix=f"{claim.pid}-", dir=folder)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(file, msgspec.json.encode(claim))
        os.rename(name, path := Path(f"{name}.claim"))
    except OSError:
        os.close(file)
        os.unlink(name)
        raise
    return path, file


def _claim_at(path: Path) -> Claim | None:
    """None, and no file any longer, where its process has ended; None, too, of a file that cannot be read."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        path.unlink()
    except BlockingIOError:
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            return msgspec.json.decode(os.read(file, 1 << 16), type=Claim)
    except OSError as error:
        _log.debug("%s is not looked at: %s", path, error)
    finally:
        os.close(file)
    return None


def _close(file: int) -> None:
    with contextlib.suppress(OSError):
        fcntl.flock(file, fcntl.LOCK_UN)  # a child process may have the same file open
    os.close(file)
