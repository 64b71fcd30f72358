"""One file of packed weights: what matrices and expert layers hold in memory, byte for byte, to be mapped again.

    0     magic, offset and length of the table, XXH64 of the table; zeros to 4096
    4096  sections: each begins at a multiple of 2 MiB (64 bytes if it is smaller than that)
    …     the table: msgpack of `SectionTable`

A block's checksum is its XXH3, that of one below 241 bytes its XXH64. The head is written last, into a file of another
name that is then renamed: a file of the right name is whole. Every byte of every section is covered by the checksum of
its block, and all are checked before a byte is used.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import msgspec

from tandem import _core
from tandem.errors import CheckpointError

MAGIC = b"TANDEMPK"
HEAD = struct.Struct("<8sQQQ")
HEAD_BYTES = 4096
BLOCK_BYTES = 1 << 20
HUGE_PAGE, LINE = 2 << 20, 64


class FileRange(msgspec.Struct, frozen=True):
    """A range of bytes of the file and the checksum of each BLOCK_BYTES of it."""

    offset: int
    nbytes: int
    checksums: tuple[int, ...]


class Section(msgspec.Struct, frozen=True):
    """One packed object: what it is, and its parts (panels first, then a matrix' bias)."""

    name: str
    formats: tuple[tuple[str, int, str], ...]  # format, group, scale type of each matrix
    shape: tuple[int, ...]
    parts: tuple[FileRange, ...]


class SectionTable(msgspec.Struct, frozen=True):
    """Table of a file: its sections, and what it was made from (`key`, with `about` for people)."""

    key: str
    about: str
    sections: tuple[Section, ...]


class PackedFile:
    """A packed file, mapped. Opening checks head and table; a `Verification` checks everything else.

    Raises CheckpointError naming the file and what is wrong with it, OSError when it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            self.nbytes = os.fstat(file.fileno()).st_size
            self.table = self._read_table(file)
            self.mapped = _core.MappedFile(file.fileno(), self.nbytes)
        self.sections = {section.name: section for section in self.table.sections}

    def _read_table(self, file: BinaryIO) -> SectionTable:
        head = file.read(HEAD.size)
        if len(head) < HEAD.size or not head.startswith(MAGIC):
            raise self._wrong("is no file of packed weights")
        _, offset, length, checksum = HEAD.unpack(head)
        if offset > self.nbytes or length > self.nbytes - offset:
            raise self._wrong(f"has {self.nbytes} bytes, but should have {offset + length}")
        file.seek(offset)
        data = file.read(length)
        if checksum_of(data) != checksum:
            raise self._wrong("has a damaged table")
        try:
            return msgspec.msgpack.decode(data, type=SectionTable)
        except msgspec.MsgspecError as error:
            raise self._wrong(f"has a table of another version ({error})") from error

    def check(self, pool: _core.WorkerPool, parts: list[FileRange], in_place: bool) -> None:
        """Reads these once, on all workers. CheckpointError for the first damage.

        in_place: in the mapping, whose pages are there for use afterwards; else through small buffers, and nothing is
        mapped.
        """
        try:
            sums = checksums_of(pool, *map(self.view, parts), in_place=in_place)
        except CheckpointError as error:
            raise self._wrong("cannot be read, or was cut short meanwhile") from error
        expected = [(sum_, part, i) for part in parts for i, sum_ in enumerate(part.checksums)]
        if len(sums) != len(expected):
            raise self._wrong("has a table that does not fit")
        for sum_, (right, part, index) in zip(sums, expected, strict=True):
            if sum_ != right:
                at = part.offset + index * BLOCK_BYTES
                raise self._wrong(f"is damaged at byte {at} or soon after, in {self._name_at(at)}")

    def _name_at(self, offset: int) -> str:
        """Name of the section that has the byte at `offset`."""
        parts = ((section.name, part) for section in self.table.sections for part in section.parts)
        return next(name for name, part in parts if 0 <= offset - part.offset < part.nbytes)

    def view(self, part: FileRange) -> memoryview:
        if part.offset < 0 or part.nbytes < 0 or part.nbytes > self.nbytes - part.offset:
            raise self._wrong("has a table that points outside of it")
        return self.mapped.view(part.offset, part.nbytes)

    def _wrong(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.path} {what}")


def checksum_of(data: bytes) -> int:
    return _core.xxh64(data)


def checksums_of(pool: _core.WorkerPool, *data: memoryview, in_place: bool = True) -> list[int]:
    """Checksums of every BLOCK_BYTES of each memory, in order."""
    return _core.block_checksums(pool, list(data), BLOCK_BYTES, in_place)


class PackedWriter:
    """Writes a packed file section by section. `path` appears with `finish`. OSErrors are the caller's."""

    def __init__(self, path: Path, pool: _core.WorkerPool) -> None:
        self.path, self.partial = path, path.with_name(path.name + ".partial")
        self._pool = pool
        self._sections: list[Section] = []
        path.parent.mkdir(parents=True, exist_ok=True)
        # Not truncated before it is locked: another process may be writing it.
        self._file = os.fdopen(os.open(self.partial, os.O_RDWR | os.O_CREAT, 0o644), "r+b", buffering=0)
        try:
            self._lock()
        except OSError:
            self._file.close()
            raise
        self._file.truncate(0)
        self._end = HEAD_BYTES

    def _lock(self) -> None:
        """Held until the file is closed. BlockingIOError when another process writes it, or has just renamed it."""
        fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not self.partial.exists() or not os.path.samestat(
            self.partial.stat(), os.fstat(self._file.fileno())
        ):
            raise BlockingIOError(errno.EWOULDBLOCK, "another process has just written it")

    def add(
        self, name: str, formats: tuple[tuple[str, int, str], ...], shape: tuple[int, ...], *data: memoryview
    ) -> None:
        self._sections.append(Section(name, formats, shape, tuple(map(self._write_part, data))))

    def _write_part(self, data: memoryview) -> FileRange:
        boundary = HUGE_PAGE if data.nbytes >= HUGE_PAGE else LINE
        offset = -(-self._end // boundary) * boundary
        self._write(offset, data)
        return FileRange(offset, data.nbytes, tuple(checksums_of(self._pool, data)))

    def _write(self, offset: int, data: memoryview | bytes) -> None:
        self._file.seek(offset)
        rest = memoryview(data)
        while rest.nbytes:
            rest = rest[self._file.write(rest) :]
        self._end = offset + len(data)

    def finish(self, key: str, about: str) -> int:
        """Table, head, rename. Returns the bytes of the file."""
        table = msgspec.msgpack.encode(SectionTable(key, about, tuple(self._sections)))
        offset = self._end
        self._write(offset, table)
        end = self._end
        self._write(0, HEAD.pack(MAGIC, offset, len(table), checksum_of(table)))
        os.fsync(self._file.fileno())
        self.partial.rename(self.path)
        self._file.close()
        return end

    def abandon(self) -> None:
        with suppress(OSError):  # where nothing can be written, nothing can be removed
            self.partial.unlink()
        self._file.close()
