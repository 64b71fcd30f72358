"""Small files: `read_text` reads what lies beside a model's weights; `write_whole` writes all or nothing; `lfs_pointer`
knows those that stand for large ones."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

from tandem.errors import CheckpointError

CONFIG_BYTES = 16 << 20  # config.json and its like have thousands
INDEX_BYTES = 64 << 20  # a name for each weight: the largest have twenty
TEMPLATE_BYTES = 4 << 20
_LFS = b"version https://git-lfs."


def read_text(path: Path, most_bytes: int = CONFIG_BYTES) -> str:
    """A pipe or a device would keep the reader waiting, or never end; a large file would fill the memory.

    Raises CheckpointError for these, for what is not UTF-8, and for what the system does not let us read;
    FileNotFoundError.
    """
    try:
        content = _read_regular(path, most_bytes + 1)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise unreadable(path, error) from error
    if len(content) > most_bytes:
        raise CheckpointError(f"{path} has more than {most_bytes >> 20} MiB; fetch the model again")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is not UTF-8: {error}") from error


def _read_regular(path: Path, most_bytes: int) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise CheckpointError(
                f"{path} is no file but a pipe, a device or a folder; fetch the model again"
            )
        return file.read(most_bytes)


def unreadable(path: Path, error: OSError) -> CheckpointError:
    """The error for a file or folder that the system does not let us read, with its remedy."""
    if not isinstance(error, PermissionError):
        return CheckpointError(f"{path} cannot be read: {error.strerror or error}")
    named = Path(os.fsdecode(error.filename)) if error.filename is not None else path
    return CheckpointError(
        f"{named} cannot be read: user {os.geteuid()} has no permission. Let others read it (chmod -R a+rX "
        f"{named if os.path.isdir(named) else named.parent}), or start Tandem as the user who owns it"
    )


def lfs_pointer(path: Path) -> CheckpointError | None:
    """CheckpointError with the remedy for a git-lfs pointer, which `git clone` leaves where git-lfs is missing. None:
    it is none."""
    if not path.is_file() or not os.access(path, os.R_OK):  # a pipe would keep the reader waiting
        return None
    with path.open("rb") as file:
        if file.read(len(_LFS)) != _LFS:
            return None
    return CheckpointError(
        f"{path} is a pointer of git-lfs, not the file: run `git lfs install && git lfs pull` in {path.parent}, "
        "or fetch the model with kt model pull"
    )


def write_whole(path: Path, data: bytes) -> None:
    """A small file, all of it or nothing."""
    unfinished = path.with_name(f".{path.name}.part")
    with unfinished.open("wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(unfinished, path)
    sync_directory(path.parent)


def write_output(path: Path, data: bytes) -> None:
    """A file that a user named, and its folder: all of it or nothing. A link is followed. A device, a pipe, and what
    this process prints to get the bytes as they come: another file in that place would lose what is printed later."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and (not path.is_file() or _is_printed_to(path)):
        with path.open("ab") as stream:
            stream.write(data)
    else:
        write_whole(path.resolve(), data)


def _is_printed_to(path: Path) -> bool:
    named = path.stat()
    for number in (1, 2):
        with suppress(OSError):  # closed
            if os.path.samestat(os.fstat(number), named):
                return True
    return False


def sync_directory(directory: Path) -> None:
    """Makes renames last: they live in the directory, not in the file."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
