"""Grouped-query attention over paged keys and values, written in `Ops` only."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import softplus

from tandem.architectures.names import Names
from tandem.kernels.gates import in_whole_vectors
from tandem.kernels.ops import NO_NORMS, HeadNorms, SureRead
from tandem.mechanisms.grouped_query.shape import Gqa
from tandem.mechanisms.mean_index.block import BlockChoice
from tandem.models.builder import Builder
from tandem.models.linear import sure_reads
from tandem.models.passing import ForwardState, States
from tandem.planner.ranks.cut import shard_of
from tandem.spec.shard import Size


class Attention:
    """Grouped-query attention: one matrix for q, k and v; norm, rotation and cache write in one operation."""

    def __init__(self, b: Builder, shape: Gqa, name: str, gate: str) -> None:
        """name: of the module that holds the projections; gate: of the one that makes a gate of its own."""
        self.shape, self.ops, self.rope = shape, b.ops, b.rope(shape.rope)
        q, kv, values = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim, shape.values
        share, hidden, copies = shard_of(b.config, shape).share, b.config.hidden, shape.kv_copies
        rows = {"q": share(2 * q if shape.gate else q), "k": share(kv, copies)}
        if not values.from_keys:
            rows["v"] = share(shape.kv_heads * shape.value_dim, copies)
        modules, sizes = [f"{name}.{each}_proj" for each in rows], list[Size](rows.values())
        if b.checkpoint.has_matrix(f"{name}.qkv_proj"):
            modules, sizes = [f"{name}.qkv_proj"], [tuple(rows.values())]
        self.qkv = b.linear(modules, sizes, hidden, bias=shape.qkv_bias, order=_as_halves(shape))
        self.own_gate = b.linear([gate], [share(shape.gate_rows)], hidden) if shape.gate_rows else None
        value_columns = share(shape.heads * shape.value_dim)
        self.out = b.linear([f"{name}.o_proj"], [hidden], value_columns, bias=shape.out_bias)
        self.sinks = b.float_tensor(f"{name}.sinks", share(shape.heads)) if shape.sinks else None
        self.ones = b.ops.resident(torch.ones(shape.value_dim)) if values.norm else None
        self.q_norm = self.k_norm = None
        if shape.qk_norm != "none":
            normed = (q, kv) if shape.qk_norm == "width" else (shape.head_dim, shape.head_dim)
            self.q_norm = b.norm(f"{name}.q_norm.weight", shape.norm, normed[0])
            self.k_norm = b.norm(f"{name}.k_norm.weight", shape.norm, normed[1])
        self.turned = self._norm_turned(b) if shape.qk_norm == "turned" else None
        self.choice = None if shape.index is None else BlockChoice(b, shape.index, f"{name}.indexer")

    def _norm_turned(self, b: Builder) -> Tensor:
        """Product of q's and k's norm weights, which q's turned norm takes: in a score they are one factor of each
        channel. Rotation keeps lengths, so norms without weights may come before it."""
        assert self.q_norm is not None and self.k_norm is not None
        both = (self.q_norm.float() * self.k_norm.float()).to(b.dtype)
        self.q_norm = self.k_norm = b.ops.resident(torch.ones(self.shape.head_dim, dtype=self.q_norm.dtype))
        return both

    def reads(self) -> list[SureRead]:
        choice = [] if self.choice is None else self.choice.reads()
        return [*choice, *sure_reads(self.qkv, *([] if self.own_gate is None else [self.own_gate]), self.out)]

    def __call__(self, x: Tensor, p: ForwardState, states: States) -> Tensor:
        s, (k_pages, v_pages) = self.shape, states[0]
        qkv, norms = self.qkv(x), HeadNorms(self.q_norm, self.k_norm, self.shape.norm.eps)
        batch = p.batch if s.sees_all else p.batch.windowed
        if s.clip:
            qkv, norms = self._clipped(qkv), NO_NORMS
        if not s.values.plain:
            qkv = self._with_values(qkv)
        q = self.ops.rope_store(qkv, self.rope, batch, k_pages, v_pages, s.heads, norms)
        if self.turned is not None:
            q = q * self.turned
        chosen = None if self.choice is None else self.choice(x, p, states)
        if self.choice is None or chosen is None:
            attended = self.ops.attention(q, k_pages, v_pages, batch, s.scale, s.window, self.sinks)
        else:
            attended = self.choice.index.attend(q, k_pages, v_pages, chosen, s.scale)
        if self.own_gate is not None:
            attended = self._own_gated(attended, self.own_gate(x))
        return self.out(self.ops.gated(attended, self._gates(qkv)) if s.gate else attended)

    def _own_gated(self, attended: Tensor, gates: Tensor) -> Tensor:
        """attended [T, H * D] times softplus or sigmoid of gates [T, H] or [T, H * D]."""
        heads = self.shape.heads
        if self.shape.own_gate == "sigmoid":
            return self.ops.gated(attended, gates.unflatten(1, (heads, -1)))
        each = in_whole_vectors(softplus, gates.float()).to(attended.dtype).unflatten(1, (heads, -1))
        gated: Tensor = attended.unflatten(1, (heads, -1)) * each
        return gated.flatten(1)

    def _with_values(self, qkv: Tensor) -> Tensor:
        """q and k as they are; values as they are kept."""
        s, values = self.shape, self.shape.values
        columns = qkv.shape[1] - (0 if values.from_keys else s.kv_heads * s.value_dim)
        v = qkv[:, columns - s.kv_heads * s.head_dim :] if values.from_keys else qkv[:, columns:]
        if self.ones is not None:
            heads = v.reshape(-1, s.value_dim).contiguous()
            v = self.ops.rms_norm(heads, self.ones, s.norm.eps).view(len(qkv), -1)
        scaled = v if values.scale == 1.0 else v * values.scale
        return torch.cat((qkv[:, :columns], scaled), dim=1)

    def _gates(self, qkv: Tensor) -> Tensor:
        """[T, H, D]: each query head is followed by its own."""
        heads, dim = self.shape.heads, self.shape.head_dim
        gates: Tensor = qkv[:, : 2 * heads * dim].unflatten(1, (heads, 2, dim))[:, :, 1]
        return gates

    def _clipped(self, qkv: Tensor) -> Tensor:
        """OLMoE's clip_qkv: the clamp is between the norms and the rotation."""
        s = self.shape
        kv = s.kv_heads * s.head_dim
        q, k, v = torch.split(qkv, [qkv.shape[1] - 2 * kv, kv, kv], dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q = self.ops.rms_norm(q.contiguous(), self.q_norm, s.norm.eps)
            k = self.ops.rms_norm(k.contiguous(), self.k_norm, s.norm.eps)
        return torch.cat((q, k, v), dim=1).clamp_(-s.clip, s.clip)


def _as_halves(shape: Gqa) -> list[list[slice]]:
    """Rows of q and k in the order in which pairs of neighbours become halves, which is all that kernels turn: both
    change alike, so their products stay."""
    if shape.rope.pairs == "halves":
        return []
    assert shape.qk_norm == "none" and not shape.gate, "norms and gates of channels in another order"
    dims, head = shape.rope.dims, shape.head_dim

    def pieces(start: int) -> list[slice]:
        turned, stop = start + dims, start + head
        rest = [slice(turned, stop)] if turned < stop else []
        return [slice(start, turned, 2), slice(start + 1, turned, 2), *rest]

    counts = shape.heads, shape.kv_heads
    return [[piece for h in range(count) for piece in pieces(h * head)] for count in counts]


def operator(b: Builder, index: int, names: Names, shape: Gqa) -> Attention:
    layer = names.at(index)
    return Attention(b, shape, layer + names.attention, layer + names.own_gate)
