"""Grouped-query attention over paged keys and values, written in `Ops` only."""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.kernels.ops import SureRead
from tandem.models.batch import ForwardBatch
from tandem.models.builder import Builder
from tandem.models.linear import sure_reads

KVPages = tuple[Tensor, Tensor]
"""k_pages and v_pages; the same tensor twice where keys are values, too (latent attention)."""


class Attention:
    """Grouped-query attention: one matrix for q, k and v; norm, rotation and cache write in one operation."""

    def __init__(self, b: Builder, index: int, prefix: str = "self_attn") -> None:
        self.config, self.ops, self.rope = b.config.attention, b.ops, b.rope
        self.eps, self.window = b.config.rms_eps, self.config.windows[index]
        self.scale = self.config.softmax_scale
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

    def reads(self) -> list[SureRead]:
        return sure_reads(self.qkv, self.out)

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
