"""`TorchOps`: every operation of `Ops` in plain torch. The oracle of the C++ kernels, and a CPU fallback.

Quantised formats are rounded to their grid at load and kept as float32, so `TorchOps` also says what a packed kernel
of that format must compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.errors import KernelError
from tandem.formats.codes import Blocks, Weight, WeightCodes
from tandem.formats.cut import one_tensor
from tandem.formats.reference import decoded
from tandem.kernels import gates
from tandem.kernels.batch_layout import KernelBatch
from tandem.kernels.fit import as_packed
from tandem.kernels.gates import without_gates
from tandem.kernels.images import ByTorch
from tandem.kernels.in_memory import InMemory
from tandem.kernels.one_expert import OneExpert
from tandem.kernels.ops import (
    NO_NORMS,
    Addend,
    ColumnCopy,
    ColumnRun,
    ExpertBiases,
    HeadNorms,
    Recorded,
    RopeTables,
    Step,
    SureRead,
)
from tandem.mechanisms.slices import bound_by
from tandem.spec.activation import SILU, Activation


def round_to_format(weight: Weight, fmt: str) -> Tensor:
    """weight [N, K] as it is held: bf16 or f32 in that dtype; int8, int4 and codes dequantised, f32."""
    if isinstance(weight, WeightCodes):
        return decoded(weight)
    if fmt in ("bf16", "f32"):
        return weight.to(torch.bfloat16 if fmt == "bf16" else torch.float32).clone()
    return as_packed(weight, fmt)


class TorchLinear:
    """`Linear` over `torch.nn.functional.linear`."""

    def __init__(self, weight: Weight, bias: Tensor | None, fmt: str) -> None:
        self.weight = round_to_format(weight, fmt)
        self.bias = None if bias is None else bias.float().clone()
        self.out_features, self.in_features = self.weight.shape

    def __call__(self, x: Tensor, out_dtype: torch.dtype | None = None, out: Tensor | None = None) -> Tensor:
        y = self._product(x, (out_dtype or x.dtype) if out is None else out.dtype)
        return y if out is None else out.copy_(y)

    def _product(self, x: Tensor, out_dtype: torch.dtype) -> Tensor:
        if x.dtype == out_dtype == self.weight.dtype:
            return F.linear(x, self.weight, None if self.bias is None else self.bias.to(x.dtype))
        return F.linear(x.float(), self.weight.float(), self.bias).to(out_dtype)


class TorchPerHead:
    """`PerHead` over `torch.einsum`."""

    def __init__(self, weights: Tensor, fmt: str) -> None:
        heads, rows, depth = weights.shape
        self.weights = round_to_format(weights.reshape(heads * rows, depth), fmt).view(weights.shape)

    def __call__(self, x: Tensor) -> Tensor:
        return torch.einsum("thk,hnk->thn", x.float(), self.weights.float()).to(x.dtype)


class TorchExperts:
    """`ExpertMatrices` as a loop over the experts that were chosen."""

    def __init__(self, num_experts: int, hidden: int, width: int, fmt: str, activation: Activation) -> None:
        self.hidden, self.width, self.fmt, self._activation = hidden, width, fmt, activation
        self._biases: ExpertBiases | None = None
        self._experts: list[tuple[TorchLinear, TorchLinear, TorchLinear] | None] = [None] * num_experts

    @property
    def bytes_per_expert(self) -> int:
        matrices = next((mlp for mlp in self._experts if mlp is not None), ())
        return sum(matrix.weight.nbytes for matrix in matrices)

    def set_biases(self, biases: ExpertBiases) -> None:
        self._biases = biases

    def load(self, expert: int, gate: Weight, up: Weight, down: Weight) -> None:
        rows = self.width if self._activation.gated else self.width // 2
        up_shape, down_shape = (rows, self.hidden), (self.hidden, self.width)
        if (gate.shape, up.shape, down.shape) != (up_shape, up_shape, down_shape):
            raise KernelError(f"expert {expert}: gate and up must be {up_shape}, down {down_shape}")
        first, second, third = (TorchLinear(w, None, self.fmt) for w in (gate, up, down))
        self._experts[expert] = (first, second, third)

    def load_all(self, first: int, experts: Sequence[tuple[Weight, Weight, Weight]]) -> None:
        for expert, matrices in enumerate(experts, first):
            self.load(expert, *matrices)

    def forward(
        self, x: Tensor, ids: Tensor, weights: Tensor, out: Tensor | None = None, add: bool = False
    ) -> Tensor:
        total = torch.zeros(x.shape, dtype=torch.float32)
        for expert, mlp in enumerate(self._experts):
            rows, places = torch.where(ids == expert)
            if len(rows) == 0:
                continue
            if mlp is None:
                raise KernelError(f"expert {expert} was routed to before it was loaded")
            y = self._of_expert(mlp, x[rows], self._biases_of(expert))
            total.index_add_(0, rows, y * weights[rows, places, None])
        result = total.to(x.dtype)
        if out is None:
            return result
        return out.add_(result) if add else out.copy_(result)

    def _biases_of(self, expert: int) -> tuple[Tensor, ...]:
        return () if self._biases is None else tuple(each[expert] for each in self._biases)

    def _of_expert(
        self, mlp: tuple[TorchLinear, TorchLinear, TorchLinear], x: Tensor, biases: tuple[Tensor, ...]
    ) -> Tensor:
        """One expert's float32 rows. Biases are float32, and so are the sums that they are added to."""
        gate, up, down = mlp
        if not biases:
            return down(activated(self._activation, gate(x), up(x)), torch.float32)
        first, second = gate(x, torch.float32) + biases[0], up(x, torch.float32) + biases[1]
        return down(activated(self._activation, first, second).to(x.dtype), torch.float32) + biases[2]


def activated(how: Activation, gate: Tensor, up: Tensor) -> Tensor:
    """Input of the down projection: [T, width]."""
    if how.kind == "relu2":
        return torch.cat((gate, up), -1).relu().square()
    if how.kind in ("gelu", "gelu_tanh"):
        return F.gelu(gate, approximate="tanh" if how.kind == "gelu_tanh" else "none") * up
    if how.kind == "silu":
        return F.silu(gate) * up
    up = up.clamp(-how.limit, how.limit)
    if how.kind == "silu_clamp":
        return F.silu(gate).clamp(max=how.limit) * up
    gate = gate.clamp(max=how.limit)
    if how.kind == "swiglu_clamp":
        return F.silu(gate) * up
    return gate * torch.sigmoid(how.alpha * gate) * (up + 1)


class TorchOps(InMemory):
    """`Ops` in plain torch, any float dtype."""

    def linear(self, weight: Weight | Blocks, bias: Tensor | None = None, fmt: str = "bf16") -> TorchLinear:
        return TorchLinear(weight if isinstance(weight, WeightCodes) else one_tensor(weight), bias, fmt)

    def per_head(self, weights: Tensor, fmt: str = "bf16") -> TorchPerHead:
        return TorchPerHead(weights, fmt)

    def columns(self, runs: Sequence[ColumnRun]) -> ColumnCopy:
        sources = torch.cat([run.source + run.step * torch.arange(run.width) for run in runs])
        targets = torch.cat([run.target + torch.arange(run.width) for run in runs])

        def copy(x: Tensor, out: Tensor) -> None:
            out[:, targets] = x[:, sources]

        return copy

    def experts(
        self, num_experts: int, hidden: int, width: int, fmt: str = "bf16", activation: Activation = SILU
    ) -> TorchExperts:
        return TorchExperts(num_experts, hidden, width, fmt, activation)

    def mlp(self, hidden: int, width: int, fmt: str = "bf16", activation: Activation = SILU) -> OneExpert:
        return OneExpert(self.experts(1, hidden, width, fmt, activation))

    def read_in_order(self, reads: Sequence[SureRead]) -> None:
        """Nothing to prepare: torch reads weights when it multiplies."""

    def record(self, step: Step, x: Tensor, batch: KernelBatch) -> tuple[Tensor, Recorded | None]:
        return step(x, batch), None

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)
        if weight.dtype == torch.float32:
            return (y * weight).to(x.dtype)
        return y.to(x.dtype) * weight.to(x.dtype)

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, addend: Addend | None = None
    ) -> Tensor:
        x = x if addend is None else self.gated(*addend, x)
        return self.rms_norm(residual.add_(x), weight, eps)

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
        values = 0 if v_pages is k_pages else kv_heads * v_pages.shape[-1]
        q, k, v = torch.split(qkv, [heads * head_dim, kv_heads * head_dim, values], dim=-1)
        q = self._head_norm(q, norms.q, head_dim, norms.eps)
        k = self._head_norm(k, norms.k, head_dim, norms.eps)
        rows, turns = batch.cache_slots, batch.positions if batch.turns is None else batch.turns
        k_pages.view(-1, kv_heads, head_dim)[rows] = _rotate(k, rope, turns)
        if values:
            v_pages.view(-1, *v_pages.shape[2:])[rows] = v.unflatten(1, (kv_heads, -1))
        return _rotate(q, rope, turns)

    def _head_norm(self, x: Tensor, weight: Tensor | None, head_dim: int, eps: float) -> Tensor:
        """[T, n * D] -> [T, n, D], normalised over D or over n * D by the weight's length."""
        heads = x.reshape(len(x), -1, head_dim)
        if weight is None:
            return heads
        if weight.numel() == head_dim:
            return self.rms_norm(heads, weight, eps)
        return self.rms_norm(x, weight, eps).view(heads.shape)

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
        out = q.new_empty((*q.shape[:2], v_pages.shape[-1]))
        starts = batch.query_starts.tolist()
        for s, length in enumerate(batch.seq_lens.tolist()):
            rows = slice(starts[s], starts[s + 1])
            pages = batch.block_tables[s, : -(-length // k_pages.shape[1])].long()
            k = k_pages[pages].flatten(0, 1)[:length]
            v = v_pages[pages].flatten(0, 1)[:length]
            out[rows] = _attend(q[rows], k, v, batch.positions[rows], scale, window, sinks)
        return out.flatten(1)

    gated = staticmethod(gates.gated)

    def bound(self, shape: object, *weights: object) -> Any:
        return bound_by(("torch",), self, shape, weights)

    image_ops = ByTorch


def _rotate(x: Tensor, rope: RopeTables, positions: Tensor) -> Tensor:
    """x [T, n, D] turned by its position; tables, products and sum in x's dtype."""
    half = rope.rotary_dim // 2
    cos = rope.cos[positions][:, None].to(x.dtype)
    sin = rope.sin[positions][:, None].to(x.dtype)
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, positions: Tensor, scale: float, window: int, sinks: Tensor | None
) -> Tensor:
    """q [t, H, D] over k [n, G, D] and v [n, G, E] -> [t, H, E]; key j is at position j."""
    share = q.shape[1] // k.shape[1]
    k, v = k.float().repeat_interleave(share, dim=1), v.float().repeat_interleave(share, dim=1)
    scores = torch.einsum("thd,nhd->htn", q.float(), k) * scale
    age = positions[:, None] - torch.arange(len(k))
    hidden = age < 0 if window == 0 else (age < 0) | (age >= window)
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        scores = torch.cat((scores, sinks.to(scores).view(-1, 1, 1).expand(-1, len(q), 1)), -1)
    probabilities = scores.softmax(-1)[..., : len(k)]
    return torch.einsum("htn,nhd->thd", probabilities, v).to(q.dtype)
