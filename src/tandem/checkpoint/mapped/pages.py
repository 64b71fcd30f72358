"""Mapped file pages: asked for before they are needed, let go of when they have been read.

Mapping reads nothing; the first touch of a page waits for the disk. So while one layer is packed, the kernel is asked
to read the next. Pages that were read count as this process's memory (RSS, as file pages) until they are forgotten;
the kernel's page cache may keep them.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

_PAGE = mmap.PAGESIZE
_libc = ctypes.CDLL(None, use_errno=True)  # its calls do not hold the interpreter's lock, mmap.madvise does
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


Pages = tuple[int, int]
"""Addresses [begin, end) of mapped memory. Tuples: there may be a hundred thousand."""


def joined(ranges: Iterable[Pages]) -> list[Pages]:
    """The same bytes in as few ranges as possible; gaps below a page are filled."""
    merged: list[Pages] = []
    first, last = 0, -_PAGE - 1
    for begin, end in sorted(ranges):
        if begin >= last + _PAGE:  # a whole page in between may be another's memory, which would become zeros
            merged.append((first, last))
            first = begin
        last = max(last, end)
    merged.append((first, last))
    return merged[1:]


class Paging:
    """Talks to the kernel on a thread of its own: asking for gigabytes takes as long as the disk's queue is full.
    Ranges are looked at there, too: a generator is run on that thread, beside the packing.

    What it asks for are wishes: refused, pages are read when they are touched and stay until they are unmapped.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "tandem-paging")

    def read_ahead(self, ranges: Iterable[Pages], owner: object) -> None:
        """`owner` keeps the memory mapped until the kernel has been told."""
        self._thread.submit(_advise, ranges, mmap.MADV_WILLNEED, owner)

    def forget(self, ranges: Iterable[Pages], owner: object) -> None:
        """Only for file mappings that nobody wrote to: reading a forgotten page maps it again."""
        self._thread.submit(_advise, ranges, mmap.MADV_DONTNEED, owner)

    def wait(self) -> None:
        """Until everything asked for so far has been said to the kernel."""
        self._thread.submit(lambda: None).result()


def _advise(ranges: Iterable[Pages], advice: int, _owner: object) -> None:
    for first, end in joined(ranges):
        begin = first // _PAGE * _PAGE
        _libc.madvise(begin, end - begin, advice)
