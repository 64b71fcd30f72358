"""`GraphPlan`: which steps are captured. `GraphInputs`: the batch that a captured one reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tandem.engine.step.batch import WINDOW_FIELDS, BatchLayout, BatchSizes, to_gpu
from tandem.models.batch import ForwardBatch
from tandem.planner.host_memory import INPUT_ALIGNED_BYTES


@dataclass(frozen=True, slots=True)
class GraphPlan:
    """sizes: rows of the graphs to capture, ascending; pages: of the longest sequence; warm_ups: runs before a capture,
    which compile kernels and let libraries allocate; speculative: steps may have rows of drafts; plain_sizes: of
    `sizes`, those that have a second graph, for steps that neither have drafts nor follow some; windowed: layers that
    see a window have pages of their own; prompts: rows of chunks that are captured, too; no_decodes: and replayed where
    nobody decodes; splits: rows of such chunks in which the CPU has a part, where that pays; each_row: every row is a
    sequence of its own, so that its bits are those of one that decodes; drafting: a draft layer runs between steps, so
    no pass does; reserved_sms: multiprocessors that tasks leave to steps; one_stream: no task runs beside steps;
    turns: there its pieces and steps take turns, in an order that all ranks have; images_from: as of `BatchArrays`; 0:
    all rows turn by their positions."""

    sizes: tuple[int, ...]
    pages: int
    plain_sizes: tuple[int, ...] = ()
    warm_ups: int = 2
    speculative: bool = False
    windowed: bool = False
    prompts: tuple[int, ...] = ()
    no_decodes: bool = True
    splits: tuple[int, ...] = ()
    each_row: bool = False
    drafting: bool = False
    reserved_sms: int = 0
    one_stream: bool = False
    turns: bool = False
    images_from: int = 0

    @property
    def tables(self) -> int:
        """Kinds of pages."""
        return 2 if self.windowed else 1


class _InputField:
    """A batch's numbers of one name, in an image: one for every row, or a row of a table."""

    def __init__(self, name: str, image: Tensor) -> None:
        self.image: npt.NDArray[Any] = image.numpy()
        self._name = name
        self._held: Tensor | None = None  # what was copied last. Steps come in the same memory, one after the other
        self._from = self._to = self._rest = self.image

    def fill(self, source: ForwardBatch, rows: int) -> None:
        tensor: Tensor = source.turning if self._name == "turns" else getattr(source, self._name)
        if tensor is not self._held:
            self._look_at(tensor, rows)
        self._to[...] = self._from
        if rows < len(self.image):  # a copy that had the sequence's slot would change its state twice
            self._rest[...] = 0 if self._name == "slots" else self._from[-1]

    def _look_at(self, tensor: Tensor, rows: int) -> None:
        """Its numbers, and where they belong. That takes longer than copying them."""
        self._held, self._from = tensor, tensor.numpy()
        image = self.image if tensor.dim() == 1 else self.image[:, : tensor.shape[1]]
        self._to, self._rest = image[:rows], image[rows:]


def _fields(image: ForwardBatch, *names: str) -> list[_InputField]:
    return [_InputField(name, getattr(image, name)) for name in names]


_EACH_ROW = ("input_ids", "positions", "seq_lens", "slots", *WINDOW_FIELDS)
_IN_IMAGE = ("input_ids", "positions", "cache_slots", "seq_lens", "slots", "state_lens", "block_tables")


class GraphInputs:
    """A graph's batch on the GPU and its image in pinned memory, each in one array. The graph begins with a kernel that
    reads the image.

    At first the rows read and write page 0, before anybody uses it, and none of them counts.
    """

    def __init__(self, size: int, plan: GraphPlan, device: torch.device) -> None:
        self._speculative, self._size = plan.speculative, size
        sizes = BatchSizes(size, size, plan.pages, windowed=plan.windowed)
        turns = ("turns",) if plan.images_from else ()
        self._layout = BatchLayout(sizes, (*_IN_IMAGE, *turns), aligned=INPUT_ALIGNED_BYTES, counted=True)
        self._host = torch.zeros(self._layout.nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self.image = self._views(self._host)
        self.image.seq_lens.fill_(1)
        self._device_image = self._host.to(device, copy=True)
        self.batch = self._views(self._device_image)
        self.counted = self._layout.counted(self._device_image)  # rows that are not copies
        self._rows = _fields(self.image, *_EACH_ROW, *turns)
        self._window_rows = [] if self.image.windows is None else _fields(self.image.windows, *WINDOW_FIELDS)
        self._lens, state_lens = self.image.seq_lens.numpy(), self.image.state_lens
        self._state_lens = None if state_lens is None else _InputField("state_lens", state_lens)
        self._count = self._layout.counted(self._host).numpy()

    def _views(self, memory: Tensor) -> ForwardBatch:
        size, device = self._size, memory.device
        others: dict[str, Tensor | None] = {
            "query_starts": torch.arange(size + 1, dtype=torch.int32, device=device),
            "logits_rows": torch.arange(size, device=device),
        }
        return self._layout.batch(memory, **others, **({} if self._speculative else {"state_lens": None}))

    def fill(self, source: ForwardBatch) -> None:
        """The image; the last row fills what is left over. In NumPy: PyTorch takes several times as long for so few
        numbers. The step before ended with a wait, so the image is free."""
        rows = source.seq_lens.shape[0]
        for field in self._rows:
            field.fill(source, rows)
        for field in self._window_rows:
            field.fill(source.windowed, rows)
        if self._state_lens is not None and source.state_lens is not None:
            self._state_lens.fill(source, rows)
        elif self._state_lens is not None:  # all tokens before the step
            np.subtract(self._lens, 1, out=self._state_lens.image)
        self._count[0] = rows

    def send(self) -> None:
        """The image to the GPU, in a graph at every replay."""
        to_gpu(self._host, self._device_image)
