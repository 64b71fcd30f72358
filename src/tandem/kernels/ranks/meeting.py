"""`Meeting`: a few bytes from every rank to all others, by files of a private folder. For starts only."""

from __future__ import annotations

import os
import time
from pathlib import Path

from tandem.errors import RankLost

POLL_SECONDS = 0.001
JOIN_SECONDS = 600.0  # ranks load at different speeds; the supervisor sees one that ends at once


class Meeting:
    """Rank `rank` of `ranks`. All ranks call `share` with the same names in the same order."""

    def __init__(self, rank: int, ranks: int, file: str, seconds: float = JOIN_SECONDS) -> None:
        """file: its beginning, the same on all ranks, in a folder that nobody else writes to and that is new."""
        self.rank, self.ranks, self.file, self._seconds = rank, ranks, file, seconds

    def share(self, name: str, content: bytes, seconds: float | None = None) -> list[bytes]:
        """Every rank's content, in their order. seconds: to wait for them; None: the usual. Raises RankLost."""
        own = self._path(name, self.rank)
        partial = own.with_name(own.name + ".partial")
        partial.write_bytes(content)
        os.replace(partial, own)
        ends = time.monotonic() + (self._seconds if seconds is None else seconds)
        return [self._content(name, rank, ends) for rank in range(self.ranks)]

    def agree(self, name: str, works: bool) -> bool:
        """Whether it does on every rank."""
        return all(each == b"1" for each in self.share(name, b"1" if works else b"0"))

    def _content(self, name: str, rank: int, ends: float) -> bytes:
        path = self._path(name, rank)
        while not path.exists():
            if time.monotonic() > ends:
                raise RankLost(f"rank {rank} did not say {name!r} in time")
            time.sleep(POLL_SECONDS)
        return path.read_bytes()

    def _path(self, name: str, rank: int) -> Path:
        return Path(f"{self.file}.{name}.{rank}")
