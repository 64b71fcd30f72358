"""`Host`: what an engine that asks for experts says of itself."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from tandem.spec.shard import ALONE, RankShard

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Host:
    """shard: which part of every expert's width this process adds; the engine sums the parts. device: where batches
    lie; most_rows: of one; graph_rows: of one that may be recorded in a CUDA graph. cpus: logical CPUs that may
    compute, None: those of the calling thread; own_cpus: no other rank has them. loads: decoder layers that will be
    asked for, None: every layer with experts. skipped: so many experts, the first of each, are the engine's own.
    made_up: there are no weights, and none are read."""

    shard: RankShard = ALONE
    device: torch.device = field(default=CPU)
    most_rows: int = 8192
    graph_rows: int = 0
    cpus: frozenset[int] | None = None
    own_cpus: bool = False
    loads: frozenset[int] | None = None
    skipped: int = 0
    made_up: bool = False
    patience_seconds: float = 30.0
