"""`rank_gpus`: which GPUs ranks are on: equal ones, in the user's order, or those that work best together."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

from tandem.flags.env import ranks_share_gpus, visible_gpus
from tandem.machine.gpus import Gpu, is_free, is_new_enough, kinds_of
from tandem.machine.links import GpuLinks
from tandem.machine.machine import Machine
from tandem.planner.forecast.speeds import gpu_speed


def rank_gpus(machine: Machine, ranks: int) -> tuple[Gpu, ...]:
    """The GPU of each rank, new enough. Fewer, or unequal ones, where there are not so many equal ones.

    CUDA_VISIBLE_DEVICES says an order: then the first equal ones of it. Else those of which others use least; of these
    the largest, then the fastest, then the nearest to each other; in the order of their numbers.
    """
    gpus = tuple(filter(is_new_enough, machine.gpus))
    listed = visible_gpus() is not None
    if not listed:
        gpus = tuple(sorted(gpus, key=lambda gpu: gpu.number))
    if gpus and ranks_share_gpus():
        return tuple(gpus[rank % len(gpus)] for rank in range(ranks))
    kinds = [kind for kind in kinds_of(gpus) if len(kind) >= ranks]
    if not kinds:
        return gpus[:ranks]
    return kinds[0][:ranks] if listed else _best(kinds, ranks, machine.links)


def _best(kinds: Sequence[Sequence[Gpu]], ranks: int, links: GpuLinks) -> tuple[Gpu, ...]:
    groups = [_near(kind, first, ranks, links) for kind in kinds for first in range(len(kind))]
    return min(groups, key=lambda group: _cost(group, links))


def _near(kind: Sequence[Gpu], first: int, ranks: int, links: GpuLinks) -> tuple[Gpu, ...]:
    """The first one, and the others one by one: that which is nearest to all that were taken before."""
    group, left = [kind[first]], [*kind[:first], *kind[first + 1 :]]
    while len(group) < ranks:

        def cost(place: int) -> tuple[bool, int, int]:
            gpu = left[place]
            return not is_free(gpu), max(links.hops(gpu.number, each.number) for each in group), place

        group.append(left.pop(min(range(len(left)), key=cost)))
    return tuple(sorted(group, key=lambda gpu: gpu.number))


def _cost(group: Sequence[Gpu], links: GpuLinks) -> tuple[float, ...]:
    """Compared number by number; the least is best."""
    hops = [links.hops(one.number, other.number) for one, other in combinations(group, 2)]
    taken = sum(not is_free(gpu) for gpu in group)
    room = min(gpu.room for gpu in group) if taken else 0
    speed = gpu_speed(group[0].name)
    return taken, -room, -group[0].memory_bytes, -speed, max(hops, default=0), sum(hops), *(gpu.number for gpu in group)
