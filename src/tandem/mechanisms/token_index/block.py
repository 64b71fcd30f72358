"""Which tokens a layer's rows attend to: an indexer's matrices (DeepSeek-V3.2), written in `Ops` only. What lies
between them, and how its keys are cached, is in `mechanisms/token_index/torch.py` and `mechanisms/token_index/gpu`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tandem.kernels.ops import SureRead
from tandem.kernels.selected_keys import SelectedKeys
from tandem.mechanisms.token_index.pooled import KeyPoolWeights, PooledIndex, PooledKeys
from tandem.mechanisms.token_index.shape import Index
from tandem.mechanisms.token_index.torch import IndexWeights, TokenIndex
from tandem.models.builder import Builder
from tandem.models.linear import sure_reads
from tandem.models.passing import Arrays, ForwardState


class TokenChoice:
    """Queries of the attention's query latent; a key and the weights of the heads of the hidden state."""

    def __init__(self, b: Builder, shape: Index, q_rank: int, name: str) -> None:
        """name: of the indexer's module."""
        name, hidden, rope = name + ".", b.config.hidden, b.rope(shape.rope)
        self.query = b.linear([name + "wq_b"], [shape.heads * shape.dim], q_rank)
        self.key = b.linear([name + "wk"], [shape.dim], hidden)
        self.gates = b.float_linear(name + "weights_proj", shape.heads, hidden)
        norm, bias = (b.float_tensor(f"{name}k_norm.{part}", shape.dim) for part in ("weight", "bias"))
        self.index: TokenIndex = b.ops.bound(shape, IndexWeights(norm, bias, rope.cos, rope.sin))

    def reads(self) -> list[SureRead]:
        return sure_reads(self.query, self.key, self.gates)

    def __call__(self, x: Tensor, latent: Tensor, p: ForwardState, cache: Sequence[Arrays]) -> SelectedKeys | None:
        """x [T, hidden], normed; latent [T, q_rank], of the queries; cache: of the layer, with the indexer's keys."""
        ((_, keys),) = cache
        return self.index(self.query(latent), self.key(x), self.gates(x, torch.float32), p.batch, keys)


class PooledChoice:
    """Keys that stand for several tokens each: a token makes a key and its gates in one matrix (GLM-5.3-Flash)."""

    def __init__(self, b: Builder, shape: Index, q_rank: int, name: str) -> None:
        """name: of the indexer's module."""
        name, hidden, pooled = name + ".", b.config.hidden, name + ".index_kpool_compress_"
        self.query = b.linear([name + "wq_b"], [shape.heads * shape.dim], q_rank)
        self.keys = b.linear([name + "wk", pooled + "gate"], [shape.dim] * 2, hidden)
        self.gates = b.float_linear(name + "weights_proj", shape.heads, hidden)
        norm, bias = (b.float_tensor(f"{name}k_norm.{part}", shape.dim) for part in ("weight", "bias"))
        places = b.float_tensor(pooled + "ape", shape.pool, shape.dim)
        self.index: PooledIndex = b.ops.bound(shape, KeyPoolWeights(norm, bias, places))

    def reads(self) -> list[SureRead]:
        return sure_reads(self.query, self.keys, self.gates)

    def __call__(self, x: Tensor, latent: Tensor, p: ForwardState, cache: Sequence[Arrays]) -> SelectedKeys | None:
        """As `TokenChoice`'s."""
        (tokens,), (ring,), (keys,) = cache
        new_keys = self.keys(x)
        return self.index(self.query(latent), new_keys, self.gates(x, torch.float32), p, PooledKeys(tokens, ring, keys))
