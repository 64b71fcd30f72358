"""`ExpertUsage`: how many tokens each routed expert got, and in how many steps it was read.

`Ops.route` adds to arrays that stay where the operations run (`kernels.ops.ExpertCounts`), so counting takes part in
recorded steps and CUDA graphs and waits for nothing. They are only read when somebody asks: on a GPU that is a copy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tandem.kernels.ops import ExpertCounts

_TOKENS, _READS, _SEEN = range(3)
KEPT = 16  # buffers of counts that were asked for: so many may be waited for
MOST_MOVED = 256  # steps with moves between two readings, whose counts are kept

Copy = Callable[[int, int, int], None]
"""From an address to another, so many bytes, in the order of what the GPU computes."""
Ints = npt.NDArray[np.int64]
Counted = npt.NDArray[Any]
"""int32 or int64."""
Change = tuple[int, int, bool]
"""Layer, expert, whether it is on the GPU from the next step on."""
Changes = Callable[[], Sequence[Change]]
"""Made when somebody looks at them."""


class UsageTotals(NamedTuple):
    """Since the start, int64 [MoE layers, experts] each, on the CPU."""

    tokens: Tensor  # routed to the expert
    reads: Tensor  # steps in which it got any: so often its weights were read


class SideTotals(NamedTuple):
    """Tokens and bytes of each side since the start, int64 [MoE layers] each."""

    gpu_tokens: Tensor
    cpu_tokens: Tensor
    gpu_bytes: Tensor  # of expert weights that were read
    cpu_bytes: Tensor

    @property
    def hit_rate(self) -> float:
        """Share of the routed tokens whose expert was on the GPU; 0 where there are none."""
        gpu, cpu = int(self.gpu_tokens.sum()), int(self.cpu_tokens.sum())
        return gpu / max(1, gpu + cpu)

    def since(self, before: SideTotals) -> SideTotals:
        return SideTotals(*(now - then for now, then in zip(self, before, strict=True)))


class CopiedCounts:
    """Counts as they were when somebody asked, on their way to the CPU; valid until `KEPT` more were asked for."""

    def __init__(self, arrays: Tensor) -> None:
        with torch.inference_mode(False):  # steps run in it, but somebody else may ask as well
            self._buffer = torch.empty(arrays.shape, dtype=arrays.dtype, pin_memory=arrays.is_cuda)
        self._source, self._plain = arrays, self._buffer.numpy()
        self._copied = arrays.data_ptr(), self._buffer.data_ptr(), arrays.nbytes
        self._arrived = torch.cuda.Event() if arrays.is_cuda else None

    def ask(self, copy: Copy | None) -> CopiedCounts:
        if copy is None:
            self._buffer.copy_(self._source, non_blocking=True)
        else:
            copy(*self._copied)
        if self._arrived is not None:
            self._arrived.record()
        return self

    def __del__(self) -> None:
        """Waits for a copy under way. PyTorch did not give it, and hands the memory on, as to weights that arrive."""
        with suppress(Exception):  # the GPU may be gone
            if self._arrived is not None:
                self._arrived.synchronize()

    def arrays(self) -> Counted:
        """[tokens, reads, seen], as `ExpertUsage` counts them."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._plain

    def tokens(self) -> Counted:
        """Routed to each expert since the start, modulo 2^32 on a GPU: [layers, experts]."""
        counted: Counted = self.arrays()[_TOKENS]
        return counted

    def reads(self) -> Counted:
        """Steps since the start in which each expert got any token, passes beside steps left out; as `tokens`."""
        arrays = self.arrays()
        counted: Counted = arrays[_READS] + arrays[_SEEN]
        return counted


class ExpertUsage:
    """Counts of one model. One thread runs steps and reads.

    On a GPU the arrays are int32 and may overflow. What counts is the difference between two readings. It is right as
    long as no expert gets 2^31 tokens between them.
    """

    def __init__(
        self,
        layers: int,
        experts: int,
        *,
        device: torch.device | None = None,
        padded: bool = False,
        gpu_experts: Tensor | None = None,
        chosen: tuple[int, int] | None = None,
    ) -> None:
        """padded: steps have rows that do not count, as CUDA graphs do; needed on a GPU. gpu_experts bool [layers,
        experts]: who is there, default: nobody. chosen: (rows, top_k) of a step at most, to keep its ids."""
        kind = torch.int32 if padded else torch.int64
        self._arrays = torch.zeros(3, layers, experts, dtype=kind, device=device)
        self._rows = torch.zeros(1, dtype=torch.int32, device=device) if padded else None
        self._chosen: Tensor | None = None
        if chosen is not None:
            self._chosen = torch.full((layers, *chosen), -1, dtype=torch.int32, device=device)
        self._less = torch.full((1, 1), -1, dtype=kind, device=device)
        self._last = torch.zeros(2, layers, experts, dtype=kind)
        self._totals = torch.zeros(2, layers, experts, dtype=torch.int64)
        self._gpu_experts = torch.zeros(layers, experts, dtype=torch.bool) if gpu_experts is None else gpu_experts
        self._lent = True  # whether somebody may keep it
        self._gpu_totals = torch.zeros(2, layers, dtype=torch.int64)  # by the last `read`
        # Counts when an expert left the GPU, less those when one came: with the counts of all that are there now, this
        # is what was counted while they were there.
        self._left = np.zeros((2, layers), np.int64)
        self._news: list[
            tuple[CopiedCounts, Changes]
        ] = []  # moves that nothing knows of yet; counts are on their way
        self._moved: list[tuple[Ints, Ints]] = []  # changes [3, n], counts [3, n], since the last `read`
        self._asking = Lock()
        self._buffers: deque[CopiedCounts] = deque()
        self.copy: Copy | None = None  # None: PyTorch's, which takes longer
        # Experts that a pass has seen, and all before it; how many of its rows count, and where its layers do.
        self._prefill_counts: tuple[Tensor, Tensor, Tensor | None, list[ExpertCounts]] | None = None
        self.expert_bytes = torch.zeros(layers, dtype=torch.int64)
        self.swaps = 0
        self.swap_rests = 0  # how often live placement went home because it did not pay

    @property
    def shape(self) -> tuple[int, int]:
        """MoE layers, experts."""
        return self._arrays.shape[1], self._arrays.shape[2]

    def tally(self, layer: int) -> ExpertCounts:
        """Where the layer-th MoE layer counts."""
        chosen = None if self._chosen is None else self._chosen[layer]
        return ExpertCounts(self._arrays[_TOKENS, layer], self._arrays[_SEEN, layer], chosen, self._rows)

    def weigh(self, layer: int, expert_bytes: int) -> None:
        """How many bytes reading an expert of this layer takes."""
        self.expert_bytes[layer] = expert_bytes

    def begin(self, rows: int | Tensor) -> None:
        """Before each step, inside CUDA graphs too: only its first `rows` rows (int32 [1] on the GPU) are counted."""
        self._arrays[_READS].add_(self._arrays[_SEEN])
        self._arrays[_SEEN].zero_()
        if self._rows is None:
            return
        if isinstance(rows, Tensor):
            self._rows.copy_(rows)
        else:
            self._rows.fill_(rows)

    def overlap_tallies(self, rows: int) -> list[ExpertCounts]:
        """Where the layers of a pass of so many rows count that steps overtake. One pass at a time."""
        if self._prefill_counts is None:
            with torch.inference_mode(False):  # a pass begins in it, and may end elsewhere
                marks, passed = torch.zeros_like(self._arrays[_SEEN]), torch.zeros_like(self._arrays[_SEEN])
                limit = None if self._rows is None else torch.zeros_like(self._rows)
                each = zip(self._arrays[_TOKENS], marks, strict=True)
                counts = [ExpertCounts(tokens, own, None, limit) for tokens, own in each]
                self._prefill_counts = marks, passed, limit, counts
        _, _, limit, tallies = self._prefill_counts
        if limit is not None:
            limit.fill_(rows)
        return tallies

    def end_beside(self) -> None:
        """The pass has ended, wherever; each of its layers ran once at most. In the order of what it computed: a step
        that is under way adds to other counts."""
        if self._prefill_counts is not None:
            marks, passed, _, _ = self._prefill_counts
            passed.add_(marks)
            marks.zero_()

    def read(self) -> UsageTotals:
        """Waits for the GPU's last step, which takes no time where its results have been fetched."""
        self._note_all()
        self._attribute()
        now, passed = self._arrays.cpu(), 0 if self._prefill_counts is None else self._prefill_counts[1].cpu()
        now = torch.stack((now[_TOKENS], now[_READS] + now[_SEEN] + passed))
        self._totals += (now - self._last).long()
        self._last = now
        self._gpu_totals = torch.from_numpy(self._left) + (self._totals * self._gpu_experts).sum(2)
        return UsageTotals(self._totals[0].clone(), self._totals[1].clone())

    @property
    def tokens(self) -> Tensor:
        """Routed to each expert, int64 [MoE layers, experts], by the last `read`, which the next one changes."""
        return self._totals[0]

    def sides(self) -> SideTotals:
        """By the last `read`."""
        gpu = self._gpu_totals
        cpu = self._totals.sum(2) - gpu
        return SideTotals(gpu[0], cpu[0], gpu[1] * self.expert_bytes, cpu[1] * self.expert_bytes)

    @property
    def gpu_experts(self) -> Tensor:
        """bool [layers, experts]: where each is from the next step on. What was returned never changes."""
        self._note_all()
        self._lent = True
        return self._gpu_experts

    def ask(self) -> CopiedCounts:
        """Counts of the steps until now, which arrive beside the next one. The engine's thread asks, and the one that
        launches a prompt's layers."""
        with self._asking:
            if len(self._buffers) < KEPT:
                self._buffers.append(CopiedCounts(self._arrays))
            else:
                if self._news and self._news[0][0] is self._buffers[0]:  # to be used again now
                    self._note_all()
                self._buffers.rotate(-1)
            return self._buffers[-1].ask(self.copy)

    def moved(self, changes: Changes, swaps: int, now: CopiedCounts | None = None) -> None:
        """Experts are elsewhere from the next step on. What was counted until now counts for where they were. now: what
        was asked for after this step, if it was."""
        self.swaps += swaps
        self._news.append((now or self.ask(), changes))  # steps wait for this call, so the rest is done later
        if len(self._news) > KEPT // 2:
            self._note_all(keep=1)  # whose counts may be on their way

    def note(self) -> None:
        """Looks at earlier moves, whose counts have arrived: some at once, which takes little longer than one."""
        if len(self._news) > KEPT // 4:
            self._note_all(keep=1)

    def _note_all(self, keep: int = 0) -> None:
        if not self._news:
            return
        done, self._news = self._news[: len(self._news) - keep], self._news[len(self._news) - keep :]
        if self._lent:
            self._gpu_experts, self._lent = self._gpu_experts.clone(), False
        resident = self._gpu_experts.numpy()
        for snapshot, changes in done:
            change = np.array(changes(), np.int64).reshape(-1, 3).T
            resident[change[0], change[1]] = change[2] > 0
            self._moved.append((change, snapshot.arrays()[:, change[0], change[1]]))
        if len(self._moved) > MOST_MOVED:
            self._attribute()

    def _attribute(self) -> None:
        """Attributes counts from before each of the moves to the side where the expert was."""
        if not self._moved:
            return
        (layers, experts, resident), counts = (
            np.concatenate(parts, 1) for parts in zip(*self._moved, strict=True)
        )
        self._moved = []
        readings = np.stack((counts[_TOKENS], counts[_READS] + counts[_SEEN]))
        new = readings - self._last.numpy()[:, layers, experts]  # modulo 2^32 on a GPU
        counted = (self._totals.numpy()[:, layers, experts] + new) * (1 - 2 * resident)
        for total, each in zip(self._left, counted, strict=True):
            np.add.at(total, layers, each)

    def chosen(self, rows: int, wrong: Sequence[int] = ()) -> Tensor:
        """Ids of so many of the last step's first rows, `wrong` ones left out: int16 [rows, MoE layers, top_k] on the
        CPU; only if they are kept."""
        assert self._chosen is not None
        ids = self._chosen[:, : rows + len(wrong)]
        if wrong:
            others = set(wrong)
            ids = ids[:, [row for row in range(rows + len(wrong)) if row not in others]]
        return ids.transpose(0, 1).to("cpu", torch.int16)

    def take_back(self, rows: Sequence[int]) -> None:
        """These rows of the last step were no tokens. Their experts were read all the same. Only if ids are kept."""
        assert self._chosen is not None
        first, end = rows[0], rows[-1] + 1  # of one sequence they are neighbours: no list of them goes to the GPU
        selection = slice(first, end) if end - first == len(rows) else list(rows)
        ids = self._chosen[:, selection].long().flatten(1)
        self._arrays[_TOKENS].scatter_add_(1, ids, self._less.expand_as(ids))
