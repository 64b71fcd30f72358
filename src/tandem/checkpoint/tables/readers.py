"""How rows of tables are read: out of memory, out of files through the page cache, or past it."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from tandem.checkpoint.tables.stored_rows import StoredRows
from tandem.errors import CheckpointError

T = TypeVar("T")

BLOCK = 4096  # bytes: reads past the page cache begin and end at multiples of it
THREADS = 16  # that wait for a disk at a time
PART_BYTES = 8 << 20  # of a table that is read into memory, at a time
ROWS_AT_ONCE = 4096  # that are read past the page cache: their blocks take 32 MB
CACHED_ONLY = getattr(os, "RWF_NOWAIT", 0)
_UNSUPPORTED = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)


def ignored(_: int) -> None:
    """Drops progress that nobody looks at."""


class RowReader(Protocol):
    """Bytes of a table's rows by their numbers."""

    def read_into(self, numbers: Tensor, rows: Tensor) -> None:
        """int64 [n] → uint8 [n, row bytes], contiguous. Raises CheckpointError naming the file where a row cannot be
        read."""
        ...


class Files:
    """The files of a table, open, and where each row is in them."""

    def __init__(self, stored: StoredRows, flags: int = 0) -> None:
        self.stored, self.paths = stored, list(dict.fromkeys(piece.path for piece in stored.pieces))
        self.open = [_opened(path, flags) for path in self.paths]
        ends = list(accumulate(piece.rows for piece in stored.pieces))
        self._ends = torch.tensor(ends)
        firsts = zip(stored.pieces, [0, *ends], strict=False)
        self._begins = torch.tensor([piece.begin - first * stored.row_bytes for piece, first in firsts])
        self._file = torch.tensor([self.paths.index(piece.path) for piece in stored.pieces])

    def __del__(self) -> None:
        for file in getattr(self, "open", ()):
            os.close(file)

    def places(self, numbers: Tensor) -> list[tuple[int, int]]:
        """Each row's file, by its number, and the first byte in it. Raises CheckpointError beyond the last row."""
        if len(numbers) and (int(numbers.min()) < 0 or int(numbers.max()) >= self.stored.rows):
            raise CheckpointError(f"{self.stored.name} has {self.stored.rows} rows, and one beyond them was asked for")
        piece = torch.searchsorted(self._ends, numbers, right=True)
        begins = self._begins[piece] + numbers * self.stored.row_bytes
        return list(zip(self._file[piece].tolist(), begins.tolist(), strict=True))

    def failed(self, file: int, error: OSError | None) -> CheckpointError:
        """error: what the system said; None: the file ends before the row."""
        why = "it was cut short" if error is None else f"{error.strerror}"
        return CheckpointError(f"{self.paths[file]}: rows of {self.stored.name} cannot be read: {why}")


def _opened(path: Path, flags: int) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be opened: {error.strerror}") from error


class RowsInMemory:
    """A table that was read once."""

    def __init__(self, stored: StoredRows, progress: Callable[[int], None]) -> None:
        """progress: is told of bytes that were read."""
        self._rows = _huge(stored.nbytes).view(stored.rows, stored.row_bytes)
        files, whole, first = Files(stored), _bytes_of(self._rows), 0
        parts = list[tuple[int, int, int, int]]()
        for piece in stored.pieces:
            nbytes, file = piece.rows * stored.row_bytes, files.paths.index(piece.path)
            for offset in range(0, nbytes, PART_BYTES):
                parts.append((file, piece.begin + offset, first + offset, min(PART_BYTES, nbytes - offset)))
            first += nbytes
        with ThreadPoolExecutor(THREADS, "tandem-tables") as threads:
            for nbytes in threads.map(lambda part: _read_part(files, whole, *part), parts):
                progress(nbytes)

    def read_into(self, numbers: Tensor, rows: Tensor) -> None:
        torch.index_select(self._rows, 0, numbers, out=rows)


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


class RowRead(NamedTuple):
    """A row's bytes, and where they go."""

    file: int
    begin: int
    to: memoryview


class RowsInPageCache:
    """A table that stays in its files. What the page cache has is copied at once; what it lacks is read by several
    threads, row by row: a row's neighbours are nobody's."""

    def __init__(self, stored: StoredRows) -> None:
        self._files, self._row = Files(stored), stored.row_bytes
        self._threads = ThreadPoolExecutor(THREADS, "tandem-tables")
        self._at_once = CACHED_ONLY
        for file in self._files.open:
            with suppress(OSError):
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)

    def read_into(self, numbers: Tensor, rows: Tensor) -> None:
        missing = [row for row in self._requests(numbers, _bytes_of(rows)) if not self._cached(row)]
        _all(self._threads, self._read, missing)

    def _requests(self, numbers: Tensor, whole: memoryview) -> Iterable[RowRead]:
        for i, (file, begin) in enumerate(self._files.places(numbers)):
            yield RowRead(file, begin, whole[i * self._row : (i + 1) * self._row])

    def _cached(self, row: RowRead) -> bool:
        """Whether it was in the page cache, and is copied."""
        if not self._at_once:
            return False
        try:
            return os.preadv(self._files.open[row.file], [row.to], row.begin, self._at_once) == self._row
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno in _UNSUPPORTED:
                self._at_once = 0
            return False

    def _read(self, row: RowRead) -> None:
        try:
            count = os.preadv(self._files.open[row.file], [row.to], row.begin)
        except OSError as error:
            raise self._files.failed(row.file, error) from error
        if count < self._row:
            raise self._files.failed(row.file, None)


class RowsOnDisk:
    """A table that stays on its disk, and takes no page cache: blocks of 4 KiB are read past it, by several threads."""

    def __init__(self, stored: StoredRows) -> None:
        self._row, self._threads = stored.row_bytes, ThreadPoolExecutor(THREADS, "tandem-tables")
        self._each = (self._row + 2 * BLOCK - 2) // BLOCK * BLOCK  # a row may lie across a border
        try:
            self._files = Files(stored, os.O_DIRECT)
        except CheckpointError as error:
            why = "reads past the page cache may not be possible there: take --tables map"
            raise CheckpointError(f"{error}; {why}") from error

    def read_into(self, numbers: Tensor, rows: Tensor) -> None:
        for first in range(0, len(numbers), ROWS_AT_ONCE):
            part = slice(first, first + ROWS_AT_ONCE)
            self._read_all(numbers[part], _bytes_of(rows[part]))

    def _read_all(self, numbers: Tensor, to: memoryview) -> None:
        blocks = memoryview(mmap.mmap(-1, len(numbers) * self._each))  # begins at a page's border
        reads = [
            (*place, to[i * self._row : (i + 1) * self._row], blocks[i * self._each : (i + 1) * self._each])
            for i, place in enumerate(self._files.places(numbers))
        ]
        _all(self._threads, lambda row: self._read(*row), reads)

    def _read(self, file: int, begin: int, to: memoryview, blocks: memoryview) -> None:
        first = begin // BLOCK * BLOCK
        last = begin - first + self._row
        try:
            count = os.preadv(self._files.open[file], [blocks[: -(-last // BLOCK) * BLOCK]], first)
        except OSError as error:
            raise self._files.failed(file, error) from error
        if count < last:
            raise self._files.failed(file, None)
        to[:] = blocks[begin - first : last]


class TableRows:
    """Rows of a table by their numbers: int64 [n] → [n, width]."""

    def __init__(self, stored: StoredRows, reader: RowReader) -> None:
        """Raises CheckpointError where a row cannot be read, later."""
        self.row_bytes, self.anywhere, self.decode = stored.row_bytes, stored.anywhere, stored.decode
        self.read_into = reader.read_into

    def __call__(self, numbers: Tensor) -> Tensor:
        rows = torch.empty((len(numbers), self.row_bytes), dtype=torch.uint8)
        self.read_into(numbers, rows)
        return self.decode(rows)


def lookup_of(stored: StoredRows, where: str, progress: Callable[[int], None]) -> TableRows:
    """Rows of a table. where: as `--tables`. progress: is told of bytes that were read into memory."""
    reader: RowReader
    if where == "ram":
        reader = RowsInMemory(stored, progress)
    else:
        reader = RowsOnDisk(stored) if where == "disk" else RowsInPageCache(stored)
    return TableRows(stored, reader)


def _all(threads: ThreadPoolExecutor, do: Callable[[T], None], items: list[T]) -> None:
    """`do` for each, on all threads; each gets as many, one after the other."""
    share = max(1, -(-len(items) // THREADS))
    shares = [items[i : i + share] for i in range(0, len(items), share)]

    def do_all(own: list[T]) -> None:
        for item in own:
            do(item)

    for _ in threads.map(do_all, shares):
        pass
