"""Files into the cache: whole or not at all, going on where an interruption left them, and checked by their digest."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import httpx

from tandem.errors import HubError
from tandem.hub.files import RemoteFile
from tandem.hub.remote import Hub, RemoteModel, pauses
from tandem.hub.snapshot import cache_root, repo_dir

WORKERS = 4  # files at a time
PIECE_BYTES = 8 << 20  # that are read at a time for a checksum
SPARE_BYTES = 1 << 30  # of the disk that stay free
Report = Callable[[int], None]  # so many more bytes are here; fewer, where some were wrong
Say = Callable[[str], None]


class DownloadStopped(Exception):
    """Another file failed, or the user stopped; what is here stays."""


class Download:
    """Download of some files of one model."""

    def __init__(self, hub: Hub, model: RemoteModel, report: Report, say: Say) -> None:
        self._hub, self._model, self._report, self._say = hub, model, report, say
        self._repo = repo_dir(model.name.repo)
        self._blobs, self.directory = self._repo / "blobs", self._repo / "snapshots" / model.commit
        self._stop = threading.Event()

    def missing(self, files: Sequence[RemoteFile]) -> list[RemoteFile]:
        return [file for file in files if not (self._blobs / file.digest).exists()]

    def missing_bytes(self, files: Sequence[RemoteFile]) -> int:
        """That are still to come."""
        return sum(file.nbytes - min(file.nbytes, self._partial_bytes(file)) for file in self.missing(files))

    def check_disk(self, files: Sequence[RemoteFile]) -> None:
        """Raises HubError with the numbers where the cache's disk is too small."""
        needed, root = self.missing_bytes(files), cache_root()
        place = next(path for path in (root, *root.parents) if path.is_dir())
        free = shutil.disk_usage(place).free
        if needed + SPARE_BYTES > free:
            short = needed + SPARE_BYTES - free
            raise HubError(
                f"{self._model.name} needs {needed / 1e9:.1f} GB more in {root}, where {free / 1e9:.1f} GB are free: "
                f"free {short / 1e9:.1f} GB, or set HF_HUB_CACHE to a larger disk"
            )

    def fetch(self, files: Sequence[RemoteFile]) -> Path:
        """The snapshot's directory, with all of `files`. Raises HubError; what is here then stays, and the same call
        goes on from there."""
        try:
            self._fetch(files)
        except OSError as error:
            raise HubError(self._unwritten(error)) from error
        return self.directory

    def _fetch(self, files: Sequence[RemoteFile]) -> None:
        self._blobs.mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(WORKERS, "tandem-hub") as pool:
            futures = [pool.submit(self._one, file) for file in files]
            try:
                wait(futures, return_when=FIRST_EXCEPTION)
            finally:
                self._stop.set()
            _raise_first(futures)

    def _unwritten(self, error: OSError) -> str:
        return (
            f"{self._model.name} cannot be written to {self._repo} ({error.strerror or error}): free some space, or "
            "set HF_HUB_CACHE to another disk; what is here stays, and the same command goes on"
        )

    def finish(self) -> None:
        """The revision is the one that was fetched, from now on. Called when all is there."""
        reference = self._repo / "refs" / self._model.name.revision
        reference.parent.mkdir(parents=True, exist_ok=True)
        reference.write_text(self._model.commit)

    def _one(self, file: RemoteFile) -> None:
        if self._stop.is_set():
            raise DownloadStopped
        blob = self._blobs / file.digest
        if not blob.exists():
            with _locked(self._partial(file)) as partial:
                if not blob.exists():  # another process may have been faster
                    self._whole(file, partial)
                    os.fsync(partial.fileno())
                    os.replace(self._partial(file), blob)
        _link(self.directory / file.name, blob)

    def _whole(self, file: RemoteFile, partial: BinaryIO) -> None:
        """A file whose bytes are wrong is fetched once more."""
        for last in (False, True):
            digest = self._stream(file, partial)
            if digest == file.digest:
                return
            self._report(-file.nbytes)
            partial.truncate(0)
            if not last:
                self._say(f"{file.name} came with wrong bytes (its checksum differs); fetching it again")
        raise HubError(
            f"{file.name} of {self._model.name} came with wrong bytes twice: its checksum is {digest}, not "
            f"{file.digest}; try again, or another hub with HF_ENDPOINT"
        )

    def _stream(self, file: RemoteFile, partial: BinaryIO) -> str:
        """The digest of all bytes, once as many are there as there should be."""
        patience = pauses()
        while (here := partial.seek(0, os.SEEK_END)) < file.nbytes:
            try:
                self._append(file, partial, here)
            except httpx.TransportError as error:
                if partial.tell() > here:
                    patience.reset()
                if not patience.wait():
                    raise HubError(self._interrupted(file, partial.tell(), error)) from error
        return _digest(partial, file)

    def _append(self, file: RemoteFile, partial: BinaryIO, here: int) -> None:
        with self._hub.stream(self._model, file, here) as response:
            if here and response.status_code != 206:
                self._report(-here)
                partial.truncate(0)
            partial.seek(0, os.SEEK_END)
            for piece in response.iter_bytes():
                if self._stop.is_set():
                    raise DownloadStopped
                partial.write(piece)
                self._report(len(piece))
            partial.flush()
        if partial.tell() > file.nbytes:
            self._report(-(partial.tell() - file.nbytes))
            partial.truncate(file.nbytes)
        if partial.tell() == here:
            raise httpx.ReadError("the file ends early")

    def _interrupted(self, file: RemoteFile, here: int, error: Exception) -> str:
        return (
            f"{self._model.name}: {file.name} cannot be fetched ({error or type(error).__name__}); "
            f"{here / 1e6:.0f} of {file.nbytes / 1e6:.0f} MB are here, and the same command goes on"
        )

    def _partial(self, file: RemoteFile) -> Path:
        return self._blobs / f"{file.digest}.incomplete"

    def _partial_bytes(self, file: RemoteFile) -> int:
        partial = self._partial(file)
        return partial.stat().st_size if partial.exists() else 0


def _raise_first(futures: Sequence[Future[None]]) -> None:
    errors = [error for future in futures if (error := future.exception()) is not None]
    for error in sorted(errors, key=lambda error: isinstance(error, DownloadStopped)):
        raise error


@contextmanager
def _locked(path: Path) -> Iterator[BinaryIO]:
    """Open for reading and appending; one process at a time."""
    with path.open("a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file


def _digest(file: BinaryIO, expected: RemoteFile) -> str:
    """SHA-256 of a large file's bytes; git's id of a small one's."""
    digest = hashlib.sha256() if expected.is_sha256 else hashlib.sha1(f"blob {expected.nbytes}\0".encode())
    file.flush()
    file.seek(0)
    while piece := file.read(PIECE_BYTES):
        digest.update(piece)
    return digest.hexdigest()


def _link(link: Path, blob: Path) -> None:
    """As huggingface_hub does it; a copy where the file system has no links."""
    if link.exists():
        return
    link.parent.mkdir(parents=True, exist_ok=True)
    link.unlink(missing_ok=True)
    try:
        link.symlink_to(os.path.relpath(blob, link.parent))
    except OSError:
        copy = link.with_name(f".{link.name}.part")
        shutil.copyfile(blob, copy)
        os.replace(copy, link)
