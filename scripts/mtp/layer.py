"""The draft layer as torch trains it: the same sums as `models/draft_layer.py`, with chains of draft tokens
unrolled."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

MASKED = -1e9


class Shape(NamedTuple):
    """Sizes of a model's attention, and of the layer's feed-forward."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    width: int
    theta: float
    eps: float


class Norm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * (wide.square().mean(-1, keepdim=True) + self.eps).rsqrt() * self.weight).to(x.dtype)


class Layer(nn.Module):
    """Parameters have the names that a checkpoint has, behind `model.layers.{L}.`."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.shape, q, kv = s, s.heads * s.head_dim, s.kv_heads * s.head_dim
        for name in ("enorm", "hnorm", "input_layernorm", "post_attention_layernorm"):
            self.add_module(name, Norm(s.hidden, s.eps))
        self.eh_proj = nn.Linear(2 * s.hidden, s.hidden, bias=False)
        self.self_attn = nn.ModuleDict({
            "q_proj": nn.Linear(s.hidden, q, bias=False), "k_proj": nn.Linear(s.hidden, kv, bias=False),
            "v_proj": nn.Linear(s.hidden, kv, bias=False), "o_proj": nn.Linear(q, s.hidden, bias=False),
        })  # fmt: skip
        self.mlp = nn.ModuleDict({
            "gate_proj": nn.Linear(s.hidden, s.width, bias=False), "up_proj": nn.Linear(s.hidden, s.width, bias=False),
            "down_proj": nn.Linear(s.width, s.hidden, bias=False),
        })  # fmt: skip
        self.shared_head = nn.ModuleDict({"norm": Norm(s.hidden, s.eps)})

    def chain(self, hidden: Tensor, embedded: Tensor, steps: int) -> list[Tensor]:
        """hidden [B, T, H]: the model's at p; embedded: of the tokens at p + 1. Of each draft token of a chain [B, T,
        H]: row p of draft token k reads the draft token before it at p - 1, and keys of the model's hidden states up to
        p - k."""
        keys, values, found = [], [], []
        for _ in range(steps):
            x = self.eh_proj(torch.cat((self.enorm(embedded), self.hnorm(hidden)), -1))
            q, key, value = self._heads(self.input_layernorm(x))
            keys.append(key)
            values.append(value)
            x = x + self.self_attn["o_proj"](self._attend(q, keys, values))
            inner = self.post_attention_layernorm(x)
            gate, up = self.mlp["gate_proj"](inner), self.mlp["up_proj"](inner)
            x = x + self.mlp["down_proj"](F.silu(gate) * up)
            found.append(self.shared_head["norm"](x))
            hidden = F.pad(found[-1], (0, 0, 1, 0))[:, :-1]
        return found

    def _heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        s, (b, t, _) = self.shape, x.shape
        q, k, v = (self.self_attn[f"{m}_proj"](x).view(b, t, -1, s.head_dim).transpose(1, 2) for m in "qkv")
        cos, sin = self._turns(t)
        each = s.heads // s.kv_heads
        return (
            _turned(q, cos, sin),
            _turned(k, cos, sin).repeat_interleave(each, 1),
            v.repeat_interleave(each, 1),
        )

    def _turns(self, rows: int) -> tuple[Tensor, Tensor]:
        dims = self.shape.head_dim
        inverse = 1.0 / self.shape.theta ** (torch.arange(0, dims, 2, dtype=torch.float32) / dims)
        angles = torch.arange(rows, dtype=torch.float32)[:, None] * inverse
        return angles.cos(), angles.sin()

    def _attend(self, q: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
        """Draft token k sees rows of the model's hidden states up to p - k, then one row of each draft token of its
        chain."""
        b, _, t, dim = q.shape
        back = len(keys) - 1
        if not back:
            out = F.scaled_dot_product_attention(q, keys[0], values[0], is_causal=True)
            return out.transpose(1, 2).reshape(b, t, -1)
        scores = (q @ keys[0].transpose(-1, -2)).float() * dim**-0.5
        scores = scores.masked_fill(~torch.ones(t, t, dtype=torch.bool).tril(-back), MASKED)
        both = enumerate(zip(keys[1:], values[1:], strict=True), 1)
        later = [(_back(k, back - i), _back(v, back - i)) for i, (k, v) in both]
        own = [(q * k).sum(-1, keepdim=True).float() * dim**-0.5 for k, _ in later]
        share = torch.cat([scores, *own], -1).softmax(-1).to(q.dtype)
        out = share[..., :t] @ values[0]
        for i, (_, v) in enumerate(later):
            out = out + share[..., t + i : t + i + 1] * v
        return out.transpose(1, 2).reshape(b, t, -1)


def _back(x: Tensor, rows: int) -> Tensor:
    return x if not rows else F.pad(x, (0, 0, rows, 0))[:, :, : x.shape[2]]


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)
