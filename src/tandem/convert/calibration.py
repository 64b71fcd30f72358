"""`Calibration`: what the experts of a layer see when the model reads a text.

The source's own layers run, one at a time, as the conversion comes to them (`quality.LayerStream`). Memory: one packed
layer, the text's hidden states twice, and per worker a [columns, columns] matrix.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tandem import _core
from tandem.experts.cpu_experts import RoutedExperts
from tandem.experts.feed import LayerFeed
from tandem.kernels.ops import ExpertBiases, Routing, SureRead
from tandem.kernels.packed.cache import KeptLayer
from tandem.kernels.reference import activated
from tandem.quality.stream import LayerStream, Variant
from tandem.quality.text import Windows
from tandem.spec.activation import SILU, Activation

_EXPERT = re.compile(r"experts\.(\d+)\.")
_TYPICAL_TOKENS = (
    64  # as many of the layer's average tokens count beside an expert's own, which may be few or none
)
_SAMPLED = 256


class RecordingExperts:
    """Experts that keep what they are asked."""

    def __init__(self, experts: RoutedExperts) -> None:
        self._experts = experts
        self.calls: list[tuple[Tensor, Routing]] = []

    @property
    def slot_of(self) -> Tensor | None:
        return self._experts.slot_of

    def load(self, feed: LayerFeed, cache: KeptLayer | None = None) -> None:
        self._experts.load(feed, cache)

    def set_biases(self, biases: ExpertBiases) -> None:
        self._experts.set_biases(biases)

    @property
    def expert_bytes(self) -> int:
        return self._experts.expert_bytes

    def sure_read(self, experts: int) -> SureRead:
        return self._experts.sure_read(experts)

    def takes_predictions(self, rows: int) -> bool:
        return False

    def prefetch(self, routing: Routing) -> None: ...

    def submit(self, x: Tensor, routing: Routing) -> Any:
        self.calls.append((x.clone(), Routing(routing.ids.clone(), routing.weights.clone())))
        return self._experts.submit(x, routing)

    def wait(self, ticket: Any) -> Tensor:
        return self._experts.wait(ticket)


@dataclass(frozen=True)
class LayerInputs:
    """x [tokens, hidden] and who was chosen with which weight, [tokens, k]."""

    x: Tensor
    ids: Tensor
    weights: Tensor
    how: Activation = SILU
    biases: ExpertBiases | None = None

    def of_expert(self, expert: int) -> tuple[Tensor, Tensor]:
        """float32 rows [n, hidden] that this expert sees, and how much its answer counts, [n, 1].

        A sample of all rows comes after its own, as many as `_TYPICAL_TOKENS` of average weight count.
        """
        rows, cpu_slots = torch.where(self.ids == expert)
        step = max(1, len(self.x) // _SAMPLED)
        sample = self.x[::step][:_SAMPLED]
        typical = self.weights.square().mean() * _TYPICAL_TOKENS / len(sample)
        counts = torch.cat((self.weights[rows, cpu_slots], typical.sqrt().expand(len(sample))))
        return torch.cat((self.x[rows], sample)).float(), counts[:, None]

    def products(self, expert: int, gate_up: tuple[Tensor, ...] | None = None) -> Tensor:
        """sum of x x^T over an expert's inputs, weighted as its answers are; with its gate and up matrices, of what
        goes into down."""
        x, counts = self.of_expert(expert)
        if gate_up is not None:
            gate, up = (x @ matrix.T for matrix in gate_up)
            if self.biases is not None:
                gate, up = gate + self.biases.gate[expert], up + self.biases.up[expert]
            x = activated(self.how, gate, up)
        x = x * counts
        return x.T @ x


class Calibration:
    """Layers must be asked for in ascending order."""

    def __init__(self, model: Path, windows: Windows) -> None:
        pool = _core.WorkerPool(
            [-1] * len(os.sched_getaffinity(0))
        )  # not pinned: conversion works on the same cores
        self.windows = windows
        self._stream = LayerStream(Variant(model), windows, pool)
        self._next = 0
        self._inputs: LayerInputs | None = None

    def inputs(self, layer: int) -> LayerInputs | None:
        """None where the layer has no experts that the model runs (a draft layer behind the last)."""
        if layer >= len(self._stream.config.layers):
            return None
        while self._next <= layer:
            self._inputs = self._run(self._next)
            self._next += 1
        return self._inputs

    def _run(self, index: int) -> LayerInputs | None:
        layer, moe = self._stream.layer(index), self._stream.config.layers[index].moe
        recording = None
        if layer.moe is not None:
            recording = layer.moe.experts = RecordingExperts(layer.moe.experts)
        self._stream.advance(layer, self._stream.hidden)
        if recording is None or moe is None:
            return None
        xs, routings = zip(*recording.calls, strict=True)
        return LayerInputs(
            torch.cat(xs),
            torch.cat([r.ids for r in routings]),
            torch.cat([r.weights for r in routings]),
            moe.experts.activation,
            self._stream.biases(index),
        )


def expert_of(module: str) -> int:
    """The number in `….experts.N.…`."""
    match = _EXPERT.search(module)
    assert match is not None
    return int(match.group(1))


def siblings(module: str) -> tuple[str, str] | None:
    """gate and up of the same expert where `module` is its down projection."""
    name, _, matrix = module.rpartition(".")
    pairs = {"down_proj": ("gate_proj", "up_proj"), "w2": ("w1", "w3")}
    return (f"{name}.{pairs[matrix][0]}", f"{name}.{pairs[matrix][1]}") if matrix in pairs else None
