"""`VisionTower`: the vision transformer of Qwen3-VL and Qwen3.5, one image at a time and in pieces."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.kernels.images import ImageOps, ImageShape
from tandem.kernels.ops import Linear
from tandem.models.builder import Builder
from tandem.models.draft_layer import TensorNames
from tandem.models.vision.patches import (
    PixelNorm,
    order_of,
    patches_of,
    positions_of,
    turns_of,
)
from tandem.spec.model_config import ModelConfig
from tandem.spec.vision import CPU_PATCHES, GPU_PATCHES, Tower


@dataclass(frozen=True, slots=True)
class TowerNames:
    """Names in a checkpoint: the prefix of all, the mergers of blocks, and the modules of a merger."""

    prefix: str = "model.visual."
    deep: str = "deepstack_merger_list"
    merger: tuple[str, str, str] = ("norm", "linear_fc1", "linear_fc2")


SPELLINGS = TowerNames(), TowerNames("visual.", "merger_list", ("ln_q", "mlp.0", "mlp.2"))  # the second is Qwen3-Omni's

Encoding = Generator[None, None, Tensor]
"""Stops after each piece of the work; returns features [tokens, levels, out]."""


class VisionTower:
    """Images never share a pass, and rows are always cut alike, so an image's bits do not depend on what else runs."""

    def __init__(self, b: Builder, tower: Tower) -> None:
        self.tower, self.dtype, self._ops = tower, b.dtype, b.ops
        p, hidden, names = tower.processor, tower.hidden, names_of(b.checkpoint) or TowerNames()
        prefix = names.prefix
        self._patch = b.convolution(f"{prefix}patch_embed.proj", hidden, 3, p.temporal, p.patch, p.patch)
        self._learned = b.float_tensor(f"{prefix}pos_embed.weight", tower.side**2, hidden)
        self._norm = PixelNorm.of(p, self.device)
        self._rows = GPU_PATCHES if self.device.type == "cuda" else CPU_PATCHES
        self._blocks = [_TowerBlock(b, tower, f"{prefix}blocks.{i}.") for i in range(tower.depth)]
        self._merger = _Merger(b, tower, f"{prefix}merger.", names.merger, early=True)
        indices = range(len(tower.deep))
        self._deep = [_Merger(b, tower, f"{prefix}{names.deep}.{i}.", names.merger, early=False) for i in indices]

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return self._learned.device

    def encode(self, pixels: Tensor) -> Encoding:
        """pixels: uint8 [height, width, 3], resized, in host memory."""
        p = self.tower.processor
        patches = patches_of(pixels.to(self.device), p)
        yield
        down, across = p.grid(*pixels.shape[:2])[1:]
        order = order_of(down, across, p.merge).to(self.device)
        x, turns = self._places(order, down, across), turns_of(order, self.tower)
        tiles = _tiles(len(patches), self._rows, p.merge**2)
        yield
        for rows in tiles:
            x[rows] += self._patch(self._norm(patches[rows]).to(self.dtype))
            yield
        shape = ImageShape(len(patches), self.tower.heads, self.tower.hidden // self.tower.heads, tiles[0].stop)
        ops, levels = self._ops.image_ops(shape, self.dtype, turns), list[Tensor]()
        for i, block in enumerate(self._blocks):
            yield from block.run(x, ops, tiles)
            if i in self.tower.deep:
                levels.append((yield from self._deep[len(levels)].run(x, tiles)))
        return torch.stack([(yield from self._merger.run(x, tiles)), *levels], 1)

    def _places(self, order: Tensor, down: int, across: int) -> Tensor:
        """Learned positions of an image's patches, [patches, hidden]."""
        table = positions_of(self._learned.view(self.tower.side, self.tower.side, -1), down, across)
        return table[order[:, 0], order[:, 1]].to(self.dtype)


class _TowerNorm:
    def __init__(self, b: Builder, name: str, size: int, eps: float) -> None:
        self._weight, self._bias = b.tensor(f"{name}.weight", size), b.tensor(f"{name}.bias", size)
        self._eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self._weight.shape, self._weight, self._bias, self._eps)

    def by(self, ops: ImageOps, x: Tensor) -> Tensor:
        return ops.layer_norm(x, self._weight, self._bias, self._eps)


class _TowerBlock:
    """Attention of all patches of an image to all, and a feed-forward."""

    def __init__(self, b: Builder, tower: Tower, name: str) -> None:
        hidden, width = tower.hidden, tower.width
        self._heads = tower.heads
        self._norms = [_TowerNorm(b, f"{name}norm{i}", hidden, tower.eps) for i in (1, 2)]
        self._qkv = b.linear([f"{name}attn.qkv"], [3 * hidden], hidden, bias=True)
        self._out = b.linear([f"{name}attn.proj"], [hidden], hidden, bias=True)
        self._up = b.linear([f"{name}mlp.linear_fc1"], [width], hidden, bias=True)
        self._down = b.linear([f"{name}mlp.linear_fc2"], [hidden], width, bias=True)

    def run(self, x: Tensor, ops: ImageOps, tiles: list[slice]) -> Iterator[None]:
        """Changes x [patches, hidden]; stops after each tile of rows: before attention, in it, and behind it."""
        queries = list[Tensor]()
        for rows in tiles:
            qkv = self._qkv(self._norms[0].by(ops, x[rows]))
            queries.append(ops.split(qkv.unflatten(1, (3, self._heads, -1)), rows))
            yield
        for rows, q in zip(tiles, queries, strict=True):
            x[rows] += self._out(ops.attend(q))
            yield
        queries.clear()
        for rows in tiles:
            x[rows] += self._down(ops.gelu(self._up(self._norms[1].by(ops, x[rows]))))
            yield


class _Merger:
    """Patches of a token side by side, to the text's width."""

    def __init__(self, b: Builder, tower: Tower, name: str, modules: tuple[str, str, str], early: bool) -> None:
        """modules: as of `TowerNames`. early: the norm is of patches, not of what they become together."""
        norm, up, down = (name + module for module in modules)
        self._wide = tower.hidden * tower.processor.merge**2
        self._early, self._norm = early, _TowerNorm(b, norm, tower.hidden if early else self._wide, tower.eps)
        self._up: Linear = b.linear([up], [self._wide], self._wide, bias=True)
        self._down: Linear = b.linear([down], [tower.out], self._wide, bias=True)

    def run(self, x: Tensor, tiles: list[slice]) -> Encoding:
        """x [patches, hidden] → [tokens, out]; stops after each tile of rows."""
        parts = list[Tensor]()
        for rows in tiles:
            y = x[rows]
            merged = self._norm(y).view(-1, self._wide) if self._early else self._norm(y.view(-1, self._wide))
            parts.append(self._down(F.gelu(self._up(merged))))
            yield
        return torch.cat(parts)


def _tiles(rows: int, most: int, together: int) -> list[slice]:
    """Tiles of about equal size, each of whole tokens. most, together: rows of a tile, and of a token."""
    tokens = rows // together
    each = -(-tokens // -(-rows // most)) * together
    return [slice(first, min(first + each, rows)) for first in range(0, rows, each)]


def with_stored_tower(model: ModelConfig, checkpoint: TensorNames) -> ModelConfig:
    """The model, without a tower that its config.json has and the files do not."""
    return replace(model, tower=None) if model.tower is not None and names_of(checkpoint) is None else model


def names_of(checkpoint: TensorNames) -> TowerNames | None:
    """Spelling whose first block the checkpoint has; None: it has no tower."""
    matches = (names for names in SPELLINGS if checkpoint.has_matrix(f"{names.prefix}blocks.0.attn.qkv"))
    return next(matches, None)


def tower_of(b: Builder) -> VisionTower | None:
    """Tower of the model; None where no images are read."""
    return None if b.config.vision is None else VisionTower(b, b.config.vision)
