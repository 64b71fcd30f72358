"""`CpuOps`: `Ops` on the C++ core. Shapes and types are checked here, indices once per step in `BatchView`.

Tensors cross into C++ as addresses: importing three torch tensors through DLPack costs 9 µs a call, three
`data_ptr()` 0.3 µs, and a decode step makes hundreds of calls.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tandem import _core
from tandem.config.model_config import RouterConfig
from tandem.errors import KernelError
from tandem.kernels.cpu import PackedExperts, PackedMatrix
from tandem.kernels.ops import BatchLayout, Rope, Routing

ACTIVATIONS = (torch.bfloat16, torch.float32)


def _is_bf16(name: str, x: Tensor) -> bool:
    """Whether x is bfloat16 and not float32; anything that the kernels cannot read is an error."""
    if x.dtype not in ACTIVATIONS or not x.is_contiguous() or x.device.type != "cpu":
        raise KernelError(
            f"{name} must be a contiguous CPU tensor of bfloat16 or float32, not {x.dtype} "
            f"{tuple(x.shape)} with strides {x.stride()} on {x.device}"
        )
    return x.dtype is torch.bfloat16


def _expect(ok: bool, message: str) -> None:
    if not ok:
        raise KernelError(message)


def _as_weight(weight: Tensor, x: Tensor) -> Tensor:
    """`weight` as the kernels read it beside x: x's dtype, contiguous."""
    if weight.dtype is x.dtype and weight.is_contiguous():
        return weight
    return weight.to(x.dtype).contiguous()


class CpuOps:
    """`Ops` over one worker pool and one kernel tier. A batch must not change after its first use."""

    def __init__(self, pool: _core.WorkerPool, tier: str) -> None:
        if tier not in (supported := _core.supported_tiers()):
            raise KernelError(f"this CPU cannot run tier {tier!r}; it can run {', '.join(supported)}")
        self.pool, self.tier = pool, tier
        self._dense = _core.DenseOps(pool, tier)
        self._workspace = _core.Workspace(pool, tier)
        self._heads: dict[tuple[int, ...], _core.Heads] = {}
        self._batch: BatchLayout | None = None
        self._view: _core.BatchView | None = None
        self._view_pages = (0, 0)

    def linear(self, weight: Tensor, bias: Tensor | None = None, fmt: str = "bf16") -> PackedMatrix:
        return PackedMatrix(self._workspace, weight, bias, fmt)

    def experts(
        self, num_experts: int, hidden: int, width: int, fmt: str = "bf16", activation: str = "silu"
    ) -> PackedExperts:
        return PackedExperts(self._workspace, num_experts, hidden, width, fmt, activation)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._norm(x, None, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        same = residual.shape == x.shape and residual.dtype is x.dtype and residual.is_contiguous()
        _expect(same, "add_rms_norm: x and residual must have one shape and dtype, and be contiguous")
        return self._norm(x, residual, weight, eps)

    def _norm(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        bf16 = _is_bf16("rms_norm: x", x)
        n = x.shape[-1]
        _expect(weight.numel() == n, f"rms_norm: weight must have {n} elements, not {weight.numel()}")
        weight = _as_weight(weight, x)
        out = torch.empty_like(x)
        added = 0 if residual is None else residual.data_ptr()
        rows = x.numel() // n if n else 0
        self._dense.rms_norm(x.data_ptr(), added, weight.data_ptr(), out.data_ptr(), rows, n, eps, bf16)
        return out

    def rope_store(
        self,
        qkv: Tensor,
        rope: Rope,
        batch: BatchLayout,
        k_pages: Tensor,
        v_pages: Tensor,
        *,
        heads: int,
        kv_heads: int,
        head_dim: int,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        eps: float = 1e-6,
    ) -> Tensor:
        bf16 = _is_bf16("rope_store: qkv", qkv)
        rows, columns = qkv.shape
        view = self._view_of(batch, k_pages, v_pages, qkv.dtype, kv_heads, head_dim, rows)
        _expect(columns == (heads + 2 * kv_heads) * head_dim, "rope_store: qkv must be [T, (H + 2G) * D]")
        cos, sin = rope.cos, rope.sin
        _expect(
            cos.dtype is sin.dtype is torch.float32
            and cos.shape == sin.shape
            and cos.is_contiguous()
            and sin.is_contiguous()
            and 2 * cos.shape[1] <= head_dim,
            "rope_store: rotary tables must be contiguous float32 [max_positions, rotary_dim / 2]",
        )
        q_norm = None if q_norm is None else _as_weight(q_norm, qkv)
        k_norm = None if k_norm is None else _as_weight(k_norm, qkv)
        shape = self._shape_of(heads, kv_heads, head_dim, q_norm, k_norm)
        q = qkv.new_empty((rows, heads, head_dim))
        self._dense.rope_store(
            view, shape, qkv.data_ptr(), cos.data_ptr(), sin.data_ptr(), cos.shape[0], cos.shape[1],
            0 if q_norm is None else q_norm.data_ptr(), 0 if k_norm is None else k_norm.data_ptr(),
            k_pages.data_ptr(), v_pages.data_ptr(), q.data_ptr(), eps, bf16,
        )  # fmt: skip
        return q

    def attention(
        self,
        q: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        batch: BatchLayout,
        scale: float,
        window: int = 0,
    ) -> Tensor:
        bf16 = _is_bf16("attention: q", q)
        rows, heads, head_dim = q.shape
        kv_heads = k_pages.shape[2]
        view = self._view_of(batch, k_pages, v_pages, q.dtype, kv_heads, head_dim, rows)
        shape = self._shape_of(heads, kv_heads, head_dim, None, None)
        out = q.new_empty((rows, heads * head_dim))
        self._dense.attention(
            view,
            shape,
            q.data_ptr(),
            k_pages.data_ptr(),
            v_pages.data_ptr(),
            out.data_ptr(),
            scale,
            window,
            bf16,
        )
        return out

    def route(self, logits: Tensor, router: RouterConfig, bias: Tensor | None = None) -> Routing:
        _expect(logits.dtype is torch.float32 and logits.is_contiguous(), "route: logits must be float32")
        rows, experts = logits.shape
        _expect(1 <= router.top_k <= experts, f"route: top_k {router.top_k} of {experts} experts")
        groups_fit = experts % router.num_groups == 0 and 1 <= router.top_groups <= router.num_groups
        reachable = router.top_groups * (experts // router.num_groups) >= router.top_k
        _expect(groups_fit and reachable, f"route: {router.num_groups} groups do not fit {experts} experts")
        if bias is not None:
            _expect(bias.numel() == experts, f"route: bias must have {experts} elements")
            bias = bias.float().contiguous()
        ids = logits.new_empty((rows, router.top_k), dtype=torch.int32)
        weights = logits.new_empty((rows, router.top_k))
        self._dense.route(
            rows, logits.data_ptr(), 0 if bias is None else bias.data_ptr(), ids.data_ptr(), weights.data_ptr(),
            experts, router.top_k, router.num_groups, router.top_groups, router.score == "sigmoid",
            router.normalize, router.group_score == "top2", router.scale, router.epsilon,
        )  # fmt: skip
        return Routing(ids, weights)

    def _shape_of(
        self, heads: int, kv_heads: int, head_dim: int, q_norm: Tensor | None, k_norm: Tensor | None
    ) -> _core.Heads:
        sizes = (0 if q_norm is None else q_norm.numel(), 0 if k_norm is None else k_norm.numel())
        key = (heads, kv_heads, head_dim, *sizes)
        if key not in self._heads:
            _expect(heads % kv_heads == 0, f"{heads} heads do not share {kv_heads} kv heads evenly")
            for size, count in zip(sizes, (heads, kv_heads), strict=True):
                _expect(
                    size in (0, head_dim, count * head_dim),
                    f"a head norm must have {head_dim} or {count * head_dim} elements, not {size}",
                )
            self._heads[key] = _core.Heads(*key)
        return self._heads[key]

    def _view_of(
        self,
        batch: BatchLayout,
        k_pages: Tensor,
        v_pages: Tensor,
        dtype: torch.dtype,
        kv_heads: int,
        head_dim: int,
        rows: int,
    ) -> _core.BatchView:
        """The step's checked indices, made once per batch: every layer of a step asks for the same."""
        pages = k_pages.shape
        fits = pages[2:] == (kv_heads, head_dim) and pages == v_pages.shape
        _expect(
            fits
            and k_pages.dtype is v_pages.dtype is dtype
            and k_pages.is_contiguous()
            and v_pages.is_contiguous(),
            f"KV pages must be contiguous {dtype} [num_pages, page_size, {kv_heads}, {head_dim}]",
        )
        if self._view is None or self._batch is not batch or self._view_pages != pages[:2]:
            self._view = _make_view(batch, pages[1], pages[0])
            self._batch, self._view_pages = batch, (pages[0], pages[1])
        _expect(len(batch.positions) == rows, f"the batch has {len(batch.positions)} rows, x has {rows}")
        return self._view


def _make_view(batch: BatchLayout, page_size: int, num_pages: int) -> _core.BatchView:
    positions, slots = batch.positions.long().contiguous(), batch.cache_slots.long().contiguous()
    starts, lens = batch.query_starts.int().contiguous(), batch.seq_lens.int().contiguous()
    tables = batch.block_tables.int().contiguous()
    same = len(slots) == len(positions) and len(starts) == len(lens) + 1 == len(tables) + 1
    _expect(same, "batch: the index tensors' lengths do not fit each other")
    try:
        return _core.BatchView(
            positions.data_ptr(), slots.data_ptr(), len(positions), starts.data_ptr(), lens.data_ptr(), len(lens),
            tables.data_ptr(), tables.shape[1], page_size, num_pages,
        )  # fmt: skip
    except ValueError as error:
        raise KernelError(str(error)) from None
