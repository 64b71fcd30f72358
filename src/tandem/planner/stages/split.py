"""`split`: neighbouring layers for each of several GPUs, by memory and by speed."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

SPEED_STEPS = 1 << 20  # of which the fastest GPU takes one for a byte: sums of whole numbers have no last bits


def fits(weights: Sequence[int], rooms: Sequence[int]) -> bool:
    """Whether every GPU has room for some layers, at least one, and all layers for a GPU. weights: bytes of each layer;
    rooms: bytes of each GPU, in the order of their stages."""
    first = 0
    for number, room in enumerate(rooms):
        last = len(weights) - (len(rooms) - number - 1)  # the others have one at least
        nbytes = end = 0
        for end in range(first, last):
            if nbytes + weights[end] > room:
                break
            nbytes += weights[end]
        else:
            end = last
        if end == first:
            return False
        first = end
    return first == len(weights)


def split(weights: Sequence[int], rooms: Sequence[int], speeds: Sequence[float]) -> tuple[int, ...] | None:
    """Borders of the split whose layers are read in the least time: the fastest GPU has as many as it has room for.
    Of several such, the GPUs are filled evenly. speeds: of each GPU's memory. None: nothing fits.

    Stage k has layers border k to border k + 1; the first border is 0, the last one the number of layers.
    """
    costs = [round(SPEED_STEPS * max(speeds) / speed) for speed in speeds]
    sums = [0, *accumulate(weights)]
    # By the end of the layers so far: their time, the fullest GPU, and the borders.
    best: dict[int, tuple[int, float, tuple[int, ...]]] = {0: (0, 0.0, (0,))}
    for number, room in enumerate(rooms):
        left = len(rooms) - number - 1
        ends = range(number + 1, len(weights) - left + 1) if left else [len(weights)]
        best = {end: min(ways) for end in ends if (ways := list(_ways(best, sums, end, room, costs[number])))}
    return best[len(weights)][2] if best else None


def _ways(
    before: dict[int, tuple[int, float, tuple[int, ...]]], sums: Sequence[int], end: int, room: int, cost: int
) -> list[tuple[int, float, tuple[int, ...]]]:
    """Ways in which a GPU ends with layer `end` - 1."""
    ways = []
    for first, (seconds, fullest, borders) in before.items():
        nbytes = sums[end] - sums[first]
        if first < end and nbytes <= room:
            ways.append((seconds + cost * nbytes, max(fullest, nbytes / room), (*borders, end)))
    return ways


def shares(borders: Sequence[int], weights: Sequence[int]) -> list[int]:
    """Bytes of each stage's layers."""
    return [sum(weights[first:end]) for first, end in pairwise(borders)]
