"""`GpuOps`: `Ops` on one GPU: Triton kernels, and PyTorch's matrices. Activations are bfloat16."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from tandem.formats.codes import Blocks, Weight, WeightCodes
from tandem.formats.reference import decoded
from tandem.kernels.batch_layout import KernelBatch, TokenBatch
from tandem.kernels.cpu_ops import CpuOps
from tandem.kernels.gpu import dense_codes, mlp, norm
from tandem.kernels.gpu import rope as rotation
from tandem.kernels.gpu.attention_backends import AttentionBackend, attention_of
from tandem.kernels.gpu.dense_codes import GpuCodes
from tandem.kernels.gpu.expert_rows import ExpertActivation
from tandem.kernels.gpu.experts import GpuExperts, StepKind
from tandem.kernels.gpu.linear import GpuLinear
from tandem.kernels.gpu.mlp import GpuMLP
from tandem.kernels.gpu.pinned import read_rows
from tandem.kernels.gpu.prompts.products import UnpackScratch
from tandem.kernels.gpu.uploads import uploaded
from tandem.kernels.images import ByTorch
from tandem.kernels.ops import (
    NO_NORMS,
    Addend,
    HeadNorms,
    Lookup,
    Recorded,
    RopeTables,
    Step,
    SureRead,
)
from tandem.kernels.packed.experts import PackedExperts
from tandem.kernels.packed.matrix import PackedMatrix
from tandem.kernels.ranks.group import Group
from tandem.mechanisms.slices import bound_by
from tandem.spec.activation import SILU, Activation

LOOKUP_ROWS, LOOKUP_THREADS = 1 << 12, 8  # of a table, found at a time by each of so many threads


class StepTable(Protocol):
    """A table that is read by row, on the host before a step."""

    def begin(self, batch: TokenBatch, captured: bool) -> None: ...

    def copied(self, source: int, target: int) -> None:
        """One sequence's slot becomes another's copy."""
        ...


class GpuOps:
    """`Ops` on `device`; `cpu` packs expert weights and runs the experts that stay in CPU memory."""

    fuse_shared_add = True
    group: Group | None = None

    def __init__(
        self,
        device: torch.device,
        cpu: CpuOps,
        attention: AttentionBackend | None = None,
        deterministic: bool = False,
    ) -> None:
        """attention: Triton's where none is given. deterministic: a row has the same bits beside any others."""
        self.device, self.cpu = device, cpu
        self._attention = attention or attention_of("triton")
        self.pausable = (
            self._attention.pausable
        )  # a pass may stop between two layers while graphs are replayed
        self.warm: set[object] = set()  # shapes whose kernels for prompts are compiled
        self.tables: list[StepTable] = []  # of which steps read rows
        self._step, self.fixed = StepKind(each_row=deterministic), deterministic
        self.scratch = UnpackScratch()  # of all layers' experts with many rows

    def find_rows(self, batch: TokenBatch, captured: bool) -> None:
        """Rows of tables that the tokens of a batch in host memory name, before its layers run. captured: as a
        graph."""
        for table in self.tables:
            table.begin(batch, captured)

    def begin_step(self, batch: KernelBatch, captured: bool, overlapped: bool = False) -> None:
        """As `AttentionBackend.begin`. overlapped: graphs may run beside it."""
        self._attention.begin(batch, captured or overlapped)
        self._step.captured = captured

    def resident(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device)

    def lookup(self, find: Lookup, rows: int, in_ram: bool = False) -> Lookup:
        """A copy of the table, found by several threads, a few parts at a time."""
        parts = torch.arange(rows).split(LOOKUP_ROWS)
        shape, pinned = (rows, find(parts[0][:1]).shape[1]), in_ram and self.device.type == "cuda"
        device = torch.device("cpu") if in_ram else self.device
        table = torch.empty(shape, dtype=torch.bfloat16, device=device, pin_memory=pinned)
        with ThreadPoolExecutor(LOOKUP_THREADS, "tandem-lookup") as threads:
            for first in range(0, len(parts), LOOKUP_THREADS):
                group = parts[first : first + LOOKUP_THREADS]
                for ids, vectors in zip(group, threads.map(find, group), strict=True):
                    table[int(ids[0]) : int(ids[-1]) + 1].copy_(vectors if in_ram else _on_device(vectors, self))
        return partial(read_rows, table) if in_ram else lambda indices: table.index_select(0, indices)

    reads = staticmethod(dense_codes.readable)

    def linear(
        self, weight: Weight | Blocks, bias: Tensor | None = None, fmt: str = "bf16"
    ) -> GpuLinear | GpuCodes:
        if not isinstance(weight, WeightCodes):
            return GpuLinear(_on_device(weight, self), bias, fmt, self.device, self.fixed)
        if not self.reads(weight):
            return GpuLinear(decoded(weight), bias, fmt, self.device, self.fixed)
        packed = PackedMatrix.from_codes(self.cpu.workspace, weight)
        return GpuCodes(packed, bias, self.device, self.cpu.pool, self.fixed)

    def experts(
        self, num_experts: int, hidden: int, width: int, fmt: str = "bf16", activation: Activation = SILU
    ) -> GpuExperts:
        """All of them on the GPU."""
        return self.gpu_experts(torch.arange(num_experts, dtype=torch.int32), hidden, width, fmt, activation)

    def gpu_experts(
        self,
        slot_of: Tensor,
        hidden: int,
        width: int,
        fmt: str,
        activation: Activation = SILU,
        tables: tuple[Tensor, Tensor] | None = None,
    ) -> GpuExperts:
        """Those whose slot is not -1. tables: as `GpuExperts` has them."""

        def packer() -> PackedExperts:
            return PackedExperts(self.cpu.workspace, 1, hidden, width, fmt, activation)

        experts = GpuExperts(packer, ExpertActivation(width, activation), slot_of, self.device, tables)
        experts.step, experts.scratch = self._step, self.scratch
        return experts

    def mlp(self, hidden: int, width: int, fmt: str = "bf16", activation: Activation = SILU) -> GpuMLP:
        return GpuMLP(lambda weight: self.linear(weight, None, fmt), activation)

    def read_in_order(self, reads: Sequence[SureRead]) -> None:
        """Nothing is fetched ahead: a GPU's kernels hide their reads themselves."""

    def record(self, step: Step, x: Tensor, batch: KernelBatch) -> tuple[Tensor, Recorded | None]:
        """Calls the step. It is remembered as a CUDA graph, by whoever knows all of it (`engine/gpu_runner.py`)."""
        return step(x, batch), None

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return norm.rms_norm(x, weight, eps)

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, addend: Addend | None = None
    ) -> Tensor:
        return norm.rms_norm(x, weight, eps, residual, addend)

    def rope_store(
        self,
        qkv: Tensor,
        rope: RopeTables,
        batch: KernelBatch,
        k_pages: Tensor,
        v_pages: Tensor,
        heads: int,
        norms: HeadNorms = NO_NORMS,
    ) -> Tensor:
        return rotation.rope_store(qkv, rope, batch, (k_pages, v_pages), heads, norms)

    def attention(
        self,
        q: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        batch: KernelBatch,
        scale: float,
        window: int = 0,
        sinks: Tensor | None = None,
    ) -> Tensor:
        return self._attention(q, k_pages, v_pages, batch, scale, window, sinks)

    def bound(self, shape: object, *weights: object) -> Any:
        return bound_by(("gpu",), self, shape, weights)

    image_ops = ByTorch

    def gated(self, x: Tensor, gate: Tensor | None, out: Tensor | None = None) -> Tensor:
        return mlp.gated(x, gate, out)


def _on_device(weight: Tensor | Blocks, ops: GpuOps) -> Tensor:
    """[N, K] on the device, in the type that it is stored in."""
    return uploaded((weight,) if isinstance(weight, Tensor) else weight, ops.device, ops.cpu.pool)
