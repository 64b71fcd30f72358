"""The blocks that decoder layers are made of, written in `Ops` only. x is [T, hidden] everywhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from tandem.experts import ExpertMatrices, with_shared
from tandem.kernels.ops import Linear, Routing
from tandem.models.batch import ForwardBatch
from tandem.models.builder import Builder
from tandem.models.names import PER_EXPERT, ExpertNames

KVPages = tuple[Tensor, Tensor]


class Attention:
    """Grouped-query attention: one matrix for q, k and v; norm, rotation and cache write in one operation."""

    def __init__(self, b: Builder, index: int, prefix: str = "self_attn") -> None:
        self.config, self.ops, self.rope = b.config.attention, b.ops, b.rope
        self.eps, self.window = b.config.rms_eps, self.config.windows[index]
        self.scale = self.config.head_dim**-0.5
        name = f"model.layers.{index}.{prefix}."
        q, kv = self.config.heads * self.config.head_dim, self.config.kv_heads * self.config.head_dim
        modules = [name + module for module in ("q_proj", "k_proj", "v_proj")]
        self.qkv = b.linear(modules, (q, kv, kv), b.config.hidden, bias=self.config.qkv_bias)
        self.out = b.linear([name + "o_proj"], [b.config.hidden], q, bias=self.config.out_bias)
        self.q_norm = self.k_norm = None
        if self.config.qk_norm != "none":
            per_head = self.config.qk_norm == "head"
            self.q_norm = b.tensor(name + "q_norm.weight", self.config.head_dim if per_head else q)
            self.k_norm = b.tensor(name + "k_norm.weight", self.config.head_dim if per_head else kv)

    def __call__(self, x: Tensor, batch: ForwardBatch, pages: KVPages) -> Tensor:
        a, qkv, norms = self.config, self.qkv(x), (self.q_norm, self.k_norm)
        if a.clip_qkv:
            qkv, norms = self._clipped(qkv), (None, None)
        q = self.ops.rope_store(
            qkv, self.rope, batch, *pages,
            heads=a.heads, kv_heads=a.kv_heads, head_dim=a.head_dim,
            q_norm=norms[0], k_norm=norms[1], eps=self.eps,
        )  # fmt: skip
        return self.out(self.ops.attention(q, *pages, batch, self.scale, self.window))

    def _clipped(self, qkv: Tensor) -> Tensor:
        """OLMoE's clip_qkv: the clamp is between the norms and the rotation."""
        kv = self.config.kv_heads * self.config.head_dim
        q, k, v = torch.split(qkv, [qkv.shape[1] - 2 * kv, kv, kv], dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q = self.ops.rms_norm(q.contiguous(), self.q_norm, self.eps)
            k = self.ops.rms_norm(k.contiguous(), self.k_norm, self.eps)
        return torch.cat((q, k, v), dim=1).clamp_(-self.config.clip_qkv, self.config.clip_qkv)


class DenseMLP:
    """SwiGLU for every token: a layer of one expert, which every token chooses with weight 1."""

    def __init__(self, b: Builder, prefix: str, width: int) -> None:
        names, hidden = [f"{prefix}.{m}_proj.weight" for m in ("gate", "up", "down")], b.config.hidden

        def matrices(_expert: int) -> ExpertMatrices:
            gate, up = (b.checkpoint.get(name, (width, hidden)) for name in names[:2])
            return gate, up, b.checkpoint.get(names[2], (hidden, width))

        self.experts = b.experts(1, width, b.dense_format, matrices)

    def __call__(self, x: Tensor) -> Tensor:
        everyone = Routing(torch.zeros(len(x), 1, dtype=torch.int32), torch.ones(len(x), 1))
        return self.experts.wait(self.experts.submit(x, everyone))


@dataclass(frozen=True, slots=True)
class MoENames:
    """Where a family keeps an MoE block's tensors, below `model.layers.{L}.`."""

    router: str = "mlp.gate"
    experts: ExpertNames = PER_EXPERT
    shared: str = ""
    shared_gate: str = ""


class MoEBlock:
    """Router, routed experts, shared expert. Routes and calls experts; where they run is not known here.

    With `plan.fuse_shared_experts` a shared expert whose width is a multiple of the routed ones' is cut into experts
    of that width which every token chooses, so that a layer's experts are one call.
    """

    def __init__(self, b: Builder, index: int, names: MoENames) -> None:
        moe, self.ops, self.router = b.config.moe, b.ops, b.config.moe.router
        self.fused = moe.fusible_shared if b.plan.fuse_shared_experts else 0
        self._b, self._names, self._layer = b, names, f"model.layers.{index}."
        self.gate = self._router_gate()
        self.bias = (
            b.float_tensor(f"{self._layer}{names.router}.e_score_correction_bias", self.router.num_experts)
            if self.router.has_bias
            else None
        )
        self.shared_gate = (
            b.linear([self._layer + names.shared_gate], [1], b.config.hidden) if moe.shared_gate else None
        )
        count = self.router.num_experts + self.fused
        self.experts = b.experts(count, moe.width, b.plan.expert_format, self._matrices)
        self.shared = None
        if moe.shared_width and not self.fused:
            self.shared = DenseMLP(b, self._layer + names.shared, moe.shared_width)
        del self._b

    def __call__(self, x: Tensor) -> Tensor:
        logits = self.gate(x.float()) if self.router.float32_logits else self.gate(x).float()
        routing = self.ops.route(logits, self.router, self.bias)
        weight = None if self.shared_gate is None else self.shared_gate(x).sigmoid()
        if self.fused:
            float_weight = None if weight is None else weight.float()
            routing = with_shared(routing, self.router.num_experts, self.fused, float_weight)
        ticket = self.experts.submit(x, routing)
        shared = None if self.shared is None else self.shared(x)
        routed = self.experts.wait(ticket)
        if shared is None:
            return routed
        return routed.add_(shared if weight is None else shared * weight)

    def _router_gate(self) -> Linear:
        name, experts, hidden = (
            self._layer + self._names.router,
            self.router.num_experts,
            self._b.config.hidden,
        )
        if self.router.float32_logits:
            return self._b.float_linear(name, experts, hidden)
        return self._b.linear([name], [experts], hidden)

    def _matrices(self, expert: int) -> ExpertMatrices:
        moe, hidden = self._b.config.moe, self._b.config.hidden
        if expert < self.router.num_experts:
            sizes = (self.router.num_experts, hidden, moe.width)
            return self._names.experts.read(self._b.checkpoint, self._layer, expert, sizes)
        rows = slice(
            (expert - self.router.num_experts) * moe.width, (expert + 1 - self.router.num_experts) * moe.width
        )
        name, get = f"{self._layer}{self._names.shared}.", self._b.checkpoint.get
        gate, up = (get(f"{name}{m}_proj.weight", (moe.shared_width, hidden))[rows] for m in ("gate", "up"))
        return gate, up, get(f"{name}down_proj.weight", (hidden, moe.shared_width))[:, rows]


class MLP(Protocol):
    def __call__(self, x: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Pre-norm: x + attention(norm(x)), then x + mlp(norm(x))."""

    input_norm: Tensor
    attention: Attention
    mlp_norm: Tensor
    mlp: MLP


def decoder_layer(b: Builder, index: int, moe_names: MoENames, dense_prefix: str = "mlp") -> DecoderLayer:
    """The layer that all families share; they differ in `ModelConfig` and in names."""
    layer, hidden = f"model.layers.{index}.", b.config.hidden
    mlp: MLP
    if index in b.config.moe_layers:
        mlp = MoEBlock(b, index, moe_names)
    else:
        mlp = DenseMLP(b, layer + dense_prefix, b.config.dense_width)
    return DecoderLayer(
        input_norm=b.tensor(layer + "input_layernorm.weight", hidden),
        attention=Attention(b, index),
        mlp_norm=b.tensor(layer + "post_attention_layernorm.weight", hidden),
        mlp=mlp,
    )
