"""Planner costs of a mechanism: memory, time, what it may, and how ranks divide it.

A slice's `cost.py` has a `Cost` of its own; what is here fits a mechanism that needs none of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Generic, NamedTuple, TypeVar

from tandem.mechanisms.slices import has_part, part_of
from tandem.spec.gpu_scratch import StepSize
from tandem.spec.rope import Rope
from tandem.spec.stored import RowTable, StoredFormats

Shape = TypeVar("Shape")


@dataclass(frozen=True, slots=True)
class Limit:
    """Divisibility that tensor parallelism needs: `size` parts, of which `unit` stay together. copied: or each rank has
    one part, which several ranks may share."""

    what: str
    size: int
    unit: int = 1
    copied: bool = False

    def allows(self, ranks: int) -> bool:
        return self.size % (self.unit * ranks) == 0 or (self.copied and ranks % self.size == 0)

    def __str__(self) -> str:
        return self.what if self.unit == 1 else f"{self.what}, which have groups of {self.unit},"


class KeyShape(NamedTuple):
    """Sizes of the keys that an attention's queries look at. window: how many last tokens; 0: all."""

    heads: int
    kv_heads: int
    dim: int
    value_dim: int
    scale: float
    window: int = 0
    sinks: bool = False


class Output(NamedTuple):
    """The module that mixes what a mechanism's heads make, and its inputs."""

    name: str
    inputs: int


class Cost(Generic[Shape]):
    """Planner costs of one mechanism, by the sizes in its `shape`."""

    # What it may.
    needs_kernels = True  # of its own; else it is written in `Ops` alone
    each_row = False  # a GPU computes a row with the same bits whatever rows are beside it
    has_plain_kernels = False  # steps without draft tokens have faster kernels, with other last bits
    warms_up = False  # modules that are not ours take steps of no sequence, which load kernels early
    own_kernels = ""  # why --attention-backend changes nothing; "": there is a choice
    depends_on_others = ""  # why a row's last bits on a CPU depend on the rows beside it; "": they do not

    def __init__(self, shape: Shape) -> None:
        self.shape = shape

    @property
    def keys(self) -> KeyShape | None:
        """Key sizes of an attention; None: the mechanism is no attention."""
        return None

    @property
    def ropes(self) -> tuple[Rope, ...]:
        """Rotary embeddings of its queries and keys."""
        return ()

    @property
    def prompt_graphs(self) -> bool:
        """Whether a prompt's chunk may be a CUDA graph: lengths of sequences do not decide which kernels run."""
        return False

    # -- memory ---

    def scratch_bytes(self, step: StepSize, hidden: int, streams: int) -> int:
        """Bytes of GPU memory that a step takes beside weights and pages. streams: of the residual; 0: there is one."""
        return 0

    def decode_sums_bytes(self, rows: int) -> int:
        """Bytes of partial sums when so many rows decode: one for each part of their keys."""
        return 0

    @property
    def row_bytes(self) -> int:
        """Bytes that a row of a prompt's graph leaves between kernels of attention."""
        return 0

    @property
    def between_bytes(self) -> int:
        """Bytes of a row between the matrices of a feed-forward."""
        return 0

    @property
    def number_params(self) -> int:
        """Weights that are numbers however a checkpoint stores them."""
        return 0

    @property
    def tables(self) -> tuple[RowTable, ...]:
        """That it reads row by row."""
        return ()

    def unread(self, context: int) -> int:
        """Numbers in pages of so many tokens that a token does not read."""
        return 0

    def with_cache(self, dtype: str) -> Shape | None:
        """The same with keys and values in pages as `dtype`; None: its state is another."""
        return None

    # -- time ---

    @property
    def kernels(self) -> int:
        """Kernels of a GPU's decode step in a graph, beyond those of attention with keys and values."""
        return 0

    @property
    def launches(self) -> int:
        """Likewise outside of graphs, in PyTorch's time."""
        return 0

    def flops(self, rows: int, before: int, per_head: bool) -> float:
        """Operations of `rows` causal rows after `before` tokens, beside projections. per_head: as a GPU computes
        prompts."""
        return 0.0

    def prompt_seconds(self, rows: int, gpu_gbps: float) -> float:
        """Seconds of a prompt's rows on a GPU, whatever its peak."""
        return 0.0

    # -- kernels ---

    def why_no_gpu(self) -> str:
        """Why there are no GPU kernels for it, by name; "": there are."""
        if self.needs_kernels and not has_part(self.shape, "gpu"):
            return f"there are no GPU kernels for {self.name}"
        return ""

    @property
    def name(self) -> str:
        """Name in messages."""
        return type(self.shape).__name__

    # -- ranks ---

    @property
    def sums(self) -> int:
        """How often ranks meet in it; 0: each has a copy of all of it."""
        return 1

    def cut(self, ranks: int) -> Shape:
        """Shape of one rank's share among so many ranks."""
        return self.shape

    def limits(self, expert_unit: int, stored: StoredFormats) -> Iterator[Limit]:
        """Divisibility limits of tensor parallelism. expert_unit: weights of an expert's width that stay together as
        stored."""
        return iter(())

    @property
    def output(self) -> Output | None:
        """Whose columns are divided."""
        return None

    # -- links between layers ---

    @property
    def reads_choice(self) -> bool:
        """Whether its rows look at chosen tokens, which layers may share."""
        return False

    @property
    def chosen_by(self) -> int | None:
        """The layer whose choice it takes; None: it makes its own."""
        return None

    def choosing_as(self, layer: int | None) -> Shape:
        """The same with the choice of that layer; None: with its own."""
        return self.shape


@lru_cache(maxsize=4096)
def cost_of(shape: Any) -> Cost[Any]:
    """The cost of a mechanism, of the slice in which its shape is declared."""
    cost: Cost[Any] = part_of(shape, "cost").Cost(shape)
    return cost


def pairs(rows: int, before: int, most: int) -> float:
    """Keys that all rows see: each its own and those before it, `most` at most."""
    growing = max(0, min(rows, most - before))
    return growing * before + growing * (growing + 1) / 2 + (rows - growing) * most
