"""`Model`: embedding, decoder layers, head; the same for every family."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tandem.kernels.ops import Linear, Recorded, SureRead
from tandem.models.attention import KVPages
from tandem.models.batch import ForwardBatch
from tandem.models.builder import Builder
from tandem.models.foresight import feed_forwards
from tandem.models.layers import DecoderLayer

# Steps of few rows are recorded: in those, Python's part of the time is worth the memory of all their intermediate
# results (some twenty arrays of rows * hidden a layer).
RECORDED_ROWS = 8
RECORDED_ELEMENTS = 1 << 20  # rows * layers * hidden


class KVLayout(NamedTuple):
    """What the KV cache must hold: `layers` pairs of [num_pages, page_size, kv_heads, head_dim].

    `one_tensor`: keys are values, too, so that both of a pair are the same tensor.
    """

    layers: int
    kv_heads: int
    head_dim: int
    one_tensor: bool = False


class Model:
    """A decoder. Holds packed weights; the KV cache is the caller's."""

    def __init__(self, b: Builder, layer: Callable[[Builder, int], DecoderLayer]) -> None:
        config = b.config
        self.config, self.ops, self.dtype = config, b.ops, b.dtype
        a = config.attention
        self.kv_layout = KVLayout(config.layers, a.kv_heads, a.head_dim, a.latent is not None)
        self.head = head_of(b)
        self.final_norm = b.tensor("model.norm.weight", config.hidden)
        self.layers: list[DecoderLayer] = []
        for index in range(config.layers):
            self.layers.append(layer(b, index))
            b.layer_done(index)
        self._feed_forwards = feed_forwards(self.ops, self.layers, config.rms_eps)
        reads = [read for layer in self.layers for read in layer.reads()]
        self.ops.read_in_order([*reads, SureRead(self.head)])
        self._recorded: dict[int, Recorded | None] = {}  # by rows; for one KV cache
        self._recorded_cache: Tensor | None = None
        b.all_done()
        # Stays in the mapped file, as it is stored: a step reads a few rows of it.
        self.embedding = embedding_of(b)

    def forward(self, batch: ForwardBatch, kv: Sequence[KVPages]) -> Tensor:
        """Runs T new tokens; writes their K and V into `kv`. Returns logits of batch.logits_rows, f32 [R, vocab]."""
        embedded = self.embedding(batch.input_ids).to(self.dtype)
        rows = len(embedded)
        one_each = rows == len(batch.seq_lens) == len(batch.logits_rows)
        run = self._recorded_layers if one_each and self._worth_recording(rows) else self._layers
        return self.head(run(embedded, batch, kv), torch.float32)

    def _worth_recording(self, rows: int) -> bool:
        return rows <= RECORDED_ROWS and rows * self.config.layers * self.config.hidden <= RECORDED_ELEMENTS

    def _recorded_layers(self, embedded: Tensor, batch: ForwardBatch, kv: Sequence[KVPages]) -> Tensor:
        """`_layers` for one token per sequence: from the second call of its size on, a recording of the first."""
        if kv[0][0] is not self._recorded_cache:
            self._recorded_cache, self._recorded = kv[0][0], {}
        rows = len(embedded)
        if rows not in self._recorded:
            x, self._recorded[rows] = self.ops.record(lambda x, b: self._layers(x, b, kv), embedded, batch)
            return x
        recorded = self._recorded[rows]
        return self._layers(embedded, batch, kv) if recorded is None else recorded(embedded, batch)

    def _layers(self, residual: Tensor, batch: ForwardBatch, kv: Sequence[KVPages]) -> Tensor:
        """From the embedded tokens, which it changes, to the normed rows whose logits are wanted."""
        eps, norm = self.config.rms_eps, self.ops.add_rms_norm
        x = self.ops.rms_norm(residual, self.layers[0].input_norm, eps)
        following = [layer.input_norm for layer in self.layers[1:]]
        for i, layer in enumerate(self.layers):
            x = norm(layer.attention(x, batch, kv[i]), residual, layer.mlp_norm, eps)
            x = self._feed_forwards[i](x, residual)
            if i < len(following):
                x = norm(x, residual, following[i], eps)
        if len(batch.logits_rows) != len(x):
            x, residual = x[batch.logits_rows], residual[batch.logits_rows]
        return norm(x, residual, self.final_norm, eps)


def head_of(b: Builder) -> Linear:
    """The matrix that makes logits; the embedding itself where the two are tied."""
    name = "model.embed_tokens" if b.config.tied_embeddings else "lm_head"
    return b.linear([name], [b.config.vocab], b.config.hidden)


def embedding_of(b: Builder) -> Callable[[Tensor], Tensor]:
    """Ids [T] → rows [T, hidden] out of the mapped file, in the stored dtype or float32."""
    return b.lookup("model.embed_tokens.weight", b.config.vocab, b.config.hidden)
