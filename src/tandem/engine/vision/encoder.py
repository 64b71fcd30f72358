"""`Encoder`: images become features between steps, one image at a time, a slice of it beside each step.

The oldest sequence's next image comes first. An image that nobody waits for any more is dropped at the next piece. Rows
that the prefix cache has are never seen again: who is not admitted yet asks for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Rows
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from tandem.engine.sequence import Sequence
from tandem.engine.start.parts import EngineParts
from tandem.engine.vision.features import FeatureCache
from tandem.engine.vision.pace import IDLE_SECONDS, TowerPace, pace_of
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
"""Around what is given to the device. On a GPU the stream of steps is current."""


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
    features: Tensor | None = None  # once all pieces were given


class Encoder:
    """Not thread-safe: the engine's thread calls it between steps."""

    def __init__(
        self, tower: Encodes, token_bytes: int, most_bytes: int, pace: TowerPace, *,
        least_rows: int = 0, place: Place = nullcontext,
    ) -> None:  # fmt: skip
        """token_bytes: of a token's features. most_bytes: of all that are kept. least_rows: of a chunk that does not
        wait for the next image."""
        self._tower, self._token_bytes, self._place = tower, token_bytes, place
        self._cache, self.pace = FeatureCache(most_bytes), pace
        self._least_rows = least_rows
        self._task: _Task | None = None
        self._full = False  # features that rows are still to be computed of leave no room for the next image
        self.images, self.seconds = 0, 0.0  # that became features, and what they took

    @property
    def under_way(self) -> bool:
        return self._task is not None

    def hand_out(self, running: Rows[Sequence]) -> None:
        """Gives features that are there to the sequences that wait for them. A task that nobody waits for is given up.
        Call it before a step is scheduled."""
        for sequence in _seeing(running):
            self.hand_to(sequence)
        task = self._task
        if task is not None and all(image.key != task.key for _, image in _waiting(running)):
            task.work.close()
            self._task = None

    def hand_to(self, sequence: Sequence) -> None:
        """Gives a sequence features that are there, also at its admission: its first chunk has their rows."""
        images = sequence.images
        if images is None:
            return
        images.release(sequence.computed_len)
        while (missing := images.missing(sequence.computed_len)) is not None:
            features = self._cache.get(missing[1].key)
            if features is None:
                break
            images.features[missing[0]] = features
        images.least_rows = 0 if self._full else self._least_rows

    def go_on(self, running: Rows[Sequence], seconds: float, idle: bool) -> list[tuple[Sequence, Exception]]:
        """Pieces for about so long, at least one, or the next image's pixels, if none is under way. idle: nothing else
        runs, so a device may be waited for. Returns who waits for an image that cannot be read, and why."""
        try:
            if self._task is None:
                self._task = self._next(running)
            elif idle:
                self.pace.wait(self._task.features is not None)
                self._slice(self._task, IDLE_SECONDS if self._tower.device.type == "cuda" else seconds)
            else:
                self._slice(self._task, seconds)
        except Exception as error:
            return self._failed(running, error)
        return []

    def _next(self, running: Rows[Sequence]) -> _Task | None:
        """Task of the oldest sequence that waits, if there is room for what it will hold."""
        _, image = next(_waiting(running), (None, None))
        room = image is None or self._cache.make_room(image.rows * self._token_bytes, _held(running))
        self._full = not room
        if image is None or not room:
            return None
        self.pace.begin_image()
        return _Task(image.key, self._tower.encode(pixels_of(image.pixels)))

    def _slice(self, task: _Task, seconds: float) -> None:
        with torch.inference_mode(), self._place():
            self.pace.begin(seconds)
            while task.features is None and self.pace.fits():
                self._piece(task)
        if task.features is not None and self.pace.ended():
            self._done(task, task.features)

    def _piece(self, task: _Task) -> None:
        try:
            next(task.work)
        except StopIteration as end:
            task.features = end.value
        self.pace.launched()

    def _done(self, task: _Task, features: Tensor) -> None:
        self._cache.put(task.key, features)
        self._task, self.images, self.seconds = None, self.images + 1, self.seconds + self.pace.seconds

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


def encoder_of(parts: EngineParts) -> Encoder | None:
    """Image encoder of an engine's parts; None where no image is read."""
    vision, model, plan = parts.model_config.vision, parts.model, parts.plan
    if vision is None or not isinstance(model, SeeingModel) or model.tower is None:
        return None
    each = feature_bytes(vision, plan.dtype)
    shared = 0 if plan.gpu is None else plan.gpu.sizes.shared_tokens
    return Encoder(
        model.tower, each, max(FEATURE_BYTES, plan.image_tokens * each), pace_of(model.tower.device),
        least_rows=min(shared or plan.max_step_tokens, plan.max_step_tokens),
    )  # fmt: skip
