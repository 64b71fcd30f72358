"""`Encoder`: images become features between steps, one image at a time, a slice of it beside each step.

The oldest sequence's next image comes first. An image that nobody waits for any more is dropped at the next piece. Rows
that the prefix cache has are never seen again: who is not admitted yet asks for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Rows
from contextlib import AbstractContextManager
from dataclasses import dataclass
from time import perf_counter
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from tandem.engine.sequence import Sequence
from tandem.engine.start.parts import EngineParts
from tandem.engine.step.prefill import PIECES_AHEAD, InFlight
from tandem.engine.vision.features import FeatureCache
from tandem.engine.vision.pixels import pixels_of
from tandem.engine.vision.spans import ImageSpan
from tandem.models.vision.tower import Encoding
from tandem.planner.vision_costs import FEATURE_BYTES, feature_bytes


class Encodes(Protocol):
    """A tower."""

    @property
    def device(self) -> torch.device: ...
    def encode(self, pixels: Tensor) -> Encoding:
        """As `VisionTower.encode`."""
        ...


Place = Callable[[], AbstractContextManager[None]]
"""Around what is given to the device."""


@runtime_checkable
class SeeingModel(Protocol):
    """A model with a tower."""

    @property
    def tower(self) -> Encodes | None: ...


@dataclass(slots=True)
class _Task:
    """An image on its way."""

    key: bytes
    work: Encoding
    in_flight: InFlight
    seconds: float = 0.0  # of the engine's thread
    features: Tensor | None = None  # once all pieces were given


class Encoder:
    """Not thread-safe: the engine's thread calls it between steps."""

    def __init__(self, tower: Encodes, token_bytes: int, most_bytes: int, place: Place) -> None:
        """token_bytes: of a token's features. most_bytes: of all that are kept."""
        self._tower, self._token_bytes, self._place = tower, token_bytes, place
        self._cache = FeatureCache(most_bytes)
        self._task: _Task | None = None
        self.images, self.seconds = 0, 0.0  # that became features, and what they took

    @property
    def under_way(self) -> bool:
        return self._task is not None

    def hand_out(self, running: Rows[Sequence]) -> None:
        """Gives features that are there to the sequences that wait for them. A task that nobody waits for is given up.
        Call it before a step is scheduled."""
        for sequence in _seeing(running):
            self._hand_to(sequence)
        task = self._task
        if task is not None and all(image.key != task.key for _, image in _waiting(running)):
            task.work.close()
            self._task = None

    def go_on(self, running: Rows[Sequence], seconds: float, idle: bool) -> list[tuple[Sequence, Exception]]:
        """Pieces for about so long, at least one; of the next image, if none is under way. idle: nothing else runs, so
        a device may be waited for. Returns who waits for an image that cannot be read, and why."""
        try:
            if self._task is None:
                self._task = self._next(running)
            if self._task is not None:
                if idle:
                    self._task.in_flight.wait_for_room(PIECES_AHEAD)
                self._slice(self._task, seconds)
        except Exception as error:
            return self._failed(running, error)
        return []

    def _hand_to(self, sequence: Sequence) -> None:
        images = sequence.images
        assert images is not None
        images.release(sequence.computed_len)
        while (missing := images.missing(sequence.computed_len)) is not None:
            features = self._cache.get(missing[1].key)
            if features is None:
                break
            images.features[missing[0]] = features

    def _next(self, running: Rows[Sequence]) -> _Task | None:
        """Task of the oldest sequence that waits, if there is room for what it will hold."""
        _, image = next(_waiting(running), (None, None))
        if image is None or not self._cache.make_room(image.rows * self._token_bytes, _held(running)):
            return None
        return _Task(image.key, self._tower.encode(pixels_of(image.pixels)), InFlight(self._tower.device))

    def _slice(self, task: _Task, seconds: float) -> None:
        started = last = perf_counter()
        longest = 0.0
        while task.features is None and task.in_flight.count() < PIECES_AHEAD:
            self._piece(task)
            now = perf_counter()
            longest, last = max(longest, now - last), now
            if now - started + longest > seconds:
                break
        task.seconds += perf_counter() - started
        if task.features is not None and not task.in_flight.count():
            self._done(task, task.features)

    def _piece(self, task: _Task) -> None:
        with torch.inference_mode(), self._place():
            try:
                next(task.work)
            except StopIteration as end:
                task.features = end.value
            task.in_flight.mark()

    def _done(self, task: _Task, features: Tensor) -> None:
        self._cache.put(task.key, features)
        self._task, self.images, self.seconds = None, self.images + 1, self.seconds + task.seconds

    def _failed(self, running: Rows[Sequence], error: Exception) -> list[tuple[Sequence, Exception]]:
        """All who wait for the image that was to be read."""
        key = next(_waiting(running))[1].key if self._task is None else self._task.key
        self._task = None
        return [(sequence, error) for sequence, image in _waiting(running) if image.key == key]


def _seeing(running: Rows[Sequence]) -> Iterator[Sequence]:
    return (sequence for sequence in running if sequence.images is not None)


def _waiting(running: Rows[Sequence]) -> Iterator[tuple[Sequence, ImageSpan]]:
    """Whose next image is not there, by age, and that image."""
    for sequence in _seeing(running):
        assert sequence.images is not None
        missing = sequence.images.missing(sequence.computed_len)
        if missing is not None:
            yield sequence, missing[1]


def _held(running: Rows[Sequence]) -> set[bytes]:
    """Keys of images that rows are still to be computed of."""
    return {
        sequence.images.rows.images[number].key
        for sequence in _seeing(running)
        if sequence.images is not None
        for number in sequence.images.features
    }


def encoder_of(parts: EngineParts, place: Place) -> Encoder | None:
    """Image encoder of an engine's parts; None where no image is read."""
    vision, model = parts.model_config.vision, parts.model
    if vision is None or not isinstance(model, SeeingModel) or model.tower is None:
        return None
    each = feature_bytes(vision, parts.plan.dtype)
    return Encoder(model.tower, each, max(FEATURE_BYTES, parts.plan.image_tokens * each), place)
