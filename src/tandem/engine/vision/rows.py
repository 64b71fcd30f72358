"""`ImageRows`: which rows of a prompt are pieces of images, where they turn, and what the prefix cache calls them."""

from __future__ import annotations

from collections.abc import Sequence as Rows

import numpy as np
import numpy.typing as npt

from tandem.engine.vision.spans import ImageSpan

ROWS_OF_KEY = 1 << 20  # more than an image has

Places = npt.NDArray[np.int64]


class ImageRows:
    """Rows of a prompt with images, from its first to its last token. All answers of a request share it.

    A piece of an image turns by three positions: in time, downwards, across. They begin where the text before ends; the
    text behind goes on after the largest. So a token behind images turns as one at place + shift, which is before it.
    """

    def __init__(self, images: Rows[ImageSpan], prompt_len: int, merge: int) -> None:
        """merge: patches of a token's side."""
        self.images = tuple(images)
        self._places: Places = np.empty((prompt_len, 3), dtype=np.int64)
        self._inside = np.zeros(prompt_len, dtype=np.bool_)
        position = done = 0
        for image in self.images:
            position = self._text(done, image.first, position)
            time, down, across = image.grid[0], image.grid[1] // merge, image.grid[2] // merge
            pieces = np.indices((time, down, across)).reshape(3, -1).T
            self._places[image.first : image.end], self._inside[image.first : image.end] = position + pieces, True
            position, done = position + max(down, across), image.end
        self.shift = self._text(done, prompt_len, position) - prompt_len

    def _text(self, first: int, end: int, position: int) -> int:
        """The position behind it."""
        self._places[first:end] = np.arange(position, position + end - first)[:, None]
        return position + end - first

    def keys(self, prompt_ids: list[int]) -> list[int]:
        """Each token's key in the prefix cache: pieces of an image have its hash and their number in it,
        below 0, where no token's id is."""
        keys = list(prompt_ids)
        for image in self.images:
            first = -1 - int.from_bytes(image.key) * ROWS_OF_KEY
            keys[image.first : image.end] = range(first, first - image.rows, -1)
        return keys

    def places(self, first: int, count: int) -> Places:
        """[count, 3], of rows from `first` on, draft tokens and tokens of the answer included."""
        if first >= len(self._places):
            return np.repeat(np.arange(first + self.shift, first + self.shift + count)[:, None], 3, 1)
        inside = self._places[first : first + count]
        behind = np.arange(max(first, len(self._places)), first + count) + self.shift
        return np.concatenate([inside, np.repeat(behind[:, None], 3, 1)]) if len(behind) else inside

    def inside(self, first: int, count: int) -> Places:
        """Which of these rows, counted from `first`, are pieces of images."""
        return np.flatnonzero(self._inside[first : first + count])

    def is_piece(self, row: int) -> bool:
        return row < len(self._inside) and bool(self._inside[row])
