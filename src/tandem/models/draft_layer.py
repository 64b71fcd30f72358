"""`DraftLayer`: a layer that drafts tokens from the model's own hidden states, written in `Ops` only."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from tandem.architectures import family_of
from tandem.architectures.names import BLOCK_NAMES, DraftNames, Names
from tandem.errors import CheckpointError, ConfigError
from tandem.kernels.ops import Linear
from tandem.kernels.step_rows import step_rows
from tandem.models.batch import ForwardBatch
from tandem.models.builder import Builder
from tandem.models.layers import decoder_layer
from tandem.models.passing import ForwardState, States
from tandem.models.residual import OneStream, Residual, mean_of, norm_channels, summed_up
from tandem.planner.choices.speculation import DRAFT_ALGORITHMS, why_one_token
from tandem.spec.drafts import window_of
from tandem.spec.layers import ResidualStreams
from tandem.spec.model_config import ModelConfig
from tandem.spec.norm import Norm


class DraftLayer:
    """Row p of a batch is of the hidden state at p and of the token at p + 1, and drafts the one at p + 2."""

    def __init__(self, b: Builder, names: Names) -> None:
        config, at = b.config, draft_names(b.config)
        assert config.drafter is not None
        norm, hyper = config.drafter.norm, config.drafter.layer.hyper
        self.last_norm, self.eps = b.norm(f"{at.norm}.weight", norm, norm_channels(b, hyper)), norm.eps
        self.join = _Together(b, at, norm) if hyper is None else _Apart(b, at, norm, hyper)
        self.layer = decoder_layer(b, len(config.layers), replace(names, layer=at.layer))
        self._mean = config.drafter.mean
        if self._mean and (stored := f"{at.layer}{names.streams[0]}.fn") in b.checkpoint:
            raise CheckpointError(
                f"{b.checkpoint.path_of(stored)}: the draft layer has streams of its own ({stored}), which are not "
                "understood: leave --speculative-algorithm out"
            )
        self.ending: Residual = OneStream(b.ops) if hyper is None else summed_up(b, hyper, at.streams)
        self._in_slots = window_of(config.drafter.states(config.hidden)) > 0
        self.ids: Tensor | None = None  # of the tokens that are drafted; None: all
        if vocab := config.drafter.vocab:
            places = b.checkpoint.get(at.vocab, (vocab,), whole=True)
            ids = places.long() + torch.arange(vocab)
            if ids.min() < 0 or ids.max() >= b.config.vocab:
                raise CheckpointError(
                    f"{b.checkpoint.path_of(at.vocab)}: {at.vocab} names tokens beyond the vocabulary"
                )
            self.ids, self._own_head = b.ops.resident(ids), _rows_of_head(b, ids)

    def __call__(
        self, embedded: Tensor, hidden: Tensor, batch: ForwardBatch, states: States
    ) -> tuple[Tensor, Tensor]:
        """embedded [T, hidden]: of the tokens; hidden [T, n]: `hidden_rows` before them. states: the layer's own.
        Of batch.logits_rows, what its own norm makes, [R, hidden], and what stands for hidden rows, [R, n]."""
        p, first = ForwardState(batch, self.join(embedded, hidden)), 0
        for block in self.layer.blocks:
            last = first + len(block.states)
            if not block.states:  # nobody asks for other rows any more
                p = p.of(batch.logits_rows)
            if not len(p.residual):
                break
            p.pending = block.leave(block.operator(block.enter(p), p, states[first:last]))
            first = last
        if not len(batch.logits_rows):  # no kernel wants to run for no rows
            return embedded[:0], p.residual.flatten(1)[:0]
        p = p.of(batch.logits_rows)
        x = self.ending.enter(p, self.last_norm, self.eps)
        return x, self.hidden_rows(p, x)

    def hidden_rows(self, p: ForwardState, x: Tensor) -> Tensor:
        """Rows that the layer takes of a pass that has ended: its normed rows x, or all its streams, one behind the
        other, or their mean."""
        if self._mean:
            return p.residual if p.residual.dim() == 2 else mean_of(p.residual)
        return x if p.residual.dim() == 2 else p.residual.flatten(1)

    def keep(self, hidden: Tensor, p: ForwardState, memory: Tensor) -> None:
        """Hidden rows of a pass, where the layer finds them later."""
        if self._in_slots:
            p.rows.keep(memory, hidden)
        else:
            memory.flatten(0, 1)[p.batch.cache_slots] = hidden

    def hidden_of(self, batch: ForwardBatch, memory: Tensor) -> Tensor:
        """Those of a batch's positions."""
        if not self._in_slots:
            return memory.flatten(0, 1)[batch.cache_slots]
        rows = step_rows(batch)
        return memory[rows.slots[rows.sequence], rows.positions % memory.shape[1]]

    def draft_tokens(self, x: Tensor, head: Linear) -> Tensor:
        """The likeliest tokens behind rows of what the layer returned, int64 [R]. head: the model's."""
        if not len(x):
            return x.new_empty(0, dtype=torch.int64)
        if self.ids is None:
            return head(x, torch.float32).argmax(-1)
        return self.ids[self._own_head(x, torch.float32).argmax(-1)]


def head_name(b: Builder) -> str:
    """The matrix that makes logits: a stored head, whatever config.json says; else the embedding it is tied to."""
    tied = b.config.tied_embeddings and not b.checkpoint.has_matrix("lm_head")
    return "model.embed_tokens" if tied else "lm_head"


def _rows_of_head(b: Builder, ids: Tensor) -> Linear:
    """Some rows of the model's head as a matrix of their own, which no cache keeps."""
    find = b.checkpoint.lookup(f"{head_name(b)}.weight", (b.config.vocab, b.config.hidden))
    return b.ops.linear(find(ids).to(b.dtype), None, b.dense_format)


class _Together:
    """One projection of both, each normed."""

    def __init__(self, b: Builder, at: DraftNames, norm: Norm) -> None:
        self._norms, self._dtype = _Norms(b, at, norm, b.config.hidden), b.dtype
        self._projection = b.linear([at.projection], [b.config.hidden], 2 * b.config.hidden)

    def __call__(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        return self._projection(torch.cat(self._norms(embedded.to(self._dtype), hidden), 1))


class _Apart:
    """A projection of each, both normed; the token's is added to every stream."""

    def __init__(self, b: Builder, at: DraftNames, norm: Norm, hyper: ResidualStreams) -> None:
        self._wide = norm_channels(b, hyper)  # that are normed together: of a stream, or of all
        self._norms, self._dtype, hidden = _Norms(b, at, norm, self._wide), b.dtype, b.config.hidden
        self._token = b.linear([at.projection], [hidden], hidden)
        self._streams = b.linear([at.hidden_projection], [hidden], hidden)
        self._count = hyper.streams

    def __call__(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        token, streams = self._norms(embedded.to(self._dtype), hidden.contiguous().view(-1, self._wide))
        wide: Tensor = self._streams(streams.view(-1, embedded.shape[1])).unflatten(0, (-1, self._count))
        return self._token(token)[:, None] + wide


class _Norms:
    """Norms of tokens and of hidden states, of which `wide` channels are normed together."""

    def __init__(self, b: Builder, at: DraftNames, norm: Norm, wide: int) -> None:
        self._ops, self._eps = b.ops, norm.eps
        sizes = {at.embedding_norm: b.config.hidden, at.hidden_norm: wide}
        self._weights = [b.norm(f"{name}.weight", norm, size) for name, size in sizes.items()]

    def __call__(self, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        token, state = self._weights
        return self._ops.rms_norm(embedded, token, self._eps), self._ops.rms_norm(hidden, state, self._eps)


def draft_names(config: ModelConfig) -> DraftNames:
    """As the checkpoint has them."""
    return family_of(config.model_type).drafts.behind(len(config.layers))


class TensorNames(Protocol):
    """A checkpoint, or its index."""

    def has_matrix(self, module: str) -> bool: ...
    def path_of(self, name: str) -> Path: ...


def with_stored_drafts(model: ModelConfig, checkpoint: TensorNames, algorithm: str | None) -> ModelConfig:
    """The model, without a draft layer that its config.json has and the checkpoint does not. algorithm: the algorithm.

    Raises ConfigError where that layer is to draft.
    """
    if model.drafts is None:
        return model
    block = model.drafts.block is not None
    projection = (BLOCK_NAMES if block else draft_names(model)).projection
    if checkpoint.has_matrix(projection):
        return model
    if algorithm in DRAFT_ALGORITHMS and not why_one_token(model):
        raise ConfigError(
            f"--speculative-algorithm {algorithm}: {checkpoint.path_of(projection)} has no "
            f"{'DSpark draft' if block else 'draft layer'}: there is no tensor {projection}.weight; take NGRAM, which "
            "needs none, or leave it out",
            fields=("speculative_algorithm",),
        )
    return replace(model, drafts=None)
