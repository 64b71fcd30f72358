"""`Tower`: what reads a model's images, as data; `Processor`: how an image becomes its patches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ResizeRule = Literal["qwen"]
"""qwen: both sides become multiples of `Processor.side`, near the same ratio, within the limits of pixels."""

Grid = tuple[int, int, int]
"""Patches of an image: in time, downwards, across."""


@dataclass(frozen=True, slots=True)
class Processor:
    """What `preprocessor_config.json` says. An image's RGB bytes are resized by `rule`, bicubic; a number x of a
    channel then is (x / 255 - mean) / std."""

    patch: int = 16  # pixels of a patch's side
    merge: int = 2  # patches of a token's side
    temporal: int = 2  # frames of a patch; those of an image are equal
    min_pixels: int = 1 << 16  # after resizing
    max_pixels: int = 1 << 24
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)
    rule: ResizeRule = "qwen"

    @property
    def side(self) -> int:
        """Pixels of a token's side."""
        return self.patch * self.merge

    def grid(self, height: int, width: int) -> Grid:
        """Of a resized image."""
        return 1, height // self.patch, width // self.patch

    def tokens(self, grid: Grid) -> int:
        return grid[0] * grid[1] * grid[2] // self.merge**2


@dataclass(frozen=True, slots=True)
class Tower:
    """A vision transformer whose tokens take the place of embedded ones. placeholder: the id of those in a prompt;
    start, end: ids that a chat template writes around them. deep: blocks whose rows, too, become features; those of the
    i-th are added behind the i-th layer of the text."""

    depth: int
    hidden: int
    heads: int
    width: int  # of a block's feed-forward
    side: int  # learned positions along each side
    out: int  # channels of a feature: the text's hidden size
    placeholder: int
    start: int
    end: int
    deep: tuple[int, ...] = ()
    processor: Processor = Processor()
    eps: float = 1e-6

    @property
    def levels(self) -> int:
        """Rows of `out` numbers that a token's feature has."""
        return 1 + len(self.deep)
