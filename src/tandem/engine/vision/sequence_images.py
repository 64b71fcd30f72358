"""`SequenceImages`: what a sequence has of its images. `turns_of`, `image_rows_of`: the part of a batch that comes of
it."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from tandem.engine.vision.rows import ImageRows
from tandem.engine.vision.spans import ImageSpan
from tandem.models.batch import ImageRowBatch


class SequenceImages:
    """Features [rows, levels, hidden] of those that are ready and that rows still to be computed may ask for."""

    __slots__ = ("features", "least_rows", "rows")

    def __init__(self, rows: ImageRows) -> None:
        self.rows = rows
        self.least_rows = 0  # fewer than so many are not computed before the next image is ready
        self.features: dict[int, Tensor] = {}  # by the image's number

    def missing(self, computed_len: int) -> tuple[int, ImageSpan] | None:
        """The first image, with its number, that rows behind so many wait for."""
        if self.rows.images[-1].end <= computed_len:  # every step of an answer asks
            return None
        left = enumerate(self.rows.images)
        return next(((i, image) for i, image in left if image.end > computed_len and i not in self.features), None)

    def ready_len(self, computed_len: int, total_len: int) -> int:
        """Up to where tokens can be computed. Few rows in front of a missing image wait for it: a chunk for each of
        many images would read all weights as often."""
        missing = self.missing(computed_len)
        if missing is None:
            return total_len
        ready = missing[1].first - computed_len
        return computed_len + ready if ready >= max(1, self.least_rows) else computed_len

    def release(self, computed_len: int) -> None:
        """Features that no row behind so many asks for."""
        for number in [i for i in self.features if self.rows.images[i].end <= computed_len]:
            del self.features[number]

    def between(self, first: int, end: int) -> list[Tensor]:
        """Features of the pieces among these rows."""
        images = self.rows.images
        return [
            self.features[i][max(first - image.first, 0) : end - image.first]
            for i, image in enumerate(images)
            if image.first < end and image.end > first
        ]


class ImageSequence(Protocol):
    """Fields of a sequence that image code reads."""

    computed_len: int
    images: SequenceImages | None


class ImageChunk(Protocol):
    @property
    def sequence(self) -> ImageSequence: ...
    @property
    def length(self) -> int: ...


def turns_of(chunks: Rows[ImageChunk]) -> Tensor | None:
    """int64 [T]: by which row of rotary tables each row turns, but for pieces of images; None where no sequence has
    any."""
    if all(chunk.sequence.images is None for chunk in chunks):
        return None
    return torch.from_numpy(np.concatenate([_turns(chunk) for chunk in chunks]))


def _turns(chunk: ImageChunk) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    first, images = chunk.sequence.computed_len, chunk.sequence.images
    if images is None:
        return np.arange(first, first + chunk.length)
    return np.ascontiguousarray(images.rows.places(first, chunk.length)[:, 0])


def image_rows_of(chunks: Rows[ImageChunk], turns: Tensor, region: int) -> ImageRowBatch | None:
    """None where no row is a piece. turns: of the batch; pieces get theirs, from `region` on."""
    rows, features, places, at = list[Tensor](), list[Tensor](), list[Tensor](), 0
    for chunk in chunks:
        first, images = chunk.sequence.computed_len, chunk.sequence.images
        rows_of_chunk = None if images is None else images.rows.inside(first, chunk.length)
        if images is not None and rows_of_chunk is not None and len(rows_of_chunk):
            rows.append(torch.from_numpy(at + rows_of_chunk))
            features += images.between(first, first + chunk.length)
            places.append(torch.from_numpy(images.rows.places(first, chunk.length)[rows_of_chunk]))
        at += chunk.length
    if not rows:
        return None
    which = torch.cat(rows)
    turns[which] = torch.arange(region, region + len(which))
    return ImageRowBatch(which, torch.cat(features), torch.cat(places), region)
