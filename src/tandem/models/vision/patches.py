"""Patches of an image: their numbers, their order, and where they turn."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tandem.kernels.images import PatchRotation
from tandem.spec.vision import Processor, Tower

THETA = 10000.0


def patches_of(pixels: Tensor, p: Processor) -> Tensor:
    """uint8 [height, width, 3] → uint8 [patches, 3, patch, patch], those of a token side by side."""
    down, across = pixels.shape[0] // p.side, pixels.shape[1] // p.side
    cut = pixels.view(down, p.merge, p.patch, across, p.merge, p.patch, 3).permute(0, 3, 1, 4, 6, 2, 5)
    return cut.reshape(-1, 3, p.patch, p.patch)


class PixelNorm(NamedTuple):
    """Mean and deviation of channels, each float32 [3, 1, 1]. They are made once: a copy to a GPU waits for it."""

    mean: Tensor
    std: Tensor
    temporal: int

    @classmethod
    def of(cls, p: Processor, device: torch.device) -> PixelNorm:
        mean, std = (torch.tensor(each, device=device)[:, None, None] for each in (p.mean, p.std))
        return cls(mean, std, p.temporal)

    def __call__(self, patches: Tensor) -> Tensor:
        """uint8 [n, 3, patch, patch] → float32 [n, 3 * temporal * patch * patch]: all frames are alike."""
        frame = (patches.float() / 255 - self.mean) / self.std
        return frame[:, :, None].expand(-1, -1, self.temporal, -1, -1).reshape(len(patches), -1)


def order_of(down: int, across: int, merge: int) -> Tensor:
    """int64 [patches, 2]: row and column of each, those of a token side by side."""
    grid = torch.cartesian_prod(torch.arange(down), torch.arange(across))
    blocks = grid.view(down // merge, merge, across // merge, merge, 2)
    return blocks.permute(0, 2, 1, 3, 4).reshape(-1, 2)


def positions_of(learned: Tensor, down: int, across: int) -> Tensor:
    """Learned positions [side, side, hidden] spread over an image, bilinear between corners: [down, across, hidden]."""
    rows, columns = (_between(learned.shape[0], count, learned.device) for count in (down, across))
    upper, lower = (_mixed(learned[each], columns) for each in rows[:2])
    share = rows[2][:, None, None]
    return upper * (1 - share) + lower * share


def _mixed(rows: Tensor, columns: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    left, right, share = columns
    return rows[:, left] * (1 - share[:, None]) + rows[:, right] * share[:, None]


def _between(side: int, count: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Neighbours of each of `count` places from the first to the last of `side`, and the share of the second."""
    places = torch.linspace(0, side - 1, count)
    first = places.long()
    return first.to(device), (first + 1).clamp(max=side - 1).to(device), (places - first).to(device)


def turns_of(order: Tensor, tower: Tower) -> PatchRotation:
    """The first half of a head's pairs turns by the row, the other by the column. Computed where `order` is."""
    quarter = tower.hidden // tower.heads // 4
    speeds = 1.0 / THETA ** (torch.arange(quarter, dtype=torch.float32) / quarter)
    angles = (order[:, :, None].float() * speeds.to(order.device)).flatten(1).repeat(1, 2)
    return PatchRotation(angles.cos(), angles.sin())

