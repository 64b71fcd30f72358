"""CPU memory of a model on a GPU, in addition to its process: the only place that does this sum.

Copies that come back from the GPU are left out: whole rows of logits (`engine/sampling/logits.py`), counts of experts
(`experts/usage/expert_usage.py`), and the tables' image (`experts/slot_tables.py`).

Loading takes two pinned buffers of 64 MiB more (`kernels/gpu/uploads.py`). They fit into what plans leave free, and are
given back afterwards.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from tandem.flags.engine_config import EngineConfig
from tandem.machine.machine import Machine
from tandem.planner.forecast.ledger import RAM, Ledger, LedgerEntry, ledger
from tandem.planner.memory import GRAMMAR_BYTES, GRAMMAR_WORDS, gib, ram_fraction
from tandem.planner.vision_costs import pixel_entries
from tandem.spec.model_config import ModelConfig

SCRATCH_BYTES_PER_WORKER = (1152 + 1056 + 2048) << 10  # of csrc/ops/workspace.cc

# What CUDA's driver keeps beside graphs, and PyTorch and Python for a model: 48 + 2 MiB with one graph (measured on an
# H200; with several not measured).
GRAPH_BYTES = 50 << 20
INPUT_ALIGNED_BYTES = 128


@dataclass(frozen=True, slots=True)
class HostShare:
    """Input of the sum: sizes that CPU memory next to a GPU depends on."""

    gpu_experts: int  # (layer, expert) pairs
    expert_bytes: int  # of one, a mean over the layers
    workers: int
    step_tokens: int  # of the largest step
    graph_sizes: tuple[int, ...]  # rows of each graph
    pages: int  # of the longest sequence
    top_k: int
    live: bool = False  # experts may change places
    in_place: bool = False  # those in CPU memory are used where the checkpoint has them
    deferred: bool = False  # some are added one layer later, for which graphs' hand-off has two halves
    tables: int = 1  # kinds of pages: 2 where layers that see a window have their own
    drafts: int = 0  # a draft layer's experts that are in CPU memory
    routed_bytes: int | None = None  # of the routed experts in CPU memory; None: all layers' are alike
    spare_bytes: int | None = None  # of places for experts that move; None: one in each layer
    embedding_bytes: int = 0  # of the table whose rows a GPU reads there
    table_bytes: int = 0  # of tables that are read by row, in memory
    token_row_bytes: int = 0  # of their rows that a token reads
    handoffs: int = 1  # one a stage, of GPUs that have some layers each

    @property
    def graph_tokens(self) -> int:
        """Rows of the largest CUDA graph; 0: there is none."""
        return max(self.graph_sizes, default=0)


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Bytes. A long prompt makes the experts' shared scratch grow by 0.4 GiB at most, which is kept."""

    experts: int  # packed, and all biases
    spare: int  # places for those that move, at most (`ExpertSizes.spare_bytes`)
    scratch: int  # of the workers
    handoff: int  # pinned, between the GPU and the CPU's experts
    inputs: int  # pinned, of graphs
    graphs: int  # the driver's
    embedding: int = 0  # pinned
    tables: int = 0
    rows: int = 0  # pinned: a step's rows of tables, and those of each graph

    @property
    def total(self) -> int:
        return sum(self.parts().values())

    def parts(self) -> dict[str, int]:
        return asdict(self)

    def texts(self) -> tuple[str, str]:
        """As the plan says it."""
        inside = [f"{gib(nbytes)} {name}" for name, nbytes in self.parts().items() if nbytes]
        return gib(self.total), ", ".join(inside) or "every expert is on the GPU"


def host_memory(model: ModelConfig, share: HostShare) -> HostMemory:
    ram_experts = model.routed_experts - share.gpu_experts + share.drafts
    inputs = sum(
        pinned_bytes(graph_input_bytes(size, share.pages, share.tables, model.vision is not None))
        + pinned_bytes(graph_mask_bytes(size))
        for size in share.graph_sizes
    )
    graphs = GRAPH_BYTES if share.graph_sizes else 0
    embedding = pinned_bytes(share.embedding_bytes) if share.embedding_bytes else 0
    rows = sum(pinned_bytes(n * share.token_row_bytes) for n in (share.step_tokens, *share.graph_sizes))
    last = embedding, share.table_bytes, rows if share.token_row_bytes else 0
    if ram_experts <= 0:
        return HostMemory(0, 0, 0, 0, inputs, graphs, *last)
    packed = ram_experts * share.expert_bytes
    if share.routed_bytes is not None:
        packed = share.routed_bytes + share.drafts * share.expert_bytes
    spare = share.spare_bytes
    if spare is None:
        spare = len(model.moe_layers) * share.expert_bytes
    return HostMemory(
        (0 if share.in_place else packed) + model.expert_bias_bytes, spare if share.live else 0,
        share.workers * SCRATCH_BYTES_PER_WORKER, _handoff_bytes(model.expert_channels, share), inputs, graphs,
        *last,
    )  # fmt: skip


def _handoff_bytes(hidden: int, share: HostShare) -> int:
    """Pinned bytes of `experts.handoff`: x, chosen experts, their weights, and the result; of graphs in one block."""
    each = 2 * hidden, 4 * share.top_k, 4 * share.top_k, 4 * hidden
    outside = sum(pinned_bytes(share.step_tokens * nbytes) for nbytes in each)
    inside = share.graph_tokens * sum(each) * (2 if share.deferred else 1)
    return outside * share.handoffs + (pinned_bytes(inside) if share.graph_tokens else 0)


def graph_input_bytes(size: int, pages: int, tables: int = 1, turning: bool = False) -> int:
    """Input bytes of a graph's batch of `size` rows.

    Each row has a token, a position and a place in each table of pages, of 64 bits. Its length, its slot, its count
    to fold and its pages follow, of 32. One number of 32 is for all. turning: rows may turn by other numbers than
    their positions, one more of 64.
    """
    return graph_wide_bytes(size, tables + turning) + 4 * (size * (3 + tables * pages) + 1)


def graph_mask_bytes(size: int) -> int:
    """Bytes of the places of masks of a graph's rows, and of whether each was computed."""
    return 8 * (size + 2)


def graph_wide_bytes(size: int, tables: int = 1) -> int:
    """Bytes of a graph's input numbers of 64 bits, with padding up to those of 32."""
    return -(-(2 + tables) * 8 * size // INPUT_ALIGNED_BYTES) * INPUT_ALIGNED_BYTES


def pinned_bytes(nbytes: int) -> int:
    """PyTorch pins memory in powers of two."""
    return 1 << max(0, nbytes - 1).bit_length()


_HOST_WORDS = {
    "experts": "packed experts in CPU memory", "spare": "places for experts that move", "scratch": "of the threads",
    "handoff": "pinned, between GPU and CPU", "inputs": "pinned, of CUDA graphs", "graphs": "CUDA graphs, the driver's",
    "embedding": "pinned, whose rows the GPU reads", "tables": "of n-grams, read by row",
    "rows": "pinned, of tables, that a step reads",
}  # fmt: skip


def host_ledger(host: HostMemory, config: EngineConfig, model: ModelConfig, machine: Machine) -> Ledger:
    """Ledger of the CPU memory that a model on a GPU takes."""
    entries = [LedgerEntry(name, nbytes, _HOST_WORDS[name]) for name, nbytes in host.parts().items()]
    entries.append(LedgerEntry("compiled grammars", GRAMMAR_BYTES, GRAMMAR_WORDS))
    entries += pixel_entries(model, machine.available_memory)
    return ledger(RAM, entries, int(machine.available_memory * ram_fraction(config)), machine.available_memory)
