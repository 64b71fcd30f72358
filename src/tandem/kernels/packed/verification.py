"""`Verification`: every byte of a packed file against its checksums, on all workers, while its caller goes on."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from threading import Event, Thread

from tandem._core import WorkerPool
from tandem.errors import CheckpointError
from tandem.kernels.packed.file import BLOCK_BYTES, FileRange, PackedFile

VERIFY_BYTES = 1 << 30  # checked between two reports of progress
READ_AHEAD_BYTES = 64 << 20
THREADS = 2  # one compares sums, which is Python's work, while the workers are the other's

Verified = Callable[[int, int], None]  # bytes checked, bytes in all


class Verification:
    """Begins at once, in the order of the file, and takes the workers for about as long as reading the file.

    in_place: as in `PackedFile.check`.
    """

    def __init__(self, file: PackedFile, pool: WorkerPool, in_place: bool = True) -> None:
        self.file, self._pool, self._in_place, self._stopped = file, pool, in_place, Event()
        Thread(target=read_ahead, args=(file.path, self._stopped), daemon=True).start()
        parts = [part for section in file.table.sections for part in section.parts]
        self._total = sum(part.nbytes for part in parts)
        threads = ThreadPoolExecutor(THREADS, "tandem-verification")
        self._checked = [threads.submit(self._check, batch) for batch in _batches(parts)]
        threads.shutdown(wait=False)

    def wait(self, progress: Verified) -> None:
        """Until everything was checked. CheckpointError for the first damage."""
        done = 0
        while self._checked:
            checked = self._checked.pop(0).result()
            if isinstance(checked, str):
                raise CheckpointError(checked)
            done += checked
            # what was done before anybody waited says nothing of speed
            if not self._checked or not self._checked[0].done():
                progress(done, self._total)

    def stop(self) -> None:
        """Nobody wants to know any more: nothing new is begun."""
        self._stopped.set()

    def _check(self, batch: list[FileRange]) -> int | str:
        """Bytes, or what is wrong with them. An error would know the frames of who waits, and with them the model that
        was built. A thread that has no CPU just then would keep both beside the next model."""
        if self._stopped.is_set():
            return f"{self.file.path} was not verified"
        try:
            self.file.check(self._pool, batch, self._in_place)
        except CheckpointError as error:
            self.stop()
            return str(error)
        except BaseException:
            self.stop()
            raise
        return sum(part.nbytes for part in batch)


def _pieces(part: FileRange) -> Iterator[FileRange]:
    """The part in pieces of at most VERIFY_BYTES; an empty part has none."""
    blocks = VERIFY_BYTES // BLOCK_BYTES
    for first in range(0, part.nbytes, VERIFY_BYTES):
        index = first // BLOCK_BYTES
        length = min(VERIFY_BYTES, part.nbytes - first)
        yield FileRange(part.offset + first, length, part.checksums[index : index + blocks])


def _batches(parts: Iterable[FileRange]) -> Iterator[list[FileRange]]:
    """Their pieces, VERIFY_BYTES or more together: workers wait for each other only once in a batch."""
    batch: list[FileRange] = []
    for piece in chain.from_iterable(map(_pieces, parts)):
        batch.append(piece)
        if sum(piece.nbytes for piece in batch) >= VERIFY_BYTES:
            yield batch
            batch = []
    if batch:
        yield batch


def read_ahead(path: Path, stopped: Event) -> None:
    """Asks the kernel for the whole file, in order; returns when the disk's queue has taken all of it, or soon after
    nobody wants it any more."""
    with path.open("rb") as file:
        for offset in range(0, os.fstat(file.fileno()).st_size, READ_AHEAD_BYTES):
            if stopped.is_set():
                return
            os.posix_fadvise(file.fileno(), offset, READ_AHEAD_BYTES, os.POSIX_FADV_WILLNEED)
