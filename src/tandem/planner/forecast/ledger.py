"""`Ledger`: what a plan takes of a memory, line by line. The sums are those that the plan was made with."""

from __future__ import annotations

from dataclasses import dataclass

RAM, VRAM = "RAM", "VRAM"


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """Bytes of one thing, and what it is."""

    name: str
    nbytes: int
    what: str


@dataclass(frozen=True, slots=True)
class Ledger:
    """place: RAM or VRAM. budget_bytes: what may be used of the free_bytes. What is left stays free."""

    place: str
    entries: tuple[LedgerEntry, ...]
    budget_bytes: int
    free_bytes: int

    @property
    def total_bytes(self) -> int:
        return sum(entry.nbytes for entry in self.entries)

    @property
    def left_bytes(self) -> int:
        return self.budget_bytes - self.total_bytes


def ledger(place: str, entries: list[LedgerEntry], budget_bytes: int, free_bytes: int) -> Ledger:
    """Without the things that take nothing."""
    return Ledger(place, tuple(entry for entry in entries if entry.nbytes), budget_bytes, free_bytes)
