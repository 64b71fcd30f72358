"""Cost of a decode step by its bytes: how live placement weighs an exchange against the hits it gains."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

READS_PER_EXCHANGE = 3.0
"""An exchange costs as much memory time as so many reads of an expert from CPU memory. It reads one there and writes
one, and some tokens pass until it is used."""


@dataclass(frozen=True, slots=True)
class StepCost:
    """A step = the GPU's part without routed experts + the longest of both sides' expert bytes ÷ bandwidth and
    exchanged bytes ÷ PCIe + what it stands still for exchanges. An exchange reads an expert in CPU memory and writes
    one.

    expert_bytes: packed, of one expert; pcie_gbps: of each direction; gpu_step_seconds: without routed experts;
    exchange_seconds: that a step stands still for one exchange.
    """

    expert_bytes: float
    dram_gbps: float
    pcie_gbps: float
    hbm_gbps: float
    gpu_step_seconds: float
    exchange_seconds: float = 40e-6

    @property
    def reads_per_exchange(self) -> float:
        """Reads of an expert from CPU memory that take as long as one exchange."""
        return READS_PER_EXCHANGE + self.exchange_seconds * self.dram_gbps * 1e9 / self.expert_bytes

    def seconds(self, cpu_reads: Tensor, gpu_reads: Tensor, exchanges: Tensor) -> Tensor:
        """Seconds of steps, from the experts that they read on both sides and the exchanges made, [steps] each."""
        cpu = (cpu_reads + 2 * exchanges) * (self.expert_bytes / (self.dram_gbps * 1e9))
        gpu = gpu_reads * (self.expert_bytes / (self.hbm_gbps * 1e9))
        pcie = exchanges * (self.expert_bytes / (self.pcie_gbps * 1e9))
        longest = torch.maximum(torch.maximum(cpu, gpu), pcie)
        return self.gpu_step_seconds + longest + exchanges * self.exchange_seconds
