"""`Tower`: what reads a model's images, as data; `Processor`: how an image becomes its patches."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from tandem.errors import ConfigError
from tandem.spec.json_keys import JsonKeys, read_json

ResizeRule = Literal["qwen"]
"""qwen: both sides become multiples of `Processor.side`, near the same ratio, within the limits of pixels."""

Grid = tuple[int, int, int]
"""Patches of an image: in time, downwards, across."""


MOST_PIXELS = 1 << 26  # that an image may be resized to
CPU_PATCHES = 256  # that a CPU computes at once, in about the time of a layer of a prompt's chunk
GPU_PATCHES = 4096  # of a megapixel: a third of a block takes some tenths of a millisecond
REGIONS = 2
"""Regions of rotary tables for rows of images: a step's, and those of a chunk that is computed between steps."""


@dataclass(frozen=True, slots=True)
class Processor:
    """Image preprocessing by `preprocessor_config.json`. An image's RGB bytes are resized by `rule`, bicubic; a number
    x of a channel then is (x / 255 - mean) / std."""

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
        """Patch grid of a resized image."""
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
    axes: tuple[int, ...] = ()  # of a head's pairs: whether time (0), height or width turns it
    deep: tuple[int, ...] = ()
    processor: Processor = Processor()
    eps: float = 1e-6

    def capped(self, tokens: int) -> Tower:
        """The same, of whose images none has more tokens."""
        most = min(self.processor.max_pixels, tokens * self.processor.side**2)
        least = min(self.processor.min_pixels, most)
        return replace(self, processor=replace(self.processor, min_pixels=least, max_pixels=most))

    @property
    def levels(self) -> int:
        """Rows of `out` numbers that a token's feature has."""
        return 1 + len(self.deep)


def image_turns(tower: Tower | None, step_tokens: int) -> int:
    """Rows that rotary tables have behind those of the context, for images of steps of at most so many rows."""
    return 0 if tower is None else REGIONS * step_tokens


FILES = "preprocessor_config.json", "processor_config.json"
"""Where a checkpoint says how pixels are made: the first that is there. The second has it in an object of its own."""
BICUBIC = 3  # of Pillow's filters


def with_processor(tower: Tower, directory: Path) -> Tower:
    """The tower, with what the checkpoint says of pixels. Raises ConfigError for what is not computed, CheckpointError
    for a broken file."""
    file = next((file for name in FILES if (file := directory / name).exists()), None)
    if file is None:
        return tower
    config = read_json(file)
    return replace(tower, processor=read_processor(JsonKeys(config.get("image_processor") or config, file.name), tower))


def read_processor(keys: JsonKeys, tower: Tower) -> Processor:
    """keys: of the file."""
    own = tower.processor
    for key, value in (("patch_size", own.patch), ("merge_size", own.merge), ("temporal_patch_size", own.temporal)):
        keys.only(key, value, "config.json's vision_config says otherwise")
    for key in ("do_resize", "do_rescale", "do_normalize"):
        keys.only(key, True, "pixels would be others than the tower was trained with")
    keys.only("resample", BICUBIC, "images are resized bicubically")
    if not math.isclose(keys.optional("rescale_factor", 1 / 255), 1 / 255, rel_tol=1e-6):
        raise ConfigError(f"{keys.where}: rescale_factor must be 1/255")
    size = keys.mapping("size")
    least = size.get("shortest_edge") or keys.get("min_pixels") or own.min_pixels
    most = size.get("longest_edge") or keys.get("max_pixels") or own.max_pixels
    if not (type(least) is int and type(most) is int and 0 < least <= most <= MOST_PIXELS):
        raise ConfigError(f"{keys.where}: size of {least} to {most} pixels; try {own.min_pixels} to {own.max_pixels}")
    mean, std = _three(keys, "image_mean", own.mean), _three(keys, "image_std", own.std)
    return replace(own, min_pixels=least, max_pixels=most, mean=mean, std=std)


def _three(keys: JsonKeys, key: str, usual: tuple[float, float, float]) -> tuple[float, float, float]:
    """A number of each channel; of image_std, none is 0."""
    triple = keys.get(key) or usual
    if not isinstance(triple, list | tuple) or len(triple) != 3 or not all(isinstance(x, int | float) for x in triple):
        raise ConfigError(f"{keys.where}: {key} is {triple!r}; try {list(usual)}")
    if key == "image_std" and not all(x > 0 for x in triple):
        raise ConfigError(f"{keys.where}: {key} must be above 0; try {list(usual)}")
    return float(triple[0]), float(triple[1]), float(triple[2])
