"""What a decode step costs by its bytes: how live placement weighs an exchange against the hits it gains."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class StepCost:
    """A step = the GPU's part without routed experts + the longer of both sides' expert bytes ÷ bandwidth + exchanged
    bytes ÷ PCIe, as if nothing hid them: an exchange reads and writes CPU memory, which the CPU's experts wait for.

    expert_bytes: packed, of one expert; gpu_step_seconds: without routed experts.
    """

    expert_bytes: float
    dram_gbps: float
    pcie_gbps: float
    hbm_gbps: float
    gpu_step_seconds: float

    @property
    def hits_per_exchange(self) -> float:
        """Reads of an expert from CPU memory that take as long as one exchange, which moves two over PCIe."""
        return 2 * self.dram_gbps / self.pcie_gbps

    def seconds(self, on_cpu: Tensor, on_gpu: Tensor, exchanges: Tensor) -> Tensor:
        """Of steps, from the experts that they read on both sides and the exchanges made, [steps] each."""
        cpu = on_cpu * (self.expert_bytes / (self.dram_gbps * 1e9))
        gpu = on_gpu * (self.expert_bytes / (self.hbm_gbps * 1e9))
        moved = exchanges * (2 * self.expert_bytes / (self.pcie_gbps * 1e9))
        return self.gpu_step_seconds + torch.maximum(cpu, gpu) + moved
