"""How rows of tables are read: out of memory, out of files through the page cache, or past it."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from tandem import _core
from tandem.checkpoint.tables.stored_rows import StoredRows
from tandem.errors import CheckpointError

THREADS = 16  # that wait for a disk at a time
PART_BYTES = 8 << 20  # of a table that is read into memory, at a time


def ignored(_: int) -> None:
    """Drops progress that nobody looks at."""


class RowReader(Protocol):
    """Bytes of a table's rows by their numbers."""

    def read(self, numbers: Tensor, rows: Tensor) -> None:
        """int64 [n] → uint8 [n * row bytes]. Raises CheckpointError naming the file where a row cannot be read."""
        ...

    def read_step(
        self, numbers: _core.RowNumbers, ids: Tensor, positions: Tensor, slots: Tensor, starts: Tensor, out: Tensor
    ) -> int:
        """Rows that a step's tokens name, one token's behind the other's, to the first bytes of `out`; of how many
        tokens."""
        ...

    def read_ahead(self, numbers: Tensor) -> None:
        """These rows, int64 [n], will be read soon: threads begin with what is not in memory."""
        ...


class Files:
    """The files of a table, open."""

    def __init__(self, stored: StoredRows, flags: int = 0) -> None:
        self.stored, self.paths = stored, list(dict.fromkeys(piece.path for piece in stored.pieces))
        self.open = [_opened(path, flags) for path in self.paths]

    def __del__(self) -> None:
        for file in getattr(self, "open", ()):
            os.close(file)

    def ranges(self) -> list[tuple[int, int, int]]:
        """Pieces of the table: of each its file, by its number, the first byte in it, and its rows."""
        return [(self.paths.index(piece.path), piece.begin, piece.rows) for piece in self.stored.pieces]

    def failed(self, file: int, error: OSError | None) -> CheckpointError:
        """error: what the system said; None: the file ends before the row."""
        why = "it was cut short" if error is None else f"{error.strerror}"
        return CheckpointError(f"{self.paths[file]}: rows of {self.stored.name} cannot be read: {why}")


def _opened(path: Path, flags: int) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be opened: {error.strerror}") from error


def rows_in_memory(stored: StoredRows, progress: Callable[[int], None]) -> RowReader:
    """Reads a table once. progress: is told of bytes that were read."""
    rows = _huge(stored.nbytes).view(stored.rows, stored.row_bytes)
    files, whole, first = Files(stored), _bytes_of(rows), 0
    parts = list[tuple[int, int, int, int]]()
    for file, begin, count in files.ranges():
        nbytes = count * stored.row_bytes
        for offset in range(0, nbytes, PART_BYTES):
            parts.append((file, begin + offset, first + offset, min(PART_BYTES, nbytes - offset)))
        first += nbytes
    with ThreadPoolExecutor(THREADS, "tandem-tables") as threads:
        for nbytes in threads.map(lambda part: _read_part(files, whole, *part), parts):
            progress(nbytes)
    return _core.RowReader(stored.name, rows, THREADS)


def _huge(nbytes: int) -> Tensor:
    """uint8 [nbytes], in large pages where there are some."""
    memory = mmap.mmap(-1, max(1, nbytes))
    with suppress(OSError, AttributeError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8, count=nbytes)


def _read_part(files: Files, whole: memoryview, file: int, begin: int, to: int, nbytes: int) -> int:
    position = 0
    while position < nbytes:
        try:
            count = os.preadv(files.open[file], [whole[to + position : to + nbytes]], begin + position)
        except OSError as error:
            raise files.failed(file, error) from error
        if not count:
            raise files.failed(file, None)
        position += count
    with suppress(OSError):
        os.posix_fadvise(files.open[file], begin, nbytes, os.POSIX_FADV_DONTNEED)
    return nbytes


def _bytes_of(rows: Tensor) -> memoryview:
    """To be written to."""
    return memoryview(rows.numpy().data).cast("B") if rows.numel() else memoryview(b"")


class RowsInFiles:
    """A table that stays in its files. What the page cache has is copied at once; what it lacks is read by several
    threads, row by row: a row's neighbours are nobody's. direct: blocks of 4 KiB are read past the page cache."""

    def __init__(self, stored: StoredRows, direct: bool) -> None:
        try:
            self._files = Files(stored, os.O_DIRECT if direct else 0)
        except CheckpointError as error:
            if not direct:
                raise
            why = "reads past the page cache may not be possible there: take --tables map"
            raise CheckpointError(f"{error}; {why}") from error
        for file in self._files.open:
            with suppress(OSError):
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)
        opened = [(str(path), file) for path, file in zip(self._files.paths, self._files.open, strict=True)]
        core = _core.RowReader(stored.name, opened, self._files.ranges(), stored.row_bytes, direct, THREADS)
        self.read, self.read_step, self.read_ahead, self._core = core.read, core.read_step, core.read_ahead, core

    @property
    def waited(self) -> int:
        """Rows that a read had to wait for, since the start."""
        return self._core.waited

    @property
    def ahead(self) -> int:
        """Rows that were read before anybody needed them, since the start."""
        return self._core.ahead


class TableRows:
    """Rows of a table by their numbers: int64 [n] → [n, width]."""

    def __init__(self, stored: StoredRows, reader: RowReader) -> None:
        """Raises CheckpointError where a row cannot be read, later."""
        self.row_bytes, self.anywhere, self.decode = stored.row_bytes, stored.anywhere, stored.decode
        self.reader, self.read, self.read_ahead = reader, reader.read, reader.read_ahead
        self.read_step = reader.read_step

    def __call__(self, numbers: Tensor) -> Tensor:
        rows = torch.empty((len(numbers), self.row_bytes), dtype=torch.uint8)
        self.read(numbers.contiguous(), rows.view(-1))
        return self.decode(rows)


def lookup_of(stored: StoredRows, where: str, progress: Callable[[int], None]) -> TableRows:
    """Rows of a table. where: as `--tables`. progress: is told of bytes that were read into memory."""
    if where == "ram":
        return TableRows(stored, rows_in_memory(stored, progress))
    return TableRows(stored, RowsInFiles(stored, where == "disk"))
