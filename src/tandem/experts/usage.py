"""`ExpertUsage`: how many tokens each routed expert got, and in how many steps it was read.

`Ops.route` adds to arrays that stay where the operations run (`kernels.ops.Tally`), so counting takes part in recorded
steps and CUDA graphs and waits for nothing. They are only read when somebody asks: on a GPU that is a copy.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tandem.kernels.ops import Tally

_TOKENS, _READS, _SEEN = range(3)


class UsageTotals(NamedTuple):
    """Since the start, int64 [MoE layers, experts] each, on the CPU."""

    tokens: Tensor  # routed to the expert
    reads: Tensor  # steps in which it got any: so often its weights were read


class SideTotals(NamedTuple):
    """What happened where, since the start, int64 [MoE layers] each."""

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


class ExpertUsage:
    """Counts of one model. One thread runs steps and reads.

    On a GPU the arrays are int32 and may overflow: what counts is the difference between two readings, which is right
    as long as no expert gets 2^31 tokens between them.
    """

    def __init__(
        self,
        layers: int,
        experts: int,
        *,
        device: torch.device | None = None,
        padded: bool = False,
        on_gpu: Tensor | None = None,
        chosen: tuple[int, int] | None = None,
    ) -> None:
        """padded: steps have rows that do not count, as CUDA graphs do; needed on a GPU. on_gpu bool [layers, experts],
        default: none. chosen: (rows, top_k) of a step at most, to keep its ids."""
        kind = torch.int32 if padded else torch.int64
        self._arrays = torch.zeros(3, layers, experts, dtype=kind, device=device)
        self._rows = torch.zeros(1, dtype=torch.int32, device=device) if padded else None
        self._chosen: Tensor | None = None
        if chosen is not None:
            self._chosen = torch.full((layers, *chosen), -1, dtype=torch.int32, device=device)
        self._last = torch.zeros(2, layers, experts, dtype=kind)
        self._totals = torch.zeros(2, layers, experts, dtype=torch.int64)
        self._on_gpu_totals = torch.zeros(2, layers, experts, dtype=torch.int64)
        self.on_gpu = torch.zeros(layers, experts, dtype=torch.bool) if on_gpu is None else on_gpu
        self.expert_bytes = torch.zeros(layers, dtype=torch.int64)
        self.swaps = 0
        self.swap_rests = 0  # how often live placement paused because it did not pay

    @property
    def shape(self) -> tuple[int, int]:
        """MoE layers, experts."""
        return self._arrays.shape[1], self._arrays.shape[2]

    def tally(self, layer: int) -> Tally:
        """Where the layer-th MoE layer counts."""
        chosen = None if self._chosen is None else self._chosen[layer]
        return Tally(self._arrays[_TOKENS, layer], self._arrays[_SEEN, layer], chosen, self._rows)

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

    def read(self) -> UsageTotals:
        """Waits for the GPU's last step, which takes no time where its results have been fetched."""
        now = self._arrays.cpu()
        now = torch.stack((now[_TOKENS], now[_READS] + now[_SEEN]))
        new = (now - self._last).long()
        self._last = now
        self._totals += new
        self._on_gpu_totals += new * self.on_gpu
        return UsageTotals(self._totals[0].clone(), self._totals[1].clone())

    def sides(self) -> SideTotals:
        """By the last `read`."""
        gpu = self._on_gpu_totals.sum(2)
        cpu = self._totals.sum(2) - gpu
        return SideTotals(gpu[0], cpu[0], gpu[1] * self.expert_bytes, cpu[1] * self.expert_bytes)

    def place(self, on_gpu: Tensor, swaps: int) -> None:
        """Experts have moved. What was counted since the last `read` counts as if it had been computed there, so read
        before where the difference matters."""
        self.on_gpu = on_gpu.clone()
        self.swaps += swaps

    def chosen(self, rows: int) -> Tensor:
        """Ids of the last step's first rows, int16 [rows, MoE layers, top_k] on the CPU; only if they are kept."""
        assert self._chosen is not None
        return self._chosen[:, :rows].transpose(0, 1).to("cpu", torch.int16)
