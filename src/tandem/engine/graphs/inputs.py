"""`GraphPlan`: which steps are captured. `GraphInputs`: the batch that a captured one reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tandem.config.host_memory import graph_input_bytes, graph_wide_bytes
from tandem.engine.batch_arrays import to_gpu
from tandem.models.batch import ForwardBatch


@dataclass(frozen=True, slots=True)
class GraphPlan:
    """sizes: rows of the graphs to capture, ascending; pages: of the longest sequence; warm_ups: runs before a capture,
    which compile kernels and let libraries allocate; guessing: steps may have rows of guesses; settled: of `sizes`,
    those that have a second graph, for steps that neither have guesses nor follow some; windowed: layers that
    see a window have pages of their own; prompts: rows of chunks that are captured, too; alone: and replayed where
    nobody decodes; splits: rows of such chunks in which the CPU has a part, where that pays; each_row: every row is a
    sequence of its own, so that its bits are those of one that decodes; drafting: a draft layer runs between steps, so
    no pass does."""

    sizes: tuple[int, ...]
    pages: int
    settled: tuple[int, ...] = ()
    warm_ups: int = 2
    guessing: bool = False
    windowed: bool = False
    prompts: tuple[int, ...] = ()
    alone: bool = True
    splits: tuple[int, ...] = ()
    each_row: bool = False
    drafting: bool = False

    @property
    def tables(self) -> int:
        """Kinds of pages."""
        return 2 if self.windowed else 1


class GraphInputs:
    """A graph's batch on the GPU and its image in pinned memory, each in one array: the graph begins with a copy.

    At first the rows read and write page 0, before anybody uses it, and none of them counts.
    """

    def __init__(self, size: int, plan: GraphPlan, device: torch.device) -> None:
        self._guessing, self._kinds, self._size = plan.guessing, plan.tables, size
        self._wide, nbytes = graph_wide_bytes(size, plan.tables), graph_input_bytes(size, plan.pages, plan.tables)
        self._host = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self.image = self._views(self._host)
        self.image.seq_lens.fill_(1)
        self._there = self._host.to(device, copy=True)
        self.batch = self._views(self._there)
        self.counted = self._there[-4:].view(torch.int32)  # rows that are not copies
        names = ["input_ids", "positions", "cache_slots", "seq_lens", "slots", "block_tables"]
        names += ["folded"] if plan.guessing else []
        self._rows = {name: getattr(self.image, name).numpy() for name in names}
        own = [] if self.image.windows is None else ["cache_slots", "block_tables"]
        self._window_rows = {name: getattr(self.image.windows, name).numpy() for name in own}
        self._count = self._host[-4:].view(torch.int32).numpy()

    def _views(self, memory: Tensor) -> ForwardBatch:
        size, device, kinds = self._size, memory.device, self._kinds
        wide = memory[: (2 + kinds) * 8 * size].view(torch.int64).view(-1, size)
        narrow = memory[self._wide : -4].view(torch.int32)
        tables = narrow[3 * size :].view(kinds, size, -1)
        starts, rows = torch.arange(size + 1, dtype=torch.int32, device=device), torch.arange(size, device=device)
        whole, *windows = [
            ForwardBatch(
                input_ids=wide[0], positions=wide[1], cache_slots=slots, query_starts=starts,
                seq_lens=narrow[:size], slots=narrow[size : 2 * size], block_tables=table, logits_rows=rows,
                folded=narrow[2 * size : 3 * size] if self._guessing else None,
            )
            for slots, table in zip(wide[2:], tables, strict=True)
        ]  # fmt: skip
        whole.windows = windows[0] if windows else None
        return whole

    def fill(self, source: ForwardBatch) -> None:
        """The image; the last row fills what is left over. In NumPy: PyTorch takes several times as long for so few
        numbers. The step before ended with a wait, so the image is free."""
        self._fill(self._rows, source)
        self._fill(self._window_rows, source.windowed)
        self._count[0] = len(source.seq_lens)

    def _fill(self, image: dict[str, Any], source: ForwardBatch) -> None:
        rows, width = len(source.seq_lens), source.block_tables.shape[1]
        for name, to in image.items():
            values = _numbers(source, name)
            to = to[:, :width] if name == "block_tables" else to
            to[:rows] = values
            if rows < self._size:  # a copy that had the sequence's slot would change its state twice
                to[rows:] = 0 if name == "slots" else values[-1]

    def send(self) -> None:
        """The image to the GPU, in a graph at every replay."""
        to_gpu(self._host, self._there)


def _numbers(source: ForwardBatch, name: str) -> Any:
    """Where a batch says nothing of folds, they hold all tokens before its own."""
    found: Tensor | None = getattr(source, name)
    return source.seq_lens.numpy() - 1 if found is None else found.numpy()
