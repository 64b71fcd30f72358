"""`GpuExperts`: `ExpertMatrices` in GPU memory, over the packed bytes of the C++ core."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from tandem.errors import KernelError
from tandem.formats.codes import Weight
from tandem.kernels.gpu import expert_rows, expert_tiles
from tandem.kernels.gpu.expert_rows import ExpertActivation
from tandem.kernels.gpu.mma import expert_mma
from tandem.kernels.gpu.panels import Panels
from tandem.kernels.gpu.prompts.products import ExpertGroup, PromptExperts, UnpackScratch, parts_of
from tandem.kernels.gpu.uploads import Uploads
from tandem.kernels.ops import ExpertBiases, Routing
from tandem.kernels.packed.experts import ExpertWeights, PackedExperts
from tandem.kernels.which import ExpertPath, Reads, gpu_way

SCRATCH_BYTES = 512 << 20  # of a step's pairs at a time: thousands of tokens, so that tiles are full


@dataclass(frozen=True, slots=True)
class PartialSums:
    """Results of a layer's GPU experts. With `slots` a weighted one per pair, float32 [T * k, hidden], unwritten where
    the slot is below 0. Without them their sums, float32 [T, hidden], or bfloat16 where nothing is added to them."""

    values: Tensor
    slots: Tensor | None

    def combined(self, addend: Tensor | None = None) -> Tensor:
        """The sum over each token's experts, plus what other places computed: bfloat16 [T, hidden]."""
        if self.slots is None and addend is None:
            return self.values.to(torch.bfloat16)
        rows = len(self.values) if self.slots is None else len(self.slots)
        out = self.values.new_empty((rows, self.values.shape[1]), dtype=torch.bfloat16)
        return expert_rows.combine(self.values, self.slots, out, addend)


@dataclass(slots=True)
class StepKind:
    """Kind of step that a model's layers run in. captured: a CUDA graph, recorded or rehearsed: grouped products
    would keep their scratch in its memory a second time."""

    captured: bool = False
    each_row: bool = False  # a row has the same bits beside any others


class GpuExperts:
    """The experts of one layer that live on the GPU, each as a CPU layer of one expert packs it.

    slot_of int32 [num_experts]: where an expert lies, or -1; `table` is the same on the GPU. The first expert loaded
    decides the formats.
    """

    gate_up: Panels
    down: Panels
    pool: Tensor  # uint8 [slots * stride]

    def __init__(
        self,
        new_packer: Callable[[], PackedExperts],
        between: ExpertActivation,
        slot_of: Tensor,
        device: torch.device,
        tables: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        """new_packer: makes an empty CPU layer of such experts, which never holds any; it lives from the first `load`
        to `all_loaded`. tables: int32 [num_experts] on the CPU and on the device, to be filled and used as `slot_of`
        and `table`."""
        self._new_packer, self._between, self.device = new_packer, between, device
        self._packer: PackedExperts | None = None
        self._uploads: Uploads | None = None
        self.prompts: PromptExperts | None = None
        self.step, self.scratch = StepKind(), UnpackScratch()
        if tables is None:
            shape = slot_of.shape
            tables = (
                torch.empty(shape, dtype=torch.int32),
                torch.empty(shape, dtype=torch.int32, device=device),
            )
        self.slot_of, self.table = (table.copy_(slot_of) for table in tables)
        self.slots = int(self.slot_of.max()) + 1
        self.stride = 0  # bytes of one expert; 0: none was loaded

    def set_biases(self, biases: ExpertBiases) -> None:
        """Takes the biases of all experts: those that live elsewhere may come here."""
        self._between = self._between.biased(biases, self.device)
        if self.prompts is not None:
            self.prompts.between = self._between

    def load(self, expert: int, gate: Weight, up: Weight, down: Weight) -> None:
        """Packs one expert on the CPU and copies its bytes to its slot."""
        self.load_each([expert], [(gate, up, down)])

    def load_all(self, first: int, experts: Sequence[ExpertWeights]) -> None:
        self.load_each(range(first, first + len(experts)), experts)

    def load_each(self, ids: Sequence[int], experts: Sequence[ExpertWeights]) -> None:
        """Packs the experts `ids` on the CPU, on all workers, some while those before are copied to their slots."""
        if self._packer is None:
            self._packer = self._new_packer()
        packer = self._packer
        packer.hold(*experts[0], ids[0])
        uploads = self._open(packer)
        for part in _parts(len(ids), uploads.room):
            uploads.send(self._slots_of(ids[part]), partial(packer.pack_to, ids[part], experts[part]))

    def take(self, ids: Sequence[int], layer: PackedExperts) -> None:
        """Copies the experts `ids` out of a CPU layer that has them."""
        uploads = self._open(layer)
        for part in _parts(len(ids), uploads.room):
            uploads.send(self._slots_of(ids[part]), partial(layer.copy_all, ids[part]))

    def all_loaded(self) -> None:
        """Frees the memory that loading took; nothing of these experts is left in CPU memory."""
        if self._uploads is not None:
            self._uploads.finish()
        self._packer = self._uploads = None

    def _slots_of(self, ids: Sequence[int]) -> list[int]:
        slots = [self.slot_of_expert(expert) for expert in ids]
        for expert, slot in zip(ids, slots, strict=True):
            if slot < 0:
                raise KernelError(f"expert {expert} has no slot on the GPU")
        return slots

    def _open(self, layer: PackedExperts) -> Uploads:
        """Memory for experts packed as that layer's, and the way there."""
        if self.stride == 0:
            gate_up, down = layer.layout()
            self.gate_up, self.down = Panels(*gate_up), Panels(*down)
            self.stride = layer.bytes_per_expert
            self._mma = all(expert_mma.reads(panels, self.device) for panels in (self.gate_up, self.down))
            self.pool = torch.empty(self.slots * self.stride, dtype=torch.uint8, device=self.device)
            if PromptExperts.reads((self.gate_up, self.down), self._between):
                sizes = self.gate_up, self.down, self._between, self.device, len(self.slot_of)
                self.prompts = PromptExperts(*sizes)
                self.prompts.scratch = self.scratch
        if self._uploads is None:
            self._uploads = Uploads(self.pool, self.stride, self.slots)
        return self._uploads

    def slot(self, index: int) -> Tensor:
        """uint8 [stride], where it lies."""
        return self.pool[index * self.stride : (index + 1) * self.stride]

    def address(self, slot: int) -> int:
        """Where it lies on the GPU."""
        return self.pool.data_ptr() + slot * self.stride

    def slot_of_expert(self, expert: int) -> int:
        return int(self.slot_of[expert])

    @property
    def bytes_per_expert(self) -> int:
        """Packed bytes of one expert; 0 while none was loaded."""
        return self.stride

    def partial(self, x: Tensor, routing: Routing, final: bool = False) -> PartialSums:
        """x bfloat16 [T, hidden], routing [T, k] with slots; `combined` ends it. A long step is taken in pieces, each
        added up before the next, so that its memory is bounded; a row's bits are the same. final: nothing will be
        added to the sums, so they may be rounded."""
        slots = expert_rows.slots_of(routing)
        unpacks = self.prompts is not None and not self.step.captured
        ways = (False,) * 3 if self.prompts is None else self.prompts.ways
        reads = Reads(self._mma, unpacks, self.step.each_row, *ways)
        way = gpu_way(len(x), slots.numel(), len(self.slot_of), reads)
        if way is ExpertPath.MMA:
            return PartialSums(self._multiplied(x.contiguous(), routing, final), None)
        if way is ExpertPath.ROWS:
            return PartialSums(self._streamed(x, routing), slots)
        if way in (ExpertPath.CODES, ExpertPath.PROMPTS) and self.prompts is not None:
            at_once = self.slots if way is ExpertPath.CODES else self.prompts.at_once
            parts = parts_of(self.pool, self.stride, self.slots, at_once)
            return PartialSums(self.prompts(x, slots, routing, parts), None)
        each = self._tokens_at_once(x.shape[1], slots.shape[1])
        if len(x) <= each:
            return PartialSums(self._tiled(x, routing), slots)
        sums = torch.empty_like(x, dtype=torch.float32)
        for first in range(0, len(x), each):
            part = slice(first, first + each)
            part_routing = Routing(routing.ids[part], routing.weights[part], slots[part])
            expert_rows.combine(self._tiled(x[part], part_routing), slots[part], sums[part])
        return PartialSums(sums, None)

    def parts(self) -> list[ExpertGroup]:
        """Parts of the pool that many rows are multiplied with at a time: expert n of all of them is in slot n."""
        return (
            [] if self.prompts is None else parts_of(self.pool, self.stride, self.slots, self.prompts.at_once)
        )

    def _tokens_at_once(self, hidden: int, top_k: int) -> int:
        per_token = top_k * (hidden * 4 + self._between.width * 2)
        return max(1, SCRATCH_BYTES // per_token // expert_tiles.ROWS) * expert_tiles.ROWS

    def _multiplied(self, x: Tensor, routing: Routing, gpu_only: bool) -> Tensor:
        out = torch.empty_like(x, dtype=torch.bfloat16 if gpu_only else torch.float32)
        between, offset, stride = self._between, self.gate_up.bytes, self.stride
        h = expert_mma.gate_up(x, self.pool, self.gate_up, stride, routing, between)
        return expert_mma.down(h, self.pool, offset, self.down, stride, routing, between, out)

    def _streamed(self, x: Tensor, routing: Routing) -> Tensor:
        between, offset, stride = self._between, self.gate_up.bytes, self.stride
        h = expert_rows.gate_up(x, self.pool, self.gate_up, stride, routing, between)
        return expert_rows.down(h, self.pool, offset, self.down, stride, routing, between.down)

    def _tiled(self, x: Tensor, routing: Routing) -> Tensor:
        between, offset, stride = self._between, self.gate_up.bytes, self.stride
        tiles = expert_tiles.row_tiles(expert_rows.slots_of(routing), self.slots)
        h = expert_tiles.gate_up(x, self.pool, self.gate_up, stride, tiles, routing, between)
        return expert_tiles.down(h, self.pool, offset, self.down, stride, tiles, routing, between.down)

    def forward(
        self, x: Tensor, ids: Tensor, weights: Tensor, out: Tensor | None = None, add: bool = False
    ) -> Tensor:
        result = self.partial(x, Routing(ids, weights, _slots(self.table, ids)), final=True).combined()
        if out is None:
            return result
        return out.add_(result) if add else out.copy_(result)


def _slots(table: Tensor, ids: Tensor) -> Tensor:
    """Where each lies, int32; -1 for ids that no expert has."""
    last = len(table) - 1
    return torch.where((ids >= 0) & (ids <= last), table[ids.clamp(0, last)], -1)


def _parts(count: int, size: int) -> list[slice]:
    """range(count), `size` at a time."""
    return [slice(first, min(first + size, count)) for first in range(0, count, size)]
