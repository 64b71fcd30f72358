"""A prompt with images that tests take through a model, chunk by chunk."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from sessions import PAGE_SIZE, plan
from tandem.checkpoint import load_model_config, open_checkpoint
from tandem.engine.protocol import SamplingSettings
from tandem.engine.sequence import Chunk, Sequence, Status, show
from tandem.engine.state.arrays import allocate
from tandem.engine.step.batch import BatchArrays, regions
from tandem.engine.vision.spans import PixelSource
from tandem.kernels.ops import Ops
from tandem.kernels.reference import TorchOps
from tandem.models import Model, build
from tandem.models.vision.tower import Encoding
from tandem.spec.state import page_tokens
from tiny_seeing import Prompt

PAGES = 64


def pixels_of(source: PixelSource) -> Tensor:
    assert source.inline is not None
    return torch.frombuffer(bytearray(source.inline), dtype=torch.uint8).view(source.height, source.width, 3)


def encoded(encoding: Encoding) -> Tensor:
    """All pieces at once."""
    with torch.inference_mode():
        while True:
            try:
                next(encoding)
            except StopIteration as end:
                return end.value


class Walk:
    """A model with a tower, and one sequence after the other."""

    def __init__(self, path: Path, ops: Ops | None = None, dtype: str = "float32") -> None:
        found = load_model_config(path)
        self.config = replace(found, vision=found.tower)
        self.page = page_tokens(self.config.states, PAGE_SIZE)
        self.plan = replace(plan(dtype, context=self.page * PAGES), page_size=self.page)
        model = build(self.config, self.plan, open_checkpoint(path), ops or TorchOps())
        assert isinstance(model, Model) and model.tower is not None
        self.model, self.tower = model, model.tower
        self.states = allocate(self.config.state_layout(dtype, self.page), PAGES, slots=4).arrays
        own, _ = regions(self.plan.context_length, self.plan.max_step_tokens)
        self._arrays = BatchArrays(self.page, self.plan.max_step_tokens, images_from=own)
        self._features: dict[bytes, Tensor] = {}

    def features(self, source: PixelSource, key: bytes) -> Tensor:
        if key not in self._features:
            self._features[key] = encoded(self.tower.encode(pixels_of(source)))
        return self._features[key]

    def begin(self, asked: Prompt, more: tuple[int, ...] = ()) -> None:
        """more: tokens of an answer."""
        ids = list(asked.ids)
        self.sequence = Sequence(
            "a", 0, ids, SamplingSettings(), arrival=0, max_len=self.plan.context_length, page_size=self.page, seed=0
        )
        show([self.sequence], asked.images, self.config.vision)
        if self.sequence.images is not None:
            for number, image in enumerate(asked.images):
                self.sequence.images.features[number] = self.features(image.pixels, image.key)
        self.sequence.tokens += more
        self.sequence.become(Status.RUNNING)
        self.sequence.add_pages(np.random.default_rng(3).permutation(PAGES)[: self.sequence.pages_wanted()].tolist())
        self.sequence.slot = 1

    def step(self, length: int) -> Tensor:
        """Logits of the next rows."""
        chunk = Chunk(self.sequence, length, length)
        with torch.inference_mode():
            logits = self.model.forward(self._arrays.fill([chunk]), self.states).clone()
        self.sequence.advance(length)
        return logits

    def logits(self, asked: Prompt, size: int, more: tuple[int, ...] = ()) -> Tensor:
        """Logits of a prompt in chunks of at most so many rows, and of tokens behind it, one by one."""
        self.begin(asked, more)
        parts = list[Tensor]()
        while (left := len(asked.ids) - self.sequence.computed_len) > 0:
            parts.append(self.step(min(size, left)))
        return torch.cat([*parts, *(self.step(1) for _ in more)])
