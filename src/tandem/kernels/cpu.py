"""Faces of the C++ core's packed weights: `PackedMatrix` (a dense linear) and `PackedExperts` (a layer's experts).

Both run on a `Workspace`: a worker pool, one kernel tier, and scratch for one call at a time. Activations are bfloat16
or float32; with bf16, int8 and int4 weights float32 activations are rounded to bfloat16 at the entry, with f32 weights
everything is float32. On every tier but AMX a row's result does not depend on the batch or the number of threads, to
the bit. The arrays of `_core` itself may come from any library that speaks DLPack.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tandem import _core
from tandem._core import WorkerPool, Workspace

__all__ = ["PackedExperts", "PackedMatrix", "WorkerPool", "Workspace"]

DEFAULT_GROUP = 32  # weights along K that share one scale in int8 and int4


def _packable(weight: Tensor) -> Tensor:
    """Kernels read contiguous float32 or bfloat16 in CPU memory."""
    weight = weight.detach().contiguous()
    return weight if weight.dtype in (torch.float32, torch.bfloat16) else weight.float()


def _bias(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.detach().float().contiguous()


class PackedMatrix:
    """`Linear` on packed weights: `matrix(x) -> [T, N]`. The tensor it is made from is not kept.

    fmt: "f32", "bf16", "int8" or "int4"; group: weights along K per scale (32, 64, 128, 256; int8 also 0, one per row).
    """

    def __init__(
        self,
        workspace: Workspace,
        weight: Tensor,
        bias: Tensor | None = None,
        fmt: str = "bf16",
        group: int = DEFAULT_GROUP,
    ) -> None:
        self.out_features, self.in_features = weight.shape
        self._core = _core.PackedMatrix(workspace, _packable(weight), _bias(bias), fmt, group)
        self._multiply = self._core.multiply

    def __call__(self, x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        out = x.new_empty((x.shape[0], self.out_features), dtype=out_dtype)
        self._multiply(x, out)
        return out

    @property
    def tier(self) -> str:
        """The tier whose kernels this matrix runs on."""
        return self._core.tier

    def dequantised(self) -> Tensor:
        """The weights that the packed codes stand for, float32 [N, K]."""
        out = torch.empty((self.out_features, self.in_features), dtype=torch.float32)
        self._core.dequantise(out)
        return out


class PackedExperts:
    """`ExpertLayer` on packed weights: the routed experts of one layer, gated MLPs of equal shape.

    activation: "silu", "gelu", "gelu_tanh", "swiglu_clamp" (gate <= limit, |up| <= limit) or "swiglu_oai" (gpt-oss:
    clamped, gate * sigmoid(alpha * gate) * (up + 1)).
    """

    def __init__(
        self,
        workspace: Workspace,
        num_experts: int,
        hidden: int,
        width: int,
        fmt: str = "bf16",
        activation: str = "silu",
        *,
        group: int = DEFAULT_GROUP,
        alpha: float = 1.702,
        limit: float = 7.0,
    ) -> None:
        self.num_experts, self.hidden, self.width = num_experts, hidden, width
        self._core = _core.ExpertLayer(
            workspace, num_experts, hidden, width, fmt, group, activation, alpha, limit
        )
        self._forward = self._core.forward

    def load(
        self,
        expert: int,
        gate: Tensor,
        up: Tensor,
        down: Tensor,
        *,
        gate_bias: Tensor | None = None,
        up_bias: Tensor | None = None,
        down_bias: Tensor | None = None,
    ) -> None:
        """Packs one expert: gate and up [width, hidden], down [hidden, width]. The tensors are not kept."""
        weights = _packable(gate), _packable(up), _packable(down)
        self._core.load(expert, *weights, _bias(gate_bias), _bias(up_bias), _bias(down_bias))

    def forward(
        self, x: Tensor, ids: Tensor, weights: Tensor, out: Tensor | None = None, add: bool = False
    ) -> Tensor:
        """sum over k of weights[t, k] * expert[ids[t, k]](x[t]), [T, hidden]; ids outside [0, E) are skipped.

        ids int32 [T, k], weights float32 [T, k]. `out` may be bfloat16 or float32; `add` adds to it.
        """
        if out is None:
            out = x.new_empty((x.shape[0], self.hidden))
            add = False
        self._forward(x, ids, weights, out, add)
        return out

    @property
    def tier(self) -> str:
        """The tier whose kernels this layer runs on."""
        return self._core.tier

    @property
    def bytes_per_expert(self) -> int:
        """Packed bytes of one expert, padding and scales included."""
        return self._core.bytes_per_expert
