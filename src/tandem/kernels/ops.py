"""`Ops`: the operations a model is written in.

Three implementations: `reference.TorchOps` (plain torch, the oracle), `cpu_ops.CpuOps` (the C++ core) and
`gpu.ops.GpuOps`. Everything is row-independent: a row's result does not depend on which other rows are in the call,
but for the last bits on AMX and GPUs (docs/design/state.md). Activations `x` are [T, hidden], contiguous, bfloat16 or
float32, and results have the dtype of `x` unless said otherwise. Rounding points are those of Hugging Face
Transformers, so the implementations and the original agree within the last bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from tandem._core import RowNumbers
from tandem.formats.codes import Blocks, Weight, WeightCodes
from tandem.kernels.batch_layout import KernelBatch
from tandem.kernels.images import ImageOps, ImageShape, PatchRotation
from tandem.kernels.ranks.group import Group
from tandem.spec.activation import SILU, Activation


@dataclass(frozen=True, slots=True)
class RopeTables:
    """Rotary tables, float32 [max_positions, rotary_dim / 2]. Elements past rotary_dim are not turned.

    Half-split pairing: element i turns with element i + rotary_dim / 2 (GPT-NeoX, Llama in Transformers).
    """

    cos: Tensor
    sin: Tensor

    @property
    def rotary_dim(self) -> int:
        return 2 * int(self.cos.shape[1])


class HeadNorms(NamedTuple):
    """RMS norms before the rotation: weights [D] over each head (Qwen3, GLM-4.6), or [H * D] of q and [G * D] of k over
    all heads together (OLMoE)."""

    q: Tensor | None = None
    k: Tensor | None = None
    eps: float = 1e-6


NO_NORMS = HeadNorms()


class Routing(NamedTuple):
    """One layer's chosen experts: ids int32 [T, k], weights float32 [T, k]; best first, ties by lowest id. slots int32
    [T, k]: where they lie, as `slot_of` says; None where nobody asked."""

    ids: Tensor
    weights: Tensor
    slots: Tensor | None = None


class ExpertCounts(NamedTuple):
    """Where `Ops.route` counts one layer's choices, E experts; `experts/usage/expert_usage.py` owns it and reads it."""

    tokens: Tensor  # int64 [E], on a GPU int32: += rows that chose the expert
    used: Tensor  # of the same kind: = 1 where a row chose it
    chosen: Tensor | None = None  # int32 [rows at most, k]: a copy of the ids
    rows: Tensor | None = None  # int32 [1] on a GPU: only so many first rows are counted; None: all


class Linear(Protocol):
    """A packed weight matrix [N, K]. `linear(x)` is x @ weight.T + bias, [T, N]."""

    out_features: int
    in_features: int

    def __call__(self, x: Tensor, out_dtype: torch.dtype | None = None, out: Tensor | None = None) -> Tensor:
        """x [T, K] -> [T, N] in `out_dtype` (default: x's), or written to `out`, contiguous, in its dtype."""
        ...


class PerHead(Protocol):
    """A packed matrix [N, K] of each of H heads. `per_head(x)` multiplies every head's row with its own."""

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, H, K] -> [T, H, N]."""
        ...


class ColumnRun(NamedTuple):
    """Columns target … target + width - 1 are columns source, source + step, …"""

    source: int
    target: int
    width: int
    step: int = 1


class ColumnCopy(Protocol):
    """Columns of one array as columns of another. `columns(x, out)`; other columns of `out` stay as they are."""

    def __call__(self, x: Tensor, out: Tensor) -> None:
        """x [T, N], out [T, M], both contiguous and of one dtype."""
        ...


class ExpertBiases(NamedTuple):
    """Biases of all experts of a layer, wherever they live: float32, gate and up [E, rows], down [E, hidden]."""

    gate: Tensor
    up: Tensor
    down: Tensor


class ExpertMatrices(Protocol):
    """The routed experts of one layer: MLPs of equal shape."""

    @property
    def bytes_per_expert(self) -> int: ...

    def set_biases(self, biases: ExpertBiases) -> None:
        """Added to the three products from now on."""
        ...

    def load(self, expert: int, gate: Weight, up: Weight, down: Weight) -> None:
        """Packs one expert: gate and up [width, hidden], down [hidden, width]. The weights are not kept. Without a gate
        the first half of up's rows is called gate and the second up: each [width / 2, hidden].

        Numbers are packed as the layer's fmt, codes as they are. All experts of a layer must have the formats of the
        first one: one for gate and up, one for down.
        """
        ...

    def load_all(self, first: int, experts: Sequence[tuple[Weight, Weight, Weight]]) -> None:
        """`load` for experts first, first + 1, …"""
        ...

    def forward(
        self, x: Tensor, ids: Tensor, weights: Tensor, out: Tensor | None = None, add: bool = False
    ) -> Tensor:
        """sum over k of weights[t, k] * expert[ids[t, k]](x[t]), [T, hidden].

        Ids below 0 or >= num_experts are skipped. Written to `out` if given, added to it with `add`.
        """
        ...


class MLP(Protocol):
    """A dense feed-forward block: down(activation(gate(x), up(x)))."""

    @property
    def packed(self) -> object:
        """Weights whose bytes a packed cache may keep; None: nothing."""
        ...

    def load(self, gate: Weight, up: Weight, down: Weight) -> None:
        """As `ExpertMatrices.load`."""
        ...

    def reads(self) -> list[SureRead]:
        """Weights in the order in which a call reads them."""
        ...

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, hidden] -> [T, hidden]."""
        ...


Lookup = Callable[[Tensor], Tensor]  # ids [T] -> rows [T, columns] of a table


@runtime_checkable
class StoredTable(Protocol):
    """A `Lookup` whose rows can be read as they are stored."""

    @property
    def row_bytes(self) -> int: ...
    @property
    def anywhere(self) -> bool: ...  # `decode` takes rows on any device

    def __call__(self, numbers: Tensor) -> Tensor:
        """As a `Lookup`."""
        ...

    def read(self, numbers: Tensor, rows: Tensor) -> None:
        """Rows of these numbers, int64 [n], to uint8 [n * row_bytes]. Raises CheckpointError where one cannot be
        read."""
        ...

    def read_step(
        self, numbers: RowNumbers, ids: Tensor, positions: Tensor, slots: Tensor, starts: Tensor, out: Tensor
    ) -> int:
        """Rows that a step's tokens name, one token's behind the other's, to the first bytes of `out`; of how many
        tokens. Raises likewise."""
        ...

    def read_ahead(self, numbers: Tensor) -> None:
        """Rows of these numbers will be read soon: what is not in memory is fetched meanwhile."""
        ...

    def decode(self, rows: Tensor) -> Tensor:
        """uint8 [n, row_bytes] -> numbers [n, columns], of the stored type or float32."""
        ...


Step = Callable[[Tensor, Any], Tensor]  # of an input and its batch


class Recorded(Protocol):
    """A step of a fixed number of rows, remembered by `Ops.record`."""

    def __call__(self, x: Tensor, batch: KernelBatch) -> Tensor:
        """The same operations on other values of the same shapes. The result is valid until the next call."""
        ...


class SureRead(NamedTuple):
    """Weights that every step reads: a whole matrix, or the last `experts` experts of a layer (shared ones)."""

    weights: Linear | ExpertMatrices
    experts: int = 0


class Addend(NamedTuple):
    """A shared expert's result x [T, n], and its gate, if it has one, as `Ops.gated` takes them."""

    x: Tensor
    gate: Tensor | None

    def of(self, rows: Tensor) -> Addend:
        return Addend(self.x[rows], None if self.gate is None else self.gate[rows])


class Ops(Protocol):
    """The operations a model is written in. Shapes: T rows, H = heads, G = kv_heads, D = head_dim."""

    fuse_shared_add: bool  # a norm adds what is beside its rows in the same kernel
    group: Group | None  # of ranks that share the model; None: this one has all of it

    def resident(self, tensor: Tensor) -> Tensor:
        """The tensor where the operations read it: the GPU's memory, or as it is."""
        ...

    def lookup(self, find: Lookup, rows: int, in_ram: bool = False) -> Lookup:
        """`find` for ids where the operations are. A mapped file's rows stay as they are; others are all in GPU memory,
        or with `in_ram` in pinned CPU memory that the GPU reads."""
        ...

    def reads(self, weight: WeightCodes) -> bool:
        """Whether there are kernels for such codes in `linear` and `mlp`; others become numbers there."""
        ...

    def linear(self, weight: Weight | Blocks, bias: Tensor | None = None, fmt: str = "bf16") -> Linear:
        """Packs weight [N, K] once: numbers as "bf16" | "f32" | "int8" | "int4", codes as they are. It is not kept."""
        ...

    def experts(
        self, num_experts: int, hidden: int, width: int, fmt: str = "bf16", activation: Activation = SILU
    ) -> ExpertMatrices:
        """An empty expert layer; fill it with `load`."""
        ...

    def mlp(self, hidden: int, width: int, fmt: str = "bf16", activation: Activation = SILU) -> MLP:
        """An empty dense MLP; fill it with `load`."""
        ...

    def read_in_order(self, reads: Sequence[SureRead]) -> None:
        """Tells in which order a step reads weights, so that the next ones are fetched while nothing else is."""
        ...

    def record(self, step: Step, x: Tensor, batch: KernelBatch) -> tuple[Tensor, Recorded | None]:
        """Calls step(x, batch), which may change x, and remembers what it did, to do it again without Python.

        None where that cannot be: the step used an operation that is not of this class.
        """
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Norm in float32, rounded to x's dtype, times weight. A weight in float32 multiplies before the rounding."""
        ...

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, addend: Addend | None = None
    ) -> Tensor:
        """residual += x in place (rounded to its dtype), then `rms_norm` of it. addend: is added to x before, as
        `gated` does, by those that `join_late`."""
        ...

    def rope_store(
        self,
        qkv: Tensor,
        rope: RopeTables,
        batch: KernelBatch,
        k_pages: Tensor,
        v_pages: Tensor,
        heads: int,
        norms: HeadNorms = NO_NORMS,
    ) -> Tensor:
        """Per-head norm, rotation and the cache write of one layer, in one pass.

        qkv is [T, (H + 2G) * D]: all q heads, then k, then v; or [T, (2H + 2G) * D]: each q head is followed by a
        gate, which is left out. H is `heads`; the pages say G and D. K and V of row t go to row
        batch.cache_slots[t] of k_pages and v_pages ([num_pages, page_size, G, D]). Values may be narrower: v_pages
        [num_pages, page_size, G, E], and qkv likewise. Where v_pages is k_pages, keys are values, too: qkv is
        [T, (H + G) * D], without v. Returns q [T, H, D]. In bfloat16 the tables are rounded to bfloat16 first and
        each product and the sum are rounded, as Transformers does.
        """
        ...

    def attention(
        self,
        q: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        batch: KernelBatch,
        scale: float,
        window: int = 0,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Causal attention over the pages of each row's own sequence; softmax in float32. v_pages may be k_pages.

        q [T, H, D] -> [T, H * D], or [T, H * E] of values of E channels. Query head h reads kv head h // (H / G).
        `window` > 0: only the last `window` keys, the row's own included. sinks float32 [H]: a score of each head
        that counts in the softmax
        and has no value. A row's result depends neither on the batch nor on how its
        prompt was chunked.
        """
        ...

    def gated(self, x: Tensor, gate: Tensor | None, out: Tensor | None = None) -> Tensor:
        """x [T, n] times sigmoid(gate), gate [T, 1], [T, H, 1] or [T, H, n / H], which need not be contiguous; the
        sigmoid and the product are rounded. None: x as it is. Added to `out` [T, n] if given, and returned."""
        ...

    def bound(self, shape: object, *weights: object) -> Any:
        """Mechanism for this machine, bound to its weights: from the file `torch`, `cpu` or `gpu` in the folder of
        its shape. Raises KernelError by name where it has none for this machine."""
        ...

    def image_ops(self, shape: ImageShape, dtype: torch.dtype, turns: PatchRotation) -> ImageOps:
        """Operations of an image of this shape, with memory of its own."""
        ...
