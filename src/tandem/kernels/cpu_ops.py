"""`CpuOps`: `Ops` on the C++ core.

A decode step makes hundreds of these calls, so each is as thin as it can be: allocate the result, call C++, which
checks every array. What a step's layers share (checked indices, head counts, routing rules) is made once and kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from tandem import _core
from tandem.errors import KernelError
from tandem.formats.codes import Blocks, Weight, WeightCodes
from tandem.kernels import gates
from tandem.kernels.batch_layout import KernelBatch
from tandem.kernels.batch_views import BatchViews
from tandem.kernels.cpu import PackedExperts, PackedHeads, PackedMatrix
from tandem.kernels.cpu_images import ImageThreads, OnThreads
from tandem.kernels.gates import without_gates
from tandem.kernels.in_memory import InMemory
from tandem.kernels.one_expert import OneExpert
from tandem.kernels.ops import (
    NO_NORMS,
    Addend,
    ColumnCopy,
    ColumnRun,
    HeadNorms,
    Recorded,
    RopeTables,
    Step,
    SureRead,
)
from tandem.kernels.recorded import OnlyAllocations, RecordedStep
from tandem.mechanisms.slices import bound_by
from tandem.spec.activation import SILU, Activation


def _norm_weight(x: Tensor, weight: Tensor | None) -> Tensor | None:
    """A norm's weight in x's dtype, or in float32."""
    if weight is None or weight.dtype in (x.dtype, torch.float32):
        return weight
    return weight.to(x.dtype)


AHEAD_BYTES_PER_WORKER = 1 << 20  # about an L2 cache
TILED = ("amx", "amx_standin")  # tiers whose algorithms for few and for many rows sum in another order


class CpuOps(InMemory):
    """`Ops` over one worker pool and one kernel tier. A batch must not change after its first use.

    int8_activations: layers of experts (not dense MLPs) round activations to int8; experts_in_place: those of bfloat16
    are used where they are given (see `PackedExperts`). deterministic: a row has the same bits in every batch on AMX,
    too: one algorithm for any number of rows, and none of them cut into digits. On other tiers it always has.
    """

    def __init__(
        self,
        pool: _core.WorkerPool,
        tier: str,
        int8_activations: bool = False,
        experts_in_place: bool = False,
        deterministic: bool = False,
    ) -> None:
        if tier not in (supported := _core.supported_tiers()):
            raise KernelError(f"this CPU cannot run tier {tier!r}; it can run {', '.join(supported)}")
        self.pool, self.tier = pool, tier
        self.int8_activations, self.experts_in_place = int8_activations, experts_in_place
        self.dense = _core.DenseOps(pool, tier)
        self.workspace = _core.Workspace(pool, tier, one_way=deterministic and tier in TILED)
        self._views = BatchViews()
        self.image_ops = partial(OnThreads, ImageThreads(pool, tier))

    def linear(self, weight: Weight | Blocks, bias: Tensor | None = None, fmt: str = "bf16") -> PackedMatrix:
        if isinstance(weight, WeightCodes):
            return PackedMatrix.from_codes(self.workspace, weight, bias)
        return PackedMatrix(self.workspace, weight, bias, fmt)

    def per_head(self, weights: Tensor, fmt: str = "bf16") -> PackedHeads:
        return PackedHeads(self.workspace, weights, fmt)

    def columns(self, runs: Sequence[ColumnRun]) -> ColumnCopy:
        return _core.Columns(self.pool, [(r.source, r.step, r.target, r.width) for r in runs]).copy

    def experts(
        self,
        num_experts: int,
        hidden: int,
        width: int,
        fmt: str = "bf16",
        activation: Activation = SILU,
        cpu_slots: int = 0,
    ) -> PackedExperts:
        """cpu_slots: experts that there is memory for, 0: all."""
        return PackedExperts(
            self.workspace, num_experts, hidden, width, fmt, activation, cpu_slots=cpu_slots,
            int8_activations=self.int8_activations, in_place=self.experts_in_place,
        )  # fmt: skip

    def mlp(self, hidden: int, width: int, fmt: str = "bf16", activation: Activation = SILU) -> OneExpert:
        return OneExpert(PackedExperts(self.workspace, 1, hidden, width, fmt, activation))

    def read_in_order(self, reads: Sequence[SureRead]) -> None:
        """Idle workers fetch the weights that follow, as many as their L2 caches hold."""
        packed = [_packed(read) for read in reads]
        limit = AHEAD_BYTES_PER_WORKER * len(self.pool)
        for i, (weights, _) in enumerate(packed):
            weights.read_next(_ahead([span for _, ranges in packed[i + 1 :] for span in ranges], limit))

    def record(self, step: Step, x: Tensor, batch: KernelBatch) -> tuple[Tensor, Recorded | None]:
        own, recording = x.clone(), _core.Recording()
        self._views.forget()
        with recording, OnlyAllocations() as torch_calls:
            computed = step(own, batch)
        refill = self._views.refilled(batch)
        self._views.forget()  # they are the recording's from now on
        if torch_calls.others or refill is None:
            return computed, None
        return computed, RecordedStep(recording, own, computed, refill)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out = torch.empty_like(x)
        self.dense.rms_norm(x, None, _norm_weight(x, weight), out, eps)
        return out

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, addend: Addend | None = None
    ) -> Tensor:
        x = x if addend is None else self.gated(*addend, x)
        out = torch.empty_like(x)
        self.dense.rms_norm(x, residual, _norm_weight(x, weight), out, eps)
        return out

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
        kv_heads, head_dim = k_pages.shape[2:]
        qkv = without_gates(qkv, heads, kv_heads, head_dim)
        q_norm, k_norm = _norm_weight(qkv, norms.q), _norm_weight(qkv, norms.k)
        sizes = (0 if q_norm is None else q_norm.numel(), 0 if k_norm is None else k_norm.numel())
        shape, view = (
            heads_of(heads, kv_heads, head_dim, *sizes, v_pages.shape[3]),
            self.view_of(batch, k_pages),
        )
        q = qkv.new_empty((qkv.shape[0], heads, head_dim))
        values = None if v_pages is k_pages else v_pages
        self.dense.rope_store(
            view, shape, qkv, rope.cos, rope.sin, q_norm, k_norm, k_pages, values, q, norms.eps
        )
        return q

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
        rows, heads, head_dim = q.shape
        width = v_pages.shape[3]  # of a head's values
        shape, view = heads_of(heads, k_pages.shape[2], head_dim, 0, 0, width), self.view_of(batch, k_pages)
        out = q.new_empty((rows, heads * width))
        values = None if v_pages is k_pages else v_pages
        self.dense.attention(view, shape, q, k_pages, values, out, scale, window, sinks)
        return out

    gated = staticmethod(gates.gated)

    def bound(self, shape: object, *weights: object) -> Any:
        return bound_by(("cpu", "torch"), self, shape, weights)

    def view_of(self, batch: KernelBatch, pages: Tensor | None = None) -> _core.BatchView:
        """The step's checked indices: its layers ask for the same few. pages: None where none are read."""
        return self._views.of(batch, pages)


@cache
def heads_of(*sizes: int) -> _core.Heads:
    return _core.Heads(*sizes)


def _packed(read: SureRead) -> tuple[PackedMatrix | PackedExperts, list[_core.ByteRange]]:
    weights = read.weights
    if isinstance(weights, PackedMatrix):
        return weights, [weights.bytes]
    assert isinstance(weights, PackedExperts), "weights of another Ops"
    return weights, weights.bytes(weights.num_experts - read.experts, read.experts)


def _ahead(following: Sequence[_core.ByteRange], limit: int) -> list[_core.ByteRange]:
    """The first of them that are `limit` bytes together, or one more."""
    total, ahead = 0, list[_core.ByteRange]()
    for span in following:
        if total >= limit or len(ahead) == _core.MAX_RANGES_AHEAD:
            break
        if span.bytes:
            ahead.append(span)
            total += span.bytes
    return ahead
