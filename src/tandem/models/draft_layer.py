"""`DraftLayer`: a layer that guesses tokens from the model's own hidden states, written in `Ops` only."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from tandem.architectures import family_of
from tandem.architectures.names import DraftNames, Names
from tandem.checkpoint import Checkpoint
from tandem.config import ModelConfig
from tandem.errors import ConfigError
from tandem.kernels.ops import Linear
from tandem.models.batch import ForwardBatch
from tandem.models.builder import Builder
from tandem.models.layers import decoder_layer
from tandem.models.passing import Pass, States
from tandem.models.residual import OneStream


class DraftLayer:
    """Row p of a batch is of the hidden state at p and of the token at p + 1, and guesses the one at p + 2."""

    def __init__(self, b: Builder, names: Names) -> None:
        config, at = b.config, draft_names(b.config)
        assert config.drafter is not None
        norm, hidden, self.ops, self.dtype = config.drafter.norm, config.hidden, b.ops, b.dtype
        self.eps = norm.eps
        self.embedding_norm, self.hidden_norm, self.last_norm = (
            b.norm(f"{name}.weight", norm, hidden) for name in (at.embedding_norm, at.hidden_norm, at.norm)
        )
        self.projection = b.linear([at.projection], [hidden], 2 * hidden)
        self.layer = decoder_layer(b, len(config.layers), replace(names, layer=at.layer))
        self.ending = OneStream(b.ops)
        self.ids: Tensor | None = None  # of the tokens that are guessed; None: all
        if vocab := config.drafter.vocab:
            places = b.checkpoint.get(at.vocab, (vocab,), whole=True)
            ids = places.long() + torch.arange(vocab)
            self.ids, self._own_head = b.ops.resident(ids), _rows_of_head(b, ids)

    def __call__(self, embedded: Tensor, hidden: Tensor, batch: ForwardBatch, states: States) -> Tensor:
        """embedded, hidden [T, hidden]: of the tokens, and what the last norm made before them. states: the layer's
        own. Returns what its own norm makes of batch.logits_rows, [R, hidden]."""
        parts = (
            self.ops.rms_norm(embedded.to(self.dtype), self.embedding_norm, self.eps),
            self.ops.rms_norm(hidden, self.hidden_norm, self.eps),
        )
        p, first = Pass(batch, self.projection(torch.cat(parts, 1))), 0
        for block in self.layer.blocks:
            last = first + len(block.states)
            if not block.states:  # nobody asks for other rows any more
                p = _of(p, batch.logits_rows)
            if not len(p.residual):
                break
            p.pending = block.operator(block.enter(p), p, states[first:last])
            first = last
        return self.ending.enter(_of(p, batch.logits_rows), self.last_norm, self.eps)

    def guesses(self, x: Tensor, head: Linear) -> Tensor:
        """The likeliest tokens behind rows of what the layer returned, int64 [R]. head: the model's."""
        if self.ids is None:
            return head(x, torch.float32).argmax(-1)
        return self.ids[self._own_head(x, torch.float32).argmax(-1)]


def head_name(config: ModelConfig) -> str:
    """The matrix that makes logits; the embedding itself where the two are tied."""
    return "model.embed_tokens" if config.tied_embeddings else "lm_head"


def _rows_of_head(b: Builder, ids: Tensor) -> Linear:
    """Some rows of the model's head as a matrix of their own, which no cache keeps."""
    find = b.checkpoint.lookup(f"{head_name(b.config)}.weight", (b.config.vocab, b.config.hidden))
    return b.ops.linear(find(ids).to(b.dtype), None, b.dense_format)


def _of(p: Pass, rows: Tensor) -> Pass:
    """The same pass for some of its rows, or for all of them."""
    if len(rows) == len(p.residual):
        return p
    return Pass(p.batch, p.residual[rows], None if p.pending is None else p.pending[rows])


def draft_names(config: ModelConfig) -> DraftNames:
    """As the checkpoint has them."""
    names, number = family_of(config.model_type).drafts, len(config.layers)
    parts = names.layer, names.embedding_norm, names.hidden_norm, names.projection, names.norm, names.vocab
    return DraftNames(*(part.format(layer=number) for part in parts))


def check_draft_layer(config: ModelConfig, checkpoint: Checkpoint) -> None:
    """Raises ConfigError where a draft layer is wanted and its weights are not there."""
    if config.drafter is None:
        return
    projection = draft_names(config).projection
    if not checkpoint.has_matrix(projection):
        raise ConfigError(
            f"--speculative-algorithm NEXTN: {checkpoint.path_of(projection)} has no draft layer: there is no tensor "
            f"{projection}.weight; take NGRAM, which needs none, or leave it out",
            fields=("speculative_algorithm",),
        )
