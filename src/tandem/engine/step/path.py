"""The path of a step: how an executor computes it. One enum and one function decide; `kt bench decode --explain` and
`kt bench prefill --explain` print it, and a GPU's executor logs it at debug. Twin of kernels/which.py, for steps.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from enum import Enum
from typing import Generic, Protocol, TypeVar

_log = logging.getLogger(__name__)

S = TypeVar("S", contravariant=True)  # a step's batch, or its sizes
G = TypeVar("G", covariant=True)  # a decode graph, or its rows
P = TypeVar("P", covariant=True)  # a prefill graph, or its rows


_SEES = "pieces of images: no graph has a place for what was seen in them"


class Path(Enum):
    """How a step, or a prefill in the background of steps, is computed."""

    CPU = "cpu"
    DECODE_GRAPH = "decode graph"
    SHARED_PREFILL_GRAPH = "shared prefill graph"
    PREFILL_GRAPH = "prefill graph"
    EAGER = "eager"
    EAGER_SHRINKING = "eager, may shrink"
    PIPELINED = "pipelined over stages"
    BACKGROUND_GRAPH = "background prefill graph"
    BACKGROUND = "background prefill, eager"


class Facts(Protocol[S, G, P]):
    """Captured graphs of an executor. A method returns None where a step fits no graph of its kind."""

    def sees(self, step: S) -> bool:
        """Whether rows of it are pieces of images."""
        ...

    def decode_graph(self, step: S) -> G | None:
        """Decode graph of at least as many rows as the step has, each of which decodes."""
        ...

    def shared_graph(self, step: S) -> P | None:
        """Graph of a prefill whose experts CPU and bus share, if that is best for so many rows."""
        ...

    def prefill_graph(self, step: S) -> P | None:
        """Graph of a prefill that the GPU computes alone, while no other step runs."""
        ...

    def background_graph(self, step: S) -> P | None:
        """Graph of a prefill that the GPU computes alone, while decode graphs are replayed."""
        ...


@dataclass(frozen=True, slots=True)
class Choice(Generic[G, P]):
    """decode, prefill: the graph of a path that replays one."""

    path: Path
    why: str
    decode: G | None = None
    prefill: P | None = None

    def log(self, rows: int) -> None:
        """At debug: of a step with so many rows."""
        _log.debug("%d rows: %s (%s)", rows, self.path.value, self.why)


def path_of(step: S, facts: Facts[S, G, P] | None, *, shrinks: bool = False) -> Choice[G, P]:
    """The path of a step that all its sequences wait for. facts: None where no GPU computes. shrinks: it is one long
    prefill chunk, and ends sooner when a request arrives."""
    if facts is None:
        return Choice(Path.CPU, "no GPU: layer by layer on the worker pool")
    if shrinks:
        why = "one long chunk: no graph can lose rows between two layers"
        return Choice(Path.EAGER_SHRINKING, why)
    if facts.sees(step):
        return Choice(Path.EAGER, _SEES)
    if (decode := facts.decode_graph(step)) is not None:
        return Choice(Path.DECODE_GRAPH, "every row decodes, and a graph has as many", decode)
    if (prefill := facts.shared_graph(step)) is not None:
        why = "experts in CPU memory: CPU and bus share them in so many rows"
        return Choice(Path.SHARED_PREFILL_GRAPH, why, prefill=prefill)
    if (prefill := facts.prefill_graph(step)) is not None:
        return Choice(Path.PREFILL_GRAPH, "a chunk that a graph has room for", prefill=prefill)
    return Choice(Path.EAGER, "no graph fits these rows, or kernel by kernel is sooner")


def stages_path_of(rows: int, most: int) -> Choice[G, P] | None:
    """The path of a step that only stages have. most: rows of a chunk. None: it is that of any other step."""
    if rows <= most:
        return None
    return Choice(Path.PIPELINED, "several chunks of one prompt: each stage computes another one")


def background_path_of(step: S, facts: Facts[S, G, P]) -> Choice[G, P]:
    """The path of a prefill beside which decode graphs are replayed, if the GPU computes it alone."""
    if facts.sees(step):
        return Choice(Path.BACKGROUND, _SEES)
    if (prefill := facts.background_graph(step)) is not None:
        return Choice(Path.BACKGROUND_GRAPH, "a chunk that a graph has room for, on the GPU alone", prefill=prefill)
    return Choice(Path.BACKGROUND, "no graph fits these rows: layer by layer")


def background_with_cpu() -> Choice[G, P]:
    """Instead, where some of its experts are neither on the GPU nor on their way there. An executor knows that once it
    has prepared the prefill."""
    return Choice(Path.BACKGROUND, "the CPU has a part in its experts, for which no graph waits: layer by layer")
