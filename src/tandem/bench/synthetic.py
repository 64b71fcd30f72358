"""Models of a named architecture at full size with made-up weights, for measurements: what is computed means nothing,
which bytes are read is as in the real one. Every expert of a layer has the same random weights, at an address of its
own, so that filling memory takes a copy and not a quantisation.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any, cast
from zlib import crc32

import torch
from torch import Tensor

from tandem.bench.formats import as_stored
from tandem.bench.stored import FORMATS
from tandem.checkpoint.parts import is_expert
from tandem.experts import ExpertMatrices, RoutedExperts
from tandem.experts.feed import LayerFeed
from tandem.experts.handoff import Handoff
from tandem.experts.hybrid_experts import HybridExperts, HybridTicket
from tandem.experts.hybrid_store import HybridStore
from tandem.experts.residency import Location, experts_on
from tandem.formats.codes import Weight, WeightCodes
from tandem.formats.cut import stacked
from tandem.formats.quant_format import QuantFormat
from tandem.kernels.cpu import PackedExperts
from tandem.kernels.gpu.experts import GpuExperts
from tandem.kernels.ops import ExpertBiases, Lookup, Routing, SureRead
from tandem.kernels.packed.cache import KeptLayer
from tandem.spec.activation import SILU, Activation
from tandem.spec.shard import ALL

POOL_WEIGHTS = 1 << 26
CODED_ROWS = 1024, 512, 256, 128  # multiples of all blocks of scales
NUMBERS = "weights_proj", "in_proj_ba", "in_proj_b", "in_proj_a"  # whatever else is stored as codes
WEIGHT_SIZE = 0.02  # standard deviation, as models are initialised
HASH_ROWS = 47
HASHES = {
    "layer_multipliers": (0x9E3779B1, 2), "ngram_heads_vocab_sizes": (HASH_ROWS, 0),
    "ngram_heads_offsets": (0, HASH_ROWS),
}  # fmt: skip
"""Hashes of n-grams: the first, and what each has more than the one before. They name rows of any table."""

FAR = 400.0
"""Times as large as others embedded tokens are, where many tokens must choose different experts. What made-up layers
add is alike for all tokens. Beside small embeddings it soon decides: all tokens of a prompt choose among 30 of 128
experts from the third layer on."""


class SyntheticCheckpoint:
    """Answers for every tensor with random numbers, views of one pool where they fit. dense, experts: of
    `stored.FORMATS`; all projections of one shape have the same codes, and all experts'."""

    def __init__(self, dense: str = "bf16", experts: str = "bf16", embedded: float = 1.0) -> None:
        """embedded: times as large embedded tokens are."""
        self._dense, self._experts, self._embedded = dense, experts, embedded
        self._codes = dict[tuple[int, int, str], Weight]()
        generator = torch.Generator().manual_seed(0)
        self._pool = (torch.randn(POOL_WEIGHTS, generator=generator) * WEIGHT_SIZE).to(torch.bfloat16)
        self.path = Path("synthetic")

    def has_matrix(self, module: str) -> bool:
        """Experts lie one by one: names without an expert's number are of tensors that hold all of them."""
        return "gate_up_proj" not in module and re.search(r"\.experts\.[a-z]|\.moe\.[a-z]", module) is None

    def __contains__(self, name: str) -> bool:
        """Who asks for weights of streams is a draft layer that must have none of its own."""
        return self.has_matrix(name) and not name.endswith("_hc.fn")

    def get(self, name: str, shape: tuple[int, ...], *, whole: bool = False) -> Tensor:
        if whole and (hashes := HASHES.get(name.rpartition(".")[2])) is not None:
            return hashes[0] + hashes[1] * torch.arange(math.prod(shape))
        if whole:  # a token's row names as many different experts
            return torch.arange(math.prod(shape)).remainder(8 * shape[-1]).view(shape)
        size, first = math.prod(shape), crc32(name.encode()) % 4096 * 64  # the same on all ranks
        if "norm" in name:
            return torch.ones(shape, dtype=torch.bfloat16)
        room = POOL_WEIGHTS - 4096 * 64
        numbers = self._pool[first : first + min(size, room)]
        return (numbers if size <= room else numbers.repeat(-(-size // room))[:size]).view(shape)

    def weight(self, module: str, shape: tuple[int, int], rows: slice = ALL, columns: slice = ALL) -> Weight:
        own = len(range(*rows.indices(shape[0]))), len(range(*columns.indices(shape[1])))
        numbers, shape = self.get(module + ".weight", own), own
        name = self._stored(module)
        if name == "bf16":
            return numbers
        if (*shape, name) not in self._codes:
            self._codes[*shape, name] = _repeated(numbers, name)
        return self._codes[*shape, name]

    def _stored(self, module: str) -> str:
        name = self._experts if is_expert(module) else self._dense
        return name if _is_projection(module.rpartition(".")[2]) else "bf16"

    def format(self, module: str) -> QuantFormat:
        return FORMATS[self._stored(module)]

    def lookup(self, name: str, shape: tuple[int, int]) -> Lookup:
        table = self.get(name, shape)
        return lambda ids: table.index_select(0, ids) * self._embedded

    def table(self, module: str, shape: tuple[int, int], where: str = "map", progress: object = None) -> Lookup:
        """Rows of the pool, again and again: finding them costs less than in a table that caches cannot hold."""
        rows = self._pool[: len(self._pool) // shape[1] * shape[1]].view(-1, shape[1])
        return lambda numbers: rows.index_select(0, numbers % len(rows))

    def nbytes(self) -> int:
        return 0

    def read_ahead(self, layer: int) -> None: ...

    def forget(self, layer: int, experts: bool | None = None) -> None: ...

    def release(self, experts: bool | None = None) -> None: ...


def _repeated(numbers: Tensor, name: str) -> Weight:
    """Codes of the first rows, again and again: which numbers they are means nothing, and making codes takes long."""
    rows = len(numbers)
    first = next((count for count in CODED_ROWS if rows % count == 0), rows)
    whole = stacked([as_stored(numbers[:first].float(), name)] * (rows // first))
    assert isinstance(whole, WeightCodes) and whole.codes.shape[0] == rows
    return whole


def _is_projection(name: str) -> bool:
    """As published checkpoints store codes; gates of indexers and of delta nets are small and stay numbers."""
    return name in ("wq_b", "wk") or ("_proj" in name and name not in NUMBERS)


class SyntheticExperts(HybridExperts):
    """One expert is packed; the others are copies of its bytes."""

    def load(self, feed: LayerFeed, cache: KeptLayer | None = None) -> None:
        if self._cpu is not None:
            self._fill_cpu(self._cpu, feed(0))
        if self._gpu is not None:
            self._fill_gpu(self._gpu, feed(0))

    def _fill_cpu(self, layer: PackedExperts, matrices: ExpertMatrices) -> None:
        experts = experts_on(Location.CPU, self._slot_of)
        layer.load(experts[0], *matrices)
        packed = layer.packed(experts[0])
        for expert in experts[1:]:
            layer.load_packed(expert, packed)

    def _fill_gpu(self, layer: GpuExperts, matrices: ExpertMatrices) -> None:
        layer.load(int((layer.slot_of == 0).nonzero()[0]), *matrices)
        layer.all_loaded()
        layer.pool.view(layer.slots, -1)[1:] = layer.slot(0)


class ReplayedExperts(SyntheticExperts):
    """Routed as a trace says, whatever the router chooses; its weights are kept."""

    chosen: Tensor  # int32 [tokens, k] on the device, filled before every step

    def takes_predictions(self, rows: int) -> bool:
        """Nobody asks the router."""
        return False

    def submit(self, x: Tensor, routing: Routing) -> HybridTicket:
        shared = routing.ids[:, self.chosen.shape[1] :]
        ids = torch.cat((self.chosen[: len(x)], shared), 1)
        return super().submit(x, Routing(ids, routing.weights))


class ReplayedAnywhere(ReplayedExperts):
    """CPU memory has all experts, so that any of them may be said to be on the GPU."""

    def _fill_cpu(self, layer: PackedExperts, matrices: ExpertMatrices) -> None:
        layer.load(0, *matrices)
        packed = layer.packed(0)
        for expert in range(1, layer.num_experts):
            layer.load_packed(expert, packed)


class NoExperts:
    """A store without experts: what a step costs without its routed experts."""

    expert_bytes = 0
    slot_of = None

    def load(self, feed: LayerFeed, cache: KeptLayer | None = None) -> None: ...

    def set_biases(self, biases: ExpertBiases) -> None: ...

    def sure_read(self, experts: int) -> SureRead:
        return SureRead(cast(Any, self), experts)

    def takes_predictions(self, rows: int) -> bool:
        return False

    def prefetch(self, routing: Routing) -> None: ...

    def submit(self, x: Tensor, routing: Routing) -> Tensor:
        return x

    def wait(self, ticket: Tensor) -> Tensor:
        return ticket


class SyntheticStore:
    """As `HybridStore`, filled with copies.

    empty: no routed experts at all. chosen int32 [MoE layers, tokens, k]: what experts compute instead of the router's
    choice. whole: with `chosen`, every expert is in CPU memory, whether it is on the GPU or not.
    """

    def __init__(
        self,
        store: HybridStore,
        handoff: Handoff,
        empty: bool = False,
        chosen: Tensor | None = None,
        whole: bool = False,
    ) -> None:
        self._store, self._handoff, self._empty, self._chosen = store, handoff, empty, chosen
        self._whole = whole

    def layer(self, index: int, count: int, width: int, fmt: str, activation: Activation = SILU) -> RoutedExperts:
        if self._empty:
            return NoExperts()
        if self._chosen is None:
            return self._store.layer(index, count, width, fmt, activation, SyntheticExperts)
        kind, cpu_slots = (ReplayedAnywhere, count) if self._whole else (ReplayedExperts, 0)
        experts = self._store.layer(index, count, width, fmt, activation, kind, cpu_slots)
        assert isinstance(experts, ReplayedExperts)
        experts.chosen = self._chosen[index]
        return experts
