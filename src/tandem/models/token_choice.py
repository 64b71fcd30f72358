"""Which tokens a layer's rows attend to: an indexer's matrices (DeepSeek-V3.2), written in `Ops` only. What lies
between them, and how its keys are cached, is in `kernels/token_index.py` and `kernels/gpu/chosen`."""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.config.mechanisms.latent import Index
from tandem.kernels.ops import SureRead
from tandem.kernels.token_index import Chosen, IndexWeights
from tandem.models.builder import Builder
from tandem.models.linear import sure_reads
from tandem.models.passing import Pass


class TokenChoice:
    """Queries of the attention's query latent; a key and the weights of the heads of the hidden state."""

    def __init__(self, b: Builder, shape: Index, q_rank: int, name: str) -> None:
        """name: of the indexer's module."""
        name, hidden, rope = name + ".", b.config.hidden, b.rope(shape.rope)
        self.query = b.linear([name + "wq_b"], [shape.heads * shape.dim], q_rank)
        self.key = b.linear([name + "wk"], [shape.dim], hidden)
        self.gates = b.float_linear(name + "weights_proj", shape.heads, hidden)
        norm, bias = (b.float_tensor(f"{name}k_norm.{part}", shape.dim) for part in ("weight", "bias"))
        self.index = b.ops.token_index(shape, IndexWeights(norm, bias, rope.cos, rope.sin))

    def reads(self) -> list[SureRead]:
        return sure_reads(self.query, self.key, self.gates)

    def __call__(self, x: Tensor, latent: Tensor, p: Pass, keys: Tensor) -> Chosen | None:
        """x [T, hidden], normed; latent [T, q_rank], of the queries; keys: the pages of the indexer's."""
        return self.index(self.query(latent), self.key(x), self.gates(x, torch.float32), p.batch, keys)
