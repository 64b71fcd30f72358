"""Multi-head latent attention in absorbed form (DeepSeek-V2, arXiv 2405.04434, section 2.1), written in `Ops` only.

Keys and values of a head are matrices times one latent per token: k = W_K c, v = W_V c. Since q·(W_K c) = (W_K' q)·c
and sum p (W_V c) = W_V (sum p c), all heads attend to the latents themselves, and only those are cached: one kv head
of [rotary key | latent], which is key and value in one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.config.layers import Latent
from tandem.formats.cut import numbers, rows_of
from tandem.kernels.ops import ColumnRun, Linear, Ops, PerHead, SureRead
from tandem.models.builder import Builder
from tandem.models.linear import sure_reads
from tandem.models.passing import Pass, States


class LatentAttention:
    """Queries (through a latent of their own where the model has one), latents, attention, values, output."""

    def __init__(self, b: Builder, shape: Latent, name: str) -> None:
        """name: of the module that holds the projections."""
        self.shape, self.ops, self.rope = shape, b.ops, b.rope(shape.rope)
        name, s, hidden = name + ".", shape, b.config.hidden
        self.q_down, self.q_norm = self._query_latent(b, name)
        q = "q_b_proj" if s.q_rank else "q_proj"
        self.query = b.linear([name + q], [s.heads * s.qk_dim], s.q_rank or hidden)
        self.kv_down = b.linear([name + "kv_a_proj_with_mqa"], [s.cached_dim], hidden, bias=s.bias)
        self.kv_norm = b.tensor(name + "kv_a_layernorm.weight", s.kv_rank)
        self.absorb, self.values = self._absorbed(b, name)
        self.moves = _Moves(b.ops, s)
        self.out = b.linear([name + "o_proj"], [hidden], s.heads * s.value_dim, bias=s.bias)

    def reads(self) -> list[SureRead]:
        down = () if self.q_down is None else (self.q_down,)
        return sure_reads(*down, self.query, self.kv_down, self.out)

    def __call__(self, x: Tensor, p: Pass, states: States) -> Tensor:
        s, ((latents,),) = self.shape, states
        q = self.ops.rope_store(
            self._queries_and_key(x), self.rope, p.batch, latents, latents,
            heads=s.heads, kv_heads=1, head_dim=s.cached_dim,
        )  # fmt: skip
        seen = x.new_empty((len(x), s.heads * s.kv_rank))
        self.moves.seen(self.ops.attention(q, latents, latents, p.batch, s.scale), seen)
        return self.out(self.values(seen.view(len(x), s.heads, s.kv_rank)).flatten(1))

    def _queries_and_key(self, x: Tensor) -> Tensor:
        """[T, (H + 1) * (rope + kv_rank)]: absorbed queries of all heads, then the key, all before the rotation."""
        s, rows = self.shape, len(x)
        both = x.new_empty((rows, (s.heads + 1) * s.cached_dim))
        straight, latent = x.new_empty((rows, s.heads * s.nope_dim)), x.new_empty((rows, s.kv_rank))
        q, kv = self.query(self._query_input(x)), self.kv_down(x)
        self.moves.straight(q, straight)
        self.moves.turned(q, both)
        self.moves.turned_key(kv, both)
        self.moves.latent(kv, latent)
        absorbed = self.absorb(straight.view(rows, s.heads, s.nope_dim))
        self.moves.absorbed(absorbed.flatten(1), both)
        self.moves.key(self.ops.rms_norm(latent, self.kv_norm, self.shape.norm.eps), both)
        return both

    def _query_input(self, x: Tensor) -> Tensor:
        if self.q_down is None or self.q_norm is None:
            return x
        return self.ops.rms_norm(self.q_down(x), self.q_norm, self.shape.norm.eps)

    def _query_latent(self, b: Builder, name: str) -> tuple[Linear | None, Tensor | None]:
        rank = self.shape.q_rank
        if not rank:
            return None, None
        down = b.linear([name + "q_a_proj"], [rank], b.config.hidden, bias=self.shape.bias)
        return down, b.tensor(name + "q_a_layernorm.weight", rank)

    def _absorbed(self, b: Builder, name: str) -> tuple[PerHead, PerHead]:
        """Per head: W_K' [kv_rank, nope] and W_V [value, kv_rank]. They are the rows (W_K, W_V) of kv_b_proj, or what
        GGUF files call k_b and v_b."""
        s = self.shape
        if not b.checkpoint.has_matrix(name + "kv_b_proj"):
            absorb = self._heads_of(b, name + "k_b_proj", s.kv_rank, s.nope_dim)
            values = self._heads_of(b, name + "v_b_proj", s.value_dim, s.kv_rank)
        else:
            both = self._heads_of(b, name + "kv_b_proj", s.nope_dim + s.value_dim, s.kv_rank)
            absorb, values = (
                both[:, : s.nope_dim].transpose(1, 2).contiguous(),
                both[:, s.nope_dim :].contiguous(),
            )
        return self.ops.per_head(absorb, b.dense_format), self.ops.per_head(values, b.dense_format)

    def _heads_of(self, b: Builder, module: str, rows: int, depth: int) -> Tensor:
        """Every head's rows of a matrix, [H, rows, depth], decoded head by head."""
        heads = self.shape.heads
        whole = b.checkpoint.weight(module, (heads * rows, depth))
        return torch.stack(
            [numbers(rows_of(whole, slice(h * rows, (h + 1) * rows))).to(b.dtype) for h in range(heads)]
        )


class _Moves:
    """What goes where between the matrices. A row of queries and key is H + 1 times [rotary | latent]."""

    def __init__(self, ops: Ops, s: Latent) -> None:
        row, heads, each = s.cached_dim, s.heads, range(s.heads)
        self.straight = ops.columns([ColumnRun(h * s.qk_dim, h * s.nope_dim, s.nope_dim) for h in each])
        self.turned = ops.columns(
            [run for h in each for run in _halves(h * s.qk_dim + s.nope_dim, h * row, s.rope_dim)]
        )
        self.turned_key = ops.columns(_halves(s.kv_rank, heads * row, s.rope_dim))
        self.latent = ops.columns([ColumnRun(0, 0, s.kv_rank)])
        self.absorbed = ops.columns([ColumnRun(h * s.kv_rank, h * row + s.rope_dim, s.kv_rank) for h in each])
        self.key = ops.columns([ColumnRun(0, heads * row + s.rope_dim, s.kv_rank)])
        self.seen = ops.columns([ColumnRun(h * row + s.rope_dim, h * s.kv_rank, s.kv_rank) for h in each])


def _halves(source: int, target: int, width: int) -> list[ColumnRun]:
    """Rotary pairs of neighbours (0, 1), (2, 3) … as halves: 0, 2, … 1, 3, … (Transformers' rope_interleave)."""
    half = width // 2
    return [ColumnRun(source + i, target + i * half, half, step=2) for i in (0, 1)]
