"""`FeatureCache`: what was seen in images, for whoever sends them again or loses their rows."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection

from torch import Tensor


class FeatureCache:
    """The least recently used go first, but for those that sequences hold: their memory would not come back."""

    def __init__(self, most_bytes: int) -> None:
        self._most, self._of = most_bytes, OrderedDict[bytes, Tensor]()

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in self._of.values())

    def get(self, key: bytes) -> Tensor | None:
        """[tokens, levels, hidden] of an image."""
        features = self._of.get(key)
        if features is not None:
            self._of.move_to_end(key)
        return features

    def make_room(self, nbytes: int, held: Collection[bytes]) -> bool:
        """For so many more bytes. False where what is held leaves none; but one image fits always."""
        for key in [key for key in self._of if key not in held]:
            if self.nbytes + nbytes <= self._most:
                break
            del self._of[key]
        return self.nbytes + nbytes <= self._most or not self._of

    def put(self, key: bytes, features: Tensor) -> None:
        self._of[key] = features
