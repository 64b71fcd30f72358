"""What a model on a GPU takes of CPU memory, beside its process: the only place that does this sum.

While it is loaded, two pinned buffers of 64 MiB come to that (`kernels/gpu/uploads.py`), for which memory that plans
leave free has room; they are given back afterwards.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from tandem.config.memory import gib
from tandem.config.model_config import ModelConfig

SCRATCH_BYTES_PER_WORKER = (512 + 1056 + 4096) << 10  # of csrc/ops/workspace.cc

# What CUDA's driver keeps beside graphs, and PyTorch and Python for a model: 48 + 2 MiB with one graph (measured on an
# H200; with several not measured).
GRAPH_BYTES = 50 << 20


@dataclass(frozen=True, slots=True)
class HostShare:
    """What decides it. on_gpu: (layer, expert) pairs there; live: experts may change places; in_place: those in CPU
    memory are used where the checkpoint has them; step_tokens, graph_tokens: of the largest step and graph."""

    on_gpu: int
    expert_bytes: int
    workers: int
    step_tokens: int
    graph_tokens: int
    top_k: int
    live: bool = False
    in_place: bool = False


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Bytes. experts: packed ones; spare: places for those that move; scratch: of the workers; handoff: pinned, between
    the GPU and the CPU's experts; graphs: the driver's. Prompts take more scratch while they are computed."""

    experts: int
    spare: int
    scratch: int
    handoff: int
    graphs: int

    @property
    def total(self) -> int:
        return self.experts + self.spare + self.scratch + self.handoff + self.graphs

    def parts(self) -> dict[str, int]:
        return asdict(self)

    def texts(self) -> tuple[str, str]:
        """As the plan says it."""
        inside = [f"{gib(nbytes)} {name}" for name, nbytes in self.parts().items() if nbytes]
        return gib(self.total), ", ".join(inside) or "every expert is on the GPU"


def host_memory(model: ModelConfig, share: HostShare) -> HostMemory:
    everyone = model.moe.router.num_experts * len(model.moe.layers)
    graphs = GRAPH_BYTES if share.graph_tokens else 0
    if share.on_gpu >= everyone:
        return HostMemory(0, 0, 0, 0, graphs)
    packed = 0 if share.in_place else everyone - share.on_gpu
    spare = len(model.moe.layers) if share.live else 0
    return HostMemory(
        packed * share.expert_bytes, spare * share.expert_bytes, share.workers * SCRATCH_BYTES_PER_WORKER,
        _handoff_bytes(model.hidden, share), graphs,
    )  # fmt: skip


def _handoff_bytes(hidden: int, share: HostShare) -> int:
    """Of `experts.handoff`: x, the chosen experts and their weights, and the result; of graphs in one block."""
    each = 2 * hidden, 4 * share.top_k, 4 * share.top_k, 4 * hidden
    outside = sum(pinned_bytes(share.step_tokens * nbytes) for nbytes in each)
    return outside + (pinned_bytes(share.graph_tokens * sum(each)) if share.graph_tokens else 0)


def pinned_bytes(nbytes: int) -> int:
    """PyTorch pins memory in powers of two."""
    return 1 << max(0, nbytes - 1).bit_length()
