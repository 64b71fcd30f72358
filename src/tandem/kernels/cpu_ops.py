"""`CpuOps`: `Ops` on the C++ core.

A decode step makes hundreds of these calls, so each is as thin as it can be: allocate the result, call C++, which
checks every array. What a step's layers share (checked indices, head counts, routing rules) is made once and kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial

import torch
from torch import Tensor

from tandem import _core
from tandem.config.activation import SILU, Activation
from tandem.errors import KernelError
from tandem.formats.codes import Blocks, Weight, WeightCodes
from tandem.kernels import gates
from tandem.kernels.batch_layout import BatchLayout
from tandem.kernels.batch_views import BatchViews
from tandem.kernels.cpu import PackedExperts, PackedHeads, PackedMatrix
from tandem.kernels.cpu_images import ByCore
from tandem.kernels.gates import without_gates
from tandem.kernels.in_memory import InMemory
from tandem.kernels.one_expert import OneExpert
from tandem.kernels.ops import (
    NO_NORMS,
    Addend,
    ColumnRun,
    Columns,
    HeadNorms,
    LatentSizes,
    LatentWeights,
    Recorded,
    Rope,
    Routing,
    Step,
    SureRead,
    Tally,
)
from tandem.kernels.recorded import OnlyAllocations, RecordedStep
from tandem.mechanisms.delta_net.shape import DeltaRule
from tandem.mechanisms.delta_net.torch import Delta, DeltaState, DeltaWeights, Gates, columns_of, made
from tandem.mechanisms.latent.absorbed import AbsorbedHeads
from tandem.mechanisms.recurrence.cpu import CpuFolds
from tandem.mechanisms.router import torch as routing
from tandem.mechanisms.router.shape import Router
from tandem.mechanisms.shared_kv.shape import SharedKv
from tandem.mechanisms.shared_kv.torch import SharedKvHeads
from tandem.mechanisms.shared_kv.weights import SharedKvWeights
from tandem.mechanisms.streams.cpu import CpuStreams
from tandem.mechanisms.streams.shape import Hyper
from tandem.mechanisms.streams.torch import HyperStreams, HyperWeights
from tandem.mechanisms.token_index.cpu import CpuChosenAttention, CpuPooledIndex, CpuTokenIndex
from tandem.mechanisms.token_index.pooled import PooledIndex, PoolWeights
from tandem.mechanisms.token_index.shape import Index
from tandem.mechanisms.token_index.torch import IndexWeights, TokenIndex


def _beside(x: Tensor, weight: Tensor | None) -> Tensor | None:
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
        self._dense = _core.DenseOps(pool, tier)
        self.workspace = _core.Workspace(pool, tier, one_way=deterministic and tier in TILED)
        self._rules: dict[tuple[int, int], tuple[Router, _core.Route]] = {}
        self._views = BatchViews()
        self.image_attention = partial(ByCore, self._dense)

    def linear(self, weight: Weight | Blocks, bias: Tensor | None = None, fmt: str = "bf16") -> PackedMatrix:
        if isinstance(weight, WeightCodes):
            return PackedMatrix.from_codes(self.workspace, weight, bias)
        return PackedMatrix(self.workspace, weight, bias, fmt)

    def per_head(self, weights: Tensor, fmt: str = "bf16") -> PackedHeads:
        return PackedHeads(self.workspace, weights, fmt)

    def columns(self, runs: Sequence[ColumnRun]) -> Columns:
        return _core.Columns(self.pool, [(r.source, r.step, r.target, r.width) for r in runs]).copy

    def latent(self, sizes: LatentSizes, weights: LatentWeights, fmt: str = "bf16") -> AbsorbedHeads:
        return AbsorbedHeads(self, CpuChosenAttention(self), sizes, weights, fmt)

    def experts(
        self,
        num_experts: int,
        hidden: int,
        width: int,
        fmt: str = "bf16",
        activation: Activation = SILU,
        places: int = 0,
    ) -> PackedExperts:
        """places: experts that there is memory for, 0: all."""
        return PackedExperts(
            self.workspace, num_experts, hidden, width, fmt, activation, places=places,
            int8_activations=self.int8_activations, in_place=self.experts_in_place,
        )  # fmt: skip

    def mlp(self, hidden: int, width: int, fmt: str = "bf16", activation: Activation = SILU) -> OneExpert:
        return OneExpert(PackedExperts(self.workspace, 1, hidden, width, fmt, activation))

    def read_in_order(self, reads: Sequence[SureRead]) -> None:
        """Idle workers fetch the weights that follow, as many as their L2 caches hold."""
        packed = [_packed(read) for read in reads]
        limit = AHEAD_BYTES_PER_WORKER * len(self.pool)
        for i, (weights, _) in enumerate(packed):
            weights.read_next(_ahead([sure for _, ranges in packed[i + 1 :] for sure in ranges], limit))

    def record(self, step: Step, x: Tensor, batch: BatchLayout) -> tuple[Tensor, Recorded | None]:
        own, recording = x.clone(), _core.Recording()
        self._views.forget()
        with recording, OnlyAllocations() as torch_calls:
            result = step(own, batch)
        changing = self._views.refilled(batch)
        self._views.forget()  # they are the recording's from now on
        if torch_calls.others or changing is None:
            return result, None
        return result, RecordedStep(recording, own, result, changing)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out = torch.empty_like(x)
        self._dense.rms_norm(x, None, _beside(x, weight), out, eps)
        return out

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, beside: Addend | None = None
    ) -> Tensor:
        x = x if beside is None else self.gated(*beside, x)
        out = torch.empty_like(x)
        self._dense.rms_norm(x, residual, _beside(x, weight), out, eps)
        return out

    def rope_store(
        self,
        qkv: Tensor,
        rope: Rope,
        batch: BatchLayout,
        k_pages: Tensor,
        v_pages: Tensor,
        heads: int,
        norms: HeadNorms = NO_NORMS,
    ) -> Tensor:
        kv_heads, head_dim = k_pages.shape[2:]
        qkv = without_gates(qkv, heads, kv_heads, head_dim)
        q_norm, k_norm = _beside(qkv, norms.q), _beside(qkv, norms.k)
        sizes = (0 if q_norm is None else q_norm.numel(), 0 if k_norm is None else k_norm.numel())
        shape, view = (
            _heads(heads, kv_heads, head_dim, *sizes, v_pages.shape[3]),
            self.view_of(batch, k_pages),
        )
        q = qkv.new_empty((qkv.shape[0], heads, head_dim))
        values = None if v_pages is k_pages else v_pages
        self._dense.rope_store(
            view, shape, qkv, rope.cos, rope.sin, q_norm, k_norm, k_pages, values, q, norms.eps
        )
        return q

    def attention(
        self,
        q: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        batch: BatchLayout,
        scale: float,
        window: int = 0,
        sinks: Tensor | None = None,
    ) -> Tensor:
        rows, heads, head_dim = q.shape
        width = v_pages.shape[3]  # of a head's values
        shape, view = _heads(heads, k_pages.shape[2], head_dim, 0, 0, width), self.view_of(batch, k_pages)
        out = q.new_empty((rows, heads * width))
        values = None if v_pages is k_pages else v_pages
        self._dense.attention(view, shape, q, k_pages, values, out, scale, window, sinks)
        return out

    gated = staticmethod(gates.gated)

    def shared_kv(self, shape: SharedKv, weights: SharedKvWeights, fmt: str = "bf16") -> SharedKvHeads:
        return SharedKvHeads(shape, weights, OwnKeys(self._dense), self.per_head(weights.groups, fmt))

    def delta_rule(self, shape: DeltaRule, weights: DeltaWeights) -> Delta:
        return _CpuDelta(self, shape, weights)

    @property
    def folds(self) -> CpuFolds:
        return CpuFolds(_core.RecurrentOps(self.pool, self.tier), self.view_of)

    def streams(self, shape: Hyper, weights: HyperWeights, hidden: int) -> HyperStreams:
        return CpuStreams(self.pool, self.tier, shape, weights, hidden)

    def token_index(self, shape: Index, weights: IndexWeights) -> TokenIndex:
        return CpuTokenIndex(self, shape, weights)

    def pooled_index(self, shape: Index, weights: PoolWeights) -> PooledIndex:
        return CpuPooledIndex(self, shape, weights)

    def route(
        self,
        logits: Tensor,
        router: Router,
        bias: Tensor | None = None,
        shared: int = 0,
        tally: Tally | None = None,
        places: Tensor | None = None,
        chosen: Tensor | None = None,
    ) -> Routing:
        if routing.in_torch(router, "cpu"):
            return routing.route(logits, router, bias, shared, tally, places, chosen)
        logits = logits.float().contiguous()
        key = (id(router), shared)
        if key not in self._rules:
            self._rules[key] = (router, _rule(router, shared))  # holds the router: its id stays its own
        shape = (logits.shape[0], router.top_k + shared)
        ids, weights = logits.new_empty(shape, dtype=torch.int32), logits.new_empty(shape)
        counted = () if tally is None else (tally.tokens, tally.seen, tally.chosen)
        self._dense.route(self._rules[key][1], logits, bias, ids, weights, *counted)
        return Routing(ids, weights, None if places is None else places[ids])

    def view_of(self, batch: BatchLayout, pages: Tensor | None = None) -> _core.BatchView:
        """The step's checked indices: its layers ask for the same few. pages: None where none are read."""
        return self._views.of(batch, pages)


class _CpuDelta:
    """`Delta` on the C++ core, token by token: 2 % of a Qwen3-Next's work, for results that no cut changes."""

    def __init__(self, ops: CpuOps, shape: DeltaRule, weights: DeltaWeights) -> None:
        self._ops, self._eps = ops, shape.norm.eps
        self._weights = weights._replace(conv=weights.conv.contiguous())
        gates = 2 * shape.v_heads
        self._shape = _core.DeltaShape(
            shape.k_heads, shape.v_heads, shape.k_dim, shape.v_dim, shape.conv, columns_of(shape),
            shape.channels + shape.values, gates,
        )  # fmt: skip

    def __call__(self, projected: Tensor, gates: Gates, batch: BatchLayout, state: DeltaState) -> Tensor:
        gates = made(gates)
        out = projected.new_empty((len(projected), state.memory.shape[1] * state.memory.shape[3]))
        self._ops._dense.delta_rule(
            self._ops.view_of(batch), self._shape, projected, gates, *self._weights, *state, out, self._eps
        )
        return out


class OwnKeys:
    """`shared_kv.heads.Attend` on the C++ core: every row is a sequence of its own, whose one page is its keys."""

    def __init__(self, dense: _core.DenseOps) -> None:
        self._dense = dense

    def __call__(self, q: Tensor, keys: Tensor, counts: Tensor, scale: float, sinks: Tensor) -> Tensor:
        rows, width, head_dim = keys.shape
        each = torch.arange(rows + 1, dtype=torch.int32)
        view = _core.BatchView(
            positions=counts - 1, cache_slots=each[:rows].long() * width, query_starts=each, seq_lens=counts.int(),
            block_tables=each[:rows, None], page_size=width, num_pages=rows, slots=torch.zeros(rows, dtype=torch.int32),
        )  # fmt: skip
        out = torch.empty_like(q)
        shape, pages = _heads(q.shape[1], 1, head_dim, 0, 0), keys.view(rows, width, 1, head_dim)
        self._dense.attention(view, shape, q, pages, None, out.view(rows, -1), scale, 0, sinks)
        return out


@cache
def _heads(*sizes: int) -> _core.Heads:
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
    for sure in following:
        if total >= limit or len(ahead) == _core.MAX_RANGES_AHEAD:
            break
        if sure.bytes:
            ahead.append(sure)
            total += sure.bytes
    return ahead


def _rule(router: Router, shared: int) -> _core.Route:
    rule = _core.Route(
        experts=router.num_experts,
        top_k=router.top_k,
        groups=router.num_groups,
        top_groups=router.top_groups,
        shared=shared,
        sigmoid=router.score == "sigmoid",
        normalize=router.normalize,
        group_by_top2=router.group_score == "top2",
        scale=router.scale,
        epsilon=router.epsilon,
    )
    if router.least_sum:
        rule.least_sum = router.least_sum
    return rule
