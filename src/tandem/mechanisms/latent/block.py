"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1), written in `Ops` only: its matrices. What
lies between them, and how the latents are cached, is in `mechanisms/latent/absorbed.py` and `mechanisms/latent/gpu`."""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.architectures.names import Names
from tandem.formats.cut import numbers, rows_of
from tandem.kernels.ops import Linear, SureRead
from tandem.kernels.selected_keys import SelectedKeys
from tandem.mechanisms.latent.absorbed import LatentHeads, LatentSizes, LatentWeights
from tandem.mechanisms.latent.shape import Latent, QueryScale
from tandem.mechanisms.token_index.block import PooledChoice, TokenChoice
from tandem.models.builder import Builder
from tandem.models.linear import sure_reads
from tandem.models.passing import ForwardState, States
from tandem.planner.ranks.cut import shard_of


class LatentAttention:
    """Queries (through a latent of their own where the model has one), latents, attention, values, output."""

    def __init__(self, b: Builder, shape: Latent, name: str, layer: int) -> None:
        """name: of the module that holds the projections; layer: its number."""
        self.shape, self.ops, self.layer = shape, b.ops, layer
        name, s, hidden, share = name + ".", shape, b.config.hidden, shard_of(b.config, shape).share
        self.q_down, self.q_norm = self._query_latent(b, name)
        q = "q_b_proj" if s.q_rank else "q_proj"
        self.query = b.linear([name + q], [share(s.heads * s.qk_dim)], s.q_rank or hidden)
        self.kv_down = b.linear([name + "kv_a_proj_with_mqa"], [s.cached_dim], hidden, bias=s.bias)
        sizes = LatentSizes(s.heads, s.nope_dim, s.rope_dim, s.kv_rank, s.value_dim)
        norm = b.tensor(name + "kv_a_layernorm.weight", s.kv_rank)
        turns = s.rope.pairs == "neighbours"
        weights = LatentWeights(*self._absorbed(b, name), norm, s.norm.eps, b.rope(s.rope), s.scale, turns)
        self.heads: LatentHeads = b.ops.bound(sizes, weights, b.dense_format)
        self.query_scales = _query_scales(b, shape.query_scale)
        self.gate = b.linear([name + "g_proj"], [share(s.gate_rows)], hidden) if s.gate_rows else None
        self.out = b.linear([name + "o_proj"], [hidden], share(s.heads * s.value_dim), bias=s.bias)
        self.choice: TokenChoice | PooledChoice | None = None
        if s.index is not None and s.index.reuse is None:
            kind = TokenChoice if s.index.pool == 1 else PooledChoice
            self.choice = kind(b, s.index, s.q_rank, name + "indexer")

    def reads(self) -> list[SureRead]:
        down = sure_reads() if self.q_down is None else sure_reads(self.q_down)
        choice = [] if self.choice is None else self.choice.reads()
        gate = [] if self.gate is None else [self.gate]
        return [*down, *choice, *sure_reads(self.query, self.kv_down, *gate, self.out)]

    def __call__(self, x: Tensor, p: ForwardState, states: States) -> Tensor:
        latents, query_input = states[0][0], self._query_input(x)
        chosen = self._chosen(x, query_input, p, states)
        q = self.query(query_input)
        if self.query_scales is not None:
            q = q * self.query_scales[p.batch.positions]
        attended = self.heads(q, self.kv_down(x), p.batch, latents, chosen)
        if self.gate is not None:
            attended = self.ops.gated(attended, self.gate(x).unflatten(1, (self.shape.heads, -1)))
        return self.out(attended)

    def _chosen(self, x: Tensor, latent: Tensor, p: ForwardState, states: States) -> SelectedKeys | None:
        """Which tokens the rows attend to: this layer's choice, or that of one before it; None: all."""
        index = self.shape.index
        if self.choice is not None:
            p.links.clear()  # of long prompts a choice takes megabytes, and nobody asks for older ones
            p.links[self.layer] = self.choice(x, latent, p, states)
            return p.links[self.layer]
        return None if index is None or index.reuse is None else p.links[index.reuse]

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

    def _absorbed(self, b: Builder, name: str) -> tuple[Tensor, Tensor]:
        """W_K' [H, kv_rank, nope] and W_V [H, value, kv_rank]. They are the rows (W_K, W_V) of kv_b_proj, or what
        GGUF files call k_b and v_b."""
        s = self.shape
        if not b.checkpoint.has_matrix(name + "kv_b_proj"):
            keys = self._heads_of(b, name + "k_b_proj", s.kv_rank, s.nope_dim)
            return keys, self._heads_of(b, name + "v_b_proj", s.value_dim, s.kv_rank)
        both = self._heads_of(b, name + "kv_b_proj", s.nope_dim + s.value_dim, s.kv_rank)
        return both[:, : s.nope_dim].transpose(1, 2).contiguous(), both[:, s.nope_dim :].contiguous()

    def _heads_of(self, b: Builder, module: str, rows: int, depth: int) -> Tensor:
        """Every head's rows of a matrix, [H, rows, depth], decoded head by head."""
        heads = self.shape.heads
        share = shard_of(b.config, self.shape).share(heads * rows)
        whole = b.checkpoint.weight(module, (share.whole, depth), share.cut)
        return torch.stack(
            [numbers(rows_of(whole, slice(h * rows, (h + 1) * rows))).to(b.dtype) for h in range(heads)]
        )


def _query_scales(b: Builder, rule: QueryScale | None) -> Tensor | None:
    """[positions, 1] of the plan's context; None where no position is scaled."""
    context = b.plan.context_length
    if rule is None or not rule.acts_within(context):
        return None
    steps = torch.arange(context) // rule.every
    return b.ops.resident((1 + rule.beta * torch.log(1.0 + steps)).to(b.dtype)[:, None])


def operator(b: Builder, index: int, names: Names, shape: Latent) -> LatentAttention:
    return LatentAttention(b, shape, names.at(index) + names.attention, index)
