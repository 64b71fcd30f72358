"""Decoding with a draft layer and the governor, in made-up time: rows cost what the union of their experts does.

`python tests/support/drafts/governed_grid.py` prints the table of docs/lab/draft-tokens.md.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from types import SimpleNamespace
from typing import NamedTuple

from tandem.engine.sequence import Chunk
from tandem.engine.speculation.draft import LAYER_KINDS, Draft
from tandem.engine.speculation.speculation import Speculation

MOST, EXPERTS, TOP_K = 3, 256, 8
BATCHES, ACCEPTANCES, OVERLAPS = (1, 2, 4, 8), (0.0, 0.3, 0.5, 0.7, 0.9, 1.0), (0.0, 1 / 3, 1.0)
DRIFT, PERIODS = 0.25, (200.0, 3000.0)  # of the machine's speed; in steps of one sequence
SEEDS = (11, 23, 37)


@dataclass(frozen=True)
class Shape:
    """In steps of one row: dense: what does not depend on experts; row: of each more; draw: of a drawing pass; made: of
    each row that is made up for; alone: of a drawing that no recording holds. foretold: drafts need no drawing."""

    dense: float
    row: float
    draw: float = 0.0
    made: float = 0.0
    alone: float = 0.0
    foretold: bool = False
    recorded_rows: int = 8

    def step(self, widths: Rows[int], overlap: float) -> float:
        """Time of a step of sequences with so many draft tokens: each distinct expert is read once."""
        unused = math.prod(1.0 - TOP_K * (1.0 + (1.0 - overlap) * width) / EXPERTS for width in widths)
        rows = len(widths) + sum(widths)
        return self.dense + (1.0 - self.dense) * EXPERTS * (1.0 - unused) / TOP_K + self.row * (rows - 1)


SHAPES = {
    "none": Shape(0.12, 0.02, 0.012, 0.0006, 0.5),
    "all": Shape(0.55, 0.012, 0.055, 0.002, 2.0),
    "foretold": Shape(0.12, 0.02, foretold=True),
}


class Cell(NamedTuple):
    """shape: how many experts are on the GPU, or `foretold`."""

    shape: str
    period: float
    batch: int
    overlap: float
    acceptance: float


class Text(SimpleNamespace):
    __hash__ = object.__hash__
    answer_len, max_len = 1, 1 << 40

    @property
    def total_len(self) -> int:
        return len(self.tokens)


class Foretelling:
    """A `Drafter` whose draft tokens cost nothing."""

    def propose(self, sequence: Text, most: int) -> Draft:
        return Draft((1,) * most, (1,) * most)

    def forget(self, sequence: Text) -> None: ...


class Layer:
    """A `Drafter` and `BatchDrafter`. Token 1 is the one that comes, if a draft token is accepted."""

    def __init__(self, shape: Shape, spend) -> None:
        self._shape, self._spend, self._made, self.unusual = shape, spend, dict[Text, int](), False

    def propose(self, sequence: Text, most: int) -> Draft:
        return Draft((), tuple(range(LAYER_KINDS, LAYER_KINDS + most)))

    def behind(self, sequence: Text) -> int:
        return sequence.total_len - self._made.get(sequence, 0)

    def draw(self, requests: Rows[tuple[Text, int]]) -> list[tuple[int, ...]]:
        behind = [self.behind(s) for s, _ in requests]
        self._made |= {s: s.total_len for s, _ in requests}
        self.unusual, shape = max(behind) > self._shape.recorded_rows, self._shape
        passes = max(width for _, width in requests) * (1.0 + 0.03 * (len(requests) - 1))
        self._spend(passes * shape.draw + shape.made * sum(behind) + shape.alone * self.unusual)
        return [(1,) * width for _, width in requests]

    def forget(self, sequence: Text) -> None: ...


class Decoding:
    """`spent` is without drift and noise, which `now` has: so few tokens tell what is gained."""

    def __init__(self, cell: Cell, seed: int = 0, fixed: int | None = None) -> None:
        self.cell, self.shape, self.now, self.spent = cell, SHAPES[cell.shape], 0.0, 0.0
        self._unit = self.shape.step([0] * cell.batch, cell.overlap)
        self._chance, self._noise = random.Random(seed), random.Random(seed + 1)
        self.texts = [Text(tokens=[0, 0]) for _ in range(cell.batch)]
        drafter = Foretelling() if self.shape.foretold else Layer(self.shape, self._spend)
        self.speculation = Speculation(
            drafter, "made up", MOST if fixed is None else fixed, governed=fixed is None, clock=lambda: self.now
        )

    def gain(self, tokens: int) -> float:
        """Gain of so many draft tokens of each sequence: 1 where nothing is drafted."""
        begun, before = self.spent, self._tokens()
        while self._tokens() - before < tokens * len(self.texts):
            self._step()
        return (self._tokens() - before) / (self.spent - begun) / len(self.texts)

    def _tokens(self) -> int:
        return sum(text.total_len for text in self.texts)

    def _spend(self, time: float) -> None:
        time /= self._unit
        self.spent += time
        long = 2.0 if self._noise.random() < 0.01 else 1.0  # somebody else's turn
        pace = 1.0 + DRIFT * math.sin(2.0 * math.pi * self.now / self.cell.period)
        self.now += time * long * pace * max(0.5, self._noise.gauss(1.0, 0.03))

    def _step(self) -> None:
        started = self.now
        found = self.speculation.draft_tokens(self.texts, 64, lambda sequence, n: True)
        self._spend(self.shape.step([len(draft_tokens) for draft_tokens in found], self.cell.overlap))
        turns = [self._turn(text, draft_tokens) for text, draft_tokens in zip(self.texts, found, strict=True)]
        self.speculation.ran(turns, self.now - started)

    def _turn(self, text: Text, draft_tokens: tuple[int, ...]) -> SimpleNamespace:
        came: list[int] = []
        while len(came) <= len(draft_tokens):
            came.append(int(self._chance.random() < self.cell.acceptance))
            if not came[-1]:
                break
        text.tokens += came
        chunk = Chunk(text, 1 + len(draft_tokens), 1, draft_tokens)
        return SimpleNamespace(sequence=text, chunk=chunk, tokens=len(came))


def best_fixed(cell: Cell) -> float:
    """The gain of the best width; none is one."""
    return max(1.0, *(Decoding(cell, 5, width).gain(max(300, 2400 // cell.batch)) for width in range(1, MOST + 1)))


def governed(cell: Cell, seeds: Rows[int] = SEEDS) -> list[float]:
    """Its gains, once the governor has learnt."""
    found = []
    for seed in seeds:
        decoding = Decoding(cell, seed)
        decoding.gain(300)
        found.append(decoding.gain(1500))
    return found


def _table(shape: str, period: float) -> Iterator[str]:
    """Per cell: the least of all seeds over the best width, and over plain decoding."""
    yield f"\n{shape}, period {period:.0f}\n\n| batch | overlap |" + "".join(f" {a:g} |" for a in ACCEPTANCES)
    yield "| --- | --- |" + " --- |" * len(ACCEPTANCES)
    for batch in BATCHES:
        for overlap in OVERLAPS:
            cells = [Cell(shape, period, batch, overlap, acceptance) for acceptance in ACCEPTANCES]
            gains = [(min(governed(cell)), best_fixed(cell)) for cell in cells]
            yield f"| {batch} | {overlap:.2g} |" + "".join(f" {g / best:.2f}, {g:.2f} |" for g, best in gains)


if __name__ == "__main__":
    for shape in SHAPES:
        for period in PERIODS:
            print(*_table(shape, period), sep="\n", flush=True)
