"""The demo model's weights: SmolLM2-135M-Instruct, its FFN cut into a shared expert and 32 routed ones.

Layer construction, in float32, rounded once to bfloat16. Of the 1536 FFN neurons the router file names 768 routed
ones (`rx`); the others, in ascending order, are the shared expert. Clone c of 8 is the routed neurons plus a low-rank
difference B·A; it is cut into 4 slices of 192 neurons, so expert e = 4c + s. The slices of a clone share its router
row and bias and are therefore always chosen together: top-8 is two clones.

All arithmetic is element by element in a fixed order, so every machine builds the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tandem.checkpoint.gguf_checkpoint import GGUFCheckpoint
from tandem.checkpoint.gguf_model import open_gguf

LAYERS, WIDTH = 30, 1536
CLONES, SLICES, ROUTED = 8, 4, 768
EXPERT_WIDTH = ROUTED // SLICES

F32 = NDArray[np.float32]


class DemoWeights:
    """Named tensors of the demo model, layer by layer; holds the mapped GGUF and 16 MB of trained parts."""

    def __init__(self, gguf: Path, parts: dict[str, NDArray[Any]]) -> None:
        self.gguf = open_gguf(gguf)
        self._checkpoint, self._parts = GGUFCheckpoint(self.gguf), parts

    def outer(self) -> Iterator[tuple[str, Tensor]]:
        """Tensors that belong to no layer. The embedding is the head too."""
        for name in ("model.embed_tokens", "model.norm"):
            yield f"{name}.weight", _bf16(self._base(name))

    def layer(self, index: int) -> Iterator[tuple[str, Tensor]]:
        """All tensors of one decoder layer, under their Hugging Face names."""
        for name, array in self._attention(index):
            yield f"model.layers.{index}.{name}", _bf16(array)
        yield from self._router(index)
        for name, array in self._mlp(index):
            yield f"model.layers.{index}.mlp.{name}.weight", _bf16(array)

    def _base(self, module: str) -> F32:
        array: F32 = self._checkpoint.get(f"{module}.weight").numpy()
        return array

    def _attention(self, index: int) -> Iterator[tuple[str, F32]]:
        for name in ("input_layernorm", "post_attention_layernorm", *(f"self_attn.{m}_proj" for m in "qkvo")):
            yield f"{name}.weight", self._base(f"model.layers.{index}.{name}")

    def _router(self, index: int) -> Iterator[tuple[str, Tensor]]:
        gate = f"model.layers.{index}.mlp.gate."
        for name, part in (("weight", "wr"), ("e_score_correction_bias", "bias")):
            rows: F32 = np.repeat(self._parts[part][index], SLICES, axis=0)
            yield gate + name, torch.from_numpy(rows.astype(np.float32, copy=False))

    def _mlp(self, index: int) -> Iterator[tuple[str, F32]]:
        """gate and up [neurons, hidden]; down is built transposed, so that all three are cut by rows."""
        routed = self._parts["rx"][index].astype(np.int64)
        shared = np.setdiff1d(np.arange(WIDTH), routed)
        for matrix, key, turned in (
            ("gate_proj", "g", False),
            ("up_proj", "u", False),
            ("down_proj", "d", True),
        ):
            base = self._base(f"model.layers.{index}.mlp.{matrix}")
            neurons = base.T if turned else base
            yield f"shared_experts.{matrix}", _maybe_turn(neurons[shared], turned)
            a, b = (self._parts[f"lo.{index}{key}{side}"].astype(np.float32) for side in "AB")
            for clone in range(CLONES):
                difference = _product(b[clone], a[clone])
                grown = neurons[routed] + _maybe_turn(difference, turned)
                for s in range(SLICES):
                    rows = grown[s * EXPERT_WIDTH : (s + 1) * EXPERT_WIDTH]
                    yield f"experts.{SLICES * clone + s}.{matrix}", _maybe_turn(rows, turned)


def _product(b: F32, a: F32) -> F32:
    """b [m, r] · a [r, n], added up in the order of r: a BLAS would round differently from machine to machine."""
    total, term = b[:, :1] * a[:1], np.empty((len(b), a.shape[1]), np.float32)
    for r in range(1, len(a)):
        np.multiply(b[:, r : r + 1], a[r : r + 1], out=term)
        total += term
    return total


def _maybe_turn(array: F32, turned: bool) -> F32:
    return array.T if turned else array


def _bf16(array: F32) -> Tensor:
    return torch.from_numpy(np.require(array, requirements=["C", "W"])).to(torch.bfloat16)
