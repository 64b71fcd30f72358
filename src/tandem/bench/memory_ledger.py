"""Memory of a model as planned, beside memory as measured: RAM of this process, and GPU memory."""

from __future__ import annotations

import dataclasses
import gc
from functools import cache
from pathlib import Path
from typing import Any

import torch

from tandem import _core
from tandem.kernels.free_memory import return_free_memory
from tandem.planner.choices.beside_gpu import host_share
from tandem.planner.expert_sizes import sizes_of
from tandem.planner.gpu_plan import dense_bytes
from tandem.planner.host_memory import host_memory
from tandem.planner.plan import Plan
from tandem.spec.model_config import ModelConfig, draft_experts, rope_bytes
from tandem.spec.stored import UNQUANTISED, StoredFormats

_STATUS = Path("/proc/self/status")
PROBE_BYTES = 32 << 20


def anonymous_bytes(status: Path = _STATUS) -> int:
    """RAM of this process that is no file's: packed weights, caches, scratch, Python."""
    lines = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
    return int(lines["RssAnon"].split()[0]) << 10


def gpu_bytes() -> int:
    """Bytes of tensors on the current GPU; 0 without one."""
    return int(torch.cuda.memory_allocated()) if torch.cuda.is_available() else 0


def pinned_bytes() -> int:
    """Bytes that PyTorch has pinned, in use or kept; 0 without a GPU."""
    stats = torch.cuda.host_memory_stats() if torch.cuda.is_available() else {}
    return int(stats.get("allocated_bytes.current", 0))


@cache
def counts_pinned() -> bool:
    """Whether the system counts memory that CUDA pins as this process's own; drivers differ."""
    if not torch.cuda.is_available():
        return True
    before = anonymous_bytes()
    block = torch.empty(PROBE_BYTES, dtype=torch.uint8, pin_memory=True).fill_(1)
    grown = anonymous_bytes() - before
    del block
    return_free_memory()
    return grown > PROBE_BYTES // 2


@dataclasses.dataclass(frozen=True, slots=True)
class UsedBytes:
    """Bytes of RAM and of GPU memory, and the parts of the RAM that is used.

    buffers: the C++ core's. pinned: PyTorch's. heap: what malloc has given out (CPU tensors, Python, compilers). rest:
    all else, less what nobody has touched of the buffers.
    """

    ram: int
    gpu: int
    parts: dict[str, int] = dataclasses.field(default_factory=dict)

    @classmethod
    def now(cls) -> UsedBytes:
        gc.collect()
        return_free_memory()
        inside, pinned = counts_pinned(), pinned_bytes()
        ram = anonymous_bytes() + (0 if inside else pinned)
        parts = {"buffers": _core.buffer_bytes(), "pinned": pinned, "heap": _core.heap_bytes()}
        return cls(ram, gpu_bytes(), parts | {"rest": ram - sum(parts.values())})

    def since(self, earlier: UsedBytes) -> UsedBytes:
        parts = {name: nbytes - earlier.parts.get(name, 0) for name, nbytes in self.parts.items()}
        return UsedBytes(self.ram - earlier.ram, self.gpu - earlier.gpu, parts)


def planned(plan: Plan, model: ModelConfig, stored: StoredFormats = UNQUANTISED) -> UsedBytes:
    """Weights, and on a GPU also rotary tables, what steps need and the KV cache: on the CPU its pages take memory only
    once they are used."""
    expert = model.expert_bytes(plan.expert_format, stored.experts)
    if plan.gpu is None:
        return UsedBytes(model.weight_bytes(plan.dtype, plan.expert_format, stored), 0)
    workers, steps, in_place = len(plan.cpus), plan.max_step_tokens, plan.experts_in_place
    pages = -(-plan.context_length // plan.page_size)
    sizes = sizes_of(model, plan.expert_format, stored.experts, plan.gpu.placement == "front-loading")
    share = host_share(model, plan.gpu, expert, workers, steps, pages, plan.fuse_shared_experts, in_place)
    routed_bytes, spare = (of(plan.gpu.sizes.experts) for of in (sizes.ram_bytes, sizes.spare_bytes))
    share = dataclasses.replace(share, routed_bytes=routed_bytes, spare_bytes=spare)
    host = host_memory(model, dataclasses.replace(share, tables=2 if plan.num_window_pages else 1))
    layout = model.state_layout(plan.dtype, draft_tokens=plan.draft_tokens)
    states = plan.num_pages * plan.page_size * layout.token_bytes + plan.num_slots * layout.slot_bytes
    if plan.num_window_pages:
        states -= (plan.num_pages - plan.num_window_pages) * plan.page_size * layout.window_token_bytes
    experts = sizes.gpu_bytes(plan.gpu.sizes.experts) + plan.gpu.sizes.draft_experts * draft_experts(model) * expert
    dense = dense_bytes(model, plan.dtype, stored, plan.gpu.embedding_in_ram)
    gpu_bytes = dense + experts + states + plan.gpu.sizes.exchange_bytes
    gpu_bytes += rope_bytes(model, plan.context_length)
    logits = (sum(plan.gpu.graph_sizes) + sum(plan.gpu.plain_graph_sizes)) * model.vocab * 4
    sums = plan.max_step_tokens * model.hidden * 4 if host.handoff else 0  # the CPU's sums
    return UsedBytes(host.total, gpu_bytes + logits + sums, host.parts())


def memory_columns(plan: UsedBytes, used: UsedBytes) -> dict[str, Any]:
    """Bytes, and how many times as much as planned is used; None where nothing was planned. counted: what is known by
    name of what is used, all but `rest`: mostly the driver's, 48 to 80 MB in one run on an H200."""
    named_bytes = sum(nbytes for name, nbytes in used.parts.items() if name != "rest")
    return {
        "ram_planned": plan.ram, "ram_used": used.ram, "ram_ratio": _ratio(used.ram, plan.ram),
        "ram_counted": named_bytes, "ram_counted_ratio": _ratio(named_bytes, plan.ram),
        "gpu_planned": plan.gpu, "gpu_used": used.gpu, "gpu_ratio": _ratio(used.gpu, plan.gpu),
        "ram_planned_parts": plan.parts, "ram_used_parts": used.parts,
    }  # fmt: skip


def _ratio(used: int, planned_bytes: int) -> float | None:
    return round(used / planned_bytes, 4) if planned_bytes else None
