"""What the plan says a model takes, beside what it takes: RAM of this process, and GPU memory."""

from __future__ import annotations

import dataclasses
import gc
from pathlib import Path
from typing import Any

import torch

from tandem.config import ModelConfig, Plan
from tandem.config.gpu_plan import dense_bytes
from tandem.config.stored import UNQUANTISED, StoredFormats

_STATUS = Path("/proc/self/status")


def anonymous_bytes(status: Path = _STATUS) -> int:
    """RAM of this process that is no file's: packed weights, caches, scratch, Python."""
    lines = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
    return int(lines["RssAnon"].split()[0]) << 10


def gpu_bytes() -> int:
    """What tensors take of the current GPU; 0 without one."""
    return int(torch.cuda.memory_allocated()) if torch.cuda.is_available() else 0


@dataclasses.dataclass(frozen=True, slots=True)
class Taken:
    """Bytes of RAM and of GPU memory."""

    ram: int
    gpu: int

    @classmethod
    def now(cls) -> Taken:
        gc.collect()
        return cls(anonymous_bytes(), gpu_bytes())

    def since(self, earlier: Taken) -> Taken:
        return Taken(self.ram - earlier.ram, self.gpu - earlier.gpu)


def planned(plan: Plan, model: ModelConfig, stored: StoredFormats = UNQUANTISED) -> Taken:
    """Weights, and on a GPU also the KV cache: on the CPU its pages take memory only once they are used."""
    everyone = model.moe.router.num_experts * len(model.moe.layers)
    expert = model.expert_bytes(plan.expert_format, stored.experts)
    if plan.gpu is None:
        return Taken(model.weight_bytes(plan.dtype, plan.expert_format, stored), 0)
    kv = plan.num_pages * plan.page_size * model.kv_bytes_per_token(plan.dtype)
    on_gpu = dense_bytes(model, plan.dtype, stored) + plan.gpu.experts * expert + kv
    return Taken((everyone - plan.gpu.experts) * expert, on_gpu)


def memory_columns(plan: Taken, used: Taken) -> dict[str, Any]:
    """Bytes, and how many times as much as planned is used; None where nothing was planned."""
    return {
        "ram_planned": plan.ram, "ram_used": used.ram, "ram_ratio": _ratio(used.ram, plan.ram),
        "gpu_planned": plan.gpu, "gpu_used": used.gpu, "gpu_ratio": _ratio(used.gpu, plan.gpu),
    }  # fmt: skip


def _ratio(used: int, planned_bytes: int) -> float | None:
    return round(used / planned_bytes, 4) if planned_bytes else None
