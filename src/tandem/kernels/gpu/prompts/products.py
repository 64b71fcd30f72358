"""`PromptExperts`: a layer's experts with many rows each, multiplied on the tensor cores. Up to some two hundred rows
codes are decoded in registers (`code_product.py`; on Hopper twice as many, `wgmma_product.py`). From there on panels
become bfloat16 in scratch, some experts at a time, for a grouped product: PyTorch's on Hopper and Blackwell servers,
ours elsewhere.

Nothing is asked back from the GPU: who has how many rows is known there only. Scratch is bounded
(`spec/gpu_scratch.py`).
Scaled weights, gate, up and each expert's result are rounded to bfloat16 once more than with few rows, biases aside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from tandem.kernels.gpu.expert_rows import ExpertActivation
from tandem.kernels.gpu.mma.mma_source import has_plain_steps
from tandem.kernels.gpu.panels import Panels
from tandem.kernels.gpu.prompts import code_product, grouped, rows, wgmma_product
from tandem.kernels.gpu.prompts.order import Order, order
from tandem.kernels.gpu.prompts.unpack import Packed, unpack
from tandem.kernels.ops import Routing
from tandem.kernels.which import by_warpgroups, from_codes
from tandem.planner.cuda_graphs import PROMPT_SIZES
from tandem.spec.activation import SILU
from tandem.spec.gpu_scratch import expert_row_bytes, experts_at_once, pair_bytes, unpacked_bytes

ALIGNED = 8  # numbers: grouped products read rows 16 bytes at a time
ALIGNED_TOKENS = 64
MANY_ROWS, MANY_PAIRS = 160, 1 << 15  # of an expert, on average, and of all: PyTorch's product is the faster one
SHORT = PROMPT_SIZES[-1]  # tokens. Steps may run beside such a chunk, and PyTorch's product holds the GPU for long
PYTORCHS = (9, 10)  # major compute capabilities on which PyTorch's grouped product asks nothing back
grouped_product: Any = getattr(torch, "_grouped_mm", None)  # private: where a PyTorch has none, ours goes on


def _at_once() -> None:
    """Where nobody waits."""


@dataclass(frozen=True, slots=True)
class ExpertGroup:
    """Experts that are computed at once, those of the next `count` keys. arrive: called before anything reads them,
    read: as soon as they are in scratch."""

    packed: Packed
    count: int
    arrive: Callable[[], None] = _at_once
    read: Callable[[], None] = _at_once


@lru_cache(maxsize=8)
def has_pytorchs(device: torch.device) -> bool:
    """Elsewhere it loops over experts, after waiting for their numbers of rows. On a CPU (Triton's interpreter) nobody
    minds."""
    if grouped_product is None:
        return False
    return device.type == "cpu" or torch.cuda.get_device_capability(device)[0] in PYTORCHS


@lru_cache(maxsize=8)
def _memory(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0


def _row_bytes(device: torch.device) -> int:
    return expert_row_bytes(_memory(device))


class UnpackScratch:
    """Memory into which experts are unpacked, one part after the other, bfloat16. All of an engine's layers of a shape
    share it, and keep it: CUDA graphs know where it is. Another engine of the process would unpack over it, between
    two kernels of this one."""

    def __init__(self) -> None:
        self._scratches: WeakValueDictionary[tuple[torch.device, int], Tensor] = WeakValueDictionary()

    def of(self, device: torch.device, nbytes: int) -> Tensor:
        scratch = self._scratches.get((device, nbytes))
        if scratch is None:
            with torch.inference_mode(False):
                scratch = torch.empty(nbytes // 2, dtype=torch.bfloat16, device=device)
            self._scratches[device, nbytes] = scratch
        return scratch


def ran_by_warpgroups(between: ExpertActivation) -> bool:
    """True where products of whole warpgroups have ended in such an activation on a GPU, as the reference does. Others,
    and biases, are compiled and have not run: `tests/gpu/test_gpu_prompts.py` runs them on a Hopper GPU."""
    return between.gate_up is None and between.activation == SILU


def parts_of(pool: Tensor, stride: int, experts: int, at_once: int) -> list[ExpertGroup]:
    """Slots 0 ... experts - 1 of `pool`, in parts of nearly equal size."""
    each = -(-experts // max(1, -(-experts // at_once)))
    return [
        ExpertGroup(Packed(pool, stride, first), min(each, experts - first)) for first in range(0, experts, each)
    ]


class PromptExperts:
    """Products of experts of one shape and format; each call names the experts. codes: few rows need no unpacking;
    plain: nor are these codes, but bfloat16; wgmma: whole warpgroups multiply either."""

    def __init__(
        self, gate_up: Panels, down: Panels, between: ExpertActivation, device: torch.device, experts: int
    ) -> None:
        """experts: of the layer, here or elsewhere, among which rows are divided."""
        self._gate_up, self._down, self.between = gate_up, down, between
        self._experts = experts
        self.codes = all(code_product.reads(panels, device) for panels in (gate_up, down))
        self.plain = any(map(has_plain_steps, (gate_up, down)))
        self._wgmma = all(wgmma_product.reads(panels, device) for panels in (gate_up, down))
        self.hidden, self.width = gate_up.depth, between.width
        self.at_once = experts_at_once(_memory(device), experts, self.hidden, self.width)
        self.scratch = UnpackScratch()  # whoever makes several layers gives them the same one
        self._scratch: Tensor | None = None

    @property
    def wgmma(self) -> bool:
        """True where whole warpgroups multiply such experts, and end in their activation."""
        return self._wgmma and ran_by_warpgroups(self.between)

    @property
    def ways(self) -> tuple[bool, bool, bool]:
        """codes, plain and wgmma, as `Reads` has them."""
        return self.codes, self.plain, self.wgmma

    @staticmethod
    def reads(matrices: tuple[Panels, Panels], between: ExpertActivation) -> bool:
        """Whether such experts are multiplied: of aligned sizes."""
        return matrices[0].depth % ALIGNED == 0 and between.width % ALIGNED == 0

    def __call__(self, x: Tensor, keys: Tensor, routing: Routing, parts: Sequence[ExpertGroup]) -> Tensor:
        """The sum over each token's experts, float32 [T, hidden]. x bfloat16 [T, hidden]; keys int32 [T, k]: expert n
        of all parts together has key n; pairs with keys below 0 are left out. routing [T, k]: weights; and ids, where
        there are biases."""
        sums = torch.empty_like(x, dtype=torch.float32)
        pieces = list(self._pieces(x.contiguous(), keys, routing, sums))
        sizes = [part.count for part in parts]
        counts = torch.zeros((len(pieces), sum(sizes)), dtype=torch.int32, device=x.device)
        orders = [order(piece[1], counts[i], sizes) for i, piece in enumerate(pieces)]
        pairs, first = keys.numel(), 0
        unpacks = not (self.codes and from_codes(pairs, self._experts, self.plain, self.wgmma))
        wgmma = self.wgmma and by_warpgroups(pairs, self._experts)  # all pieces: the last one's kernel would come late
        for part in parts:
            key_range = range(first, first + part.count)
            part.arrive()
            matrices = self._unpacked(part, counts, first) if unpacks else None
            if unpacks:
                part.read()
            for (own, _, *chosen, out), each in zip(pieces, orders, strict=True):
                piece_routing = Routing(*chosen)
                result = self._products(own, each, piece_routing, key_range, matrices or part.packed, wgmma)
                rows.add(result, each, piece_routing, self.between.down, out, key_range, new=first == 0)
                del result  # its memory is the next products'
            if not unpacks:
                part.read()
            first = key_range.stop
        return sums

    def _pieces(
        self, x: Tensor, keys: Tensor, routing: Routing, sums: Tensor
    ) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor, Tensor]]:
        """Pieces of so many tokens that the memory between the products is bounded."""
        per_token = keys.shape[1] * pair_bytes(self.hidden, self.width)
        each = max(1, _row_bytes(x.device) // per_token // ALIGNED_TOKENS) * ALIGNED_TOKENS
        chosen = routing.ids.contiguous(), routing.weights.contiguous()
        whole = (x, keys.contiguous(), *chosen, sums)
        return zip(*(tensor.split(each) for tensor in whole), strict=True)

    def _unpacked(self, part: ExpertGroup, counts: Tensor, key: int) -> tuple[Tensor, Tensor]:
        """Gate and up [experts, 2 width, hidden], down [experts, hidden, width]."""
        each = self.width * self.hidden
        if self._scratch is None:
            nbytes = max(self.at_once, part.count) * unpacked_bytes(self.hidden, self.width)
            self._scratch = self.scratch.of(part.packed.pool.device, nbytes)
        scratch = self._scratch
        first = part.count * 2 * self.between.rows * self.hidden
        gate_up, down, _ = scratch.split([first, part.count * each, scratch.numel() - first - part.count * each])
        gate_up = gate_up.view(part.count, 2 * self.between.rows, self.hidden)
        down = down.view(part.count, self.hidden, self.width)
        unpack(part.packed, 0, self._gate_up, 2, counts, key, gate_up)
        unpack(part.packed, self._gate_up.bytes, self._down, 1, counts, key, down)
        return gate_up, down

    def _products(
        self,
        x: Tensor,
        order: Order,
        routing: Routing,
        keys: range,
        which: tuple[Tensor, Tensor] | Packed,
        wgmma: bool = False,
    ) -> Tensor:
        """Results of the part's experts for each of its rows, without the bias, bfloat16 [T * k, hidden]. which:
        matrices, or their codes; wgmma: whole warpgroups multiply these."""
        ends = order.ends[keys.start : keys.stop]
        ids = None if self.between.gate_up is None else routing.ids
        if isinstance(which, Packed) and wgmma:
            gathered, whose = rows.gather(x, order, ids, keys, reordered=True, spare=wgmma_product.MOST_ROWS)
            between = wgmma_product.activated(gathered, which, self._gate_up, ends, self.between, whose)
            del gathered
            return wgmma_product.multiplied(between, which, self._gate_up.bytes, self._down, ends)
        gathered, whose = rows.gather(x, order, ids, keys)
        if isinstance(which, Packed):
            mean = len(gathered) / self._experts
            between = code_product.activated(gathered, which, self._gate_up, ends, mean, self.between, whose)
            del gathered  # its memory is the result's (`pair_bytes`)
            return code_product.multiplied(between, which, self._gate_up.bytes, self._down, ends, mean)
        (gate_up, down), mean = which, len(gathered) / len(order.ends)
        product = _product_of(x, len(gathered), mean)
        both = product(gathered, gate_up, ends)
        del gathered  # its memory is the result's (`pair_bytes`)
        return product(rows.activate(both, ends, whose, self.between), down, ends)


def _product_of(x: Tensor, pairs: int, mean_rows: float) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Product of the rows of tokens x: `grouped.grouped_product`, or PyTorch's, which gives the same bits."""
    long = pairs > MANY_PAIRS or (len(x) > SHORT and mean_rows >= MANY_ROWS)
    if has_pytorchs(x.device) and (long or x.device.type == "cpu"):
        return lambda rows, matrices, ends: cast(Tensor, grouped_product(rows, matrices.transpose(1, 2), offs=ends))
    return lambda rows, matrices, ends: grouped.grouped_product(rows, matrices, ends, mean_rows)
