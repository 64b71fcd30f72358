"""Which tokens a layer's rows attend to, by blocks of them: an indexer's matrices, written in `Ops` only."""

from __future__ import annotations

from torch import Tensor

from tandem.kernels.ops import SureRead
from tandem.kernels.selected_keys import SelectedKeys
from tandem.mechanisms.mean_index.shape import MeanIndex
from tandem.mechanisms.mean_index.torch import ChooseBlocks, MeanWeights
from tandem.mechanisms.token_index.pooled import PooledKeys
from tandem.models.builder import Builder
from tandem.models.linear import sure_reads
from tandem.models.passing import ForwardState, States


class BlockChoice:
    """Queries and a key of the hidden state, in one matrix; blocks of tokens have the mean of their keys."""

    def __init__(self, b: Builder, shape: MeanIndex, name: str) -> None:
        """name: of the indexer's module."""
        self.shape, hidden, rope = shape, b.config.hidden, b.rope(shape.rope)
        modules, rows = [f"{name}.q_proj", f"{name}.k_proj"], [shape.heads * shape.dim, shape.dim]
        if b.checkpoint.has_matrix(f"{name}.index_qk_proj"):
            modules, rows = [f"{name}.index_qk_proj"], [sum(rows)]
        self.projected = b.linear(modules, rows, hidden)
        q, k = (b.norm(f"{name}.{which}_layernorm.weight", shape.norm, shape.dim) for which in ("q", "k"))
        self.index: ChooseBlocks = b.ops.bound(shape, MeanWeights(q, k, rope.cos, rope.sin))

    def reads(self) -> list[SureRead]:
        return sure_reads(self.projected)

    def __call__(self, x: Tensor, p: ForwardState, cache: States) -> SelectedKeys | None:
        """x [T, hidden], normed; cache: of the layer, keys and values first."""
        (tokens, *_), (ring,), (keys,) = cache
        q, k = self.projected(x).split((self.shape.heads * self.shape.dim, self.shape.dim), 1)
        return self.index(q.contiguous(), k.contiguous(), p, PooledKeys(tokens, ring, keys))
