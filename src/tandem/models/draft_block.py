"""`DraftBlock`: layers that draft a block of tokens at once (`spec.drafts.DraftBlockShape`), in `Ops` only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from tandem.architectures.names import BLOCK_NAMES, BlockNames, Names
from tandem.kernels.ops import Linear
from tandem.kernels.step_rows import BlockRows, step_rows
from tandem.models.batch import ForwardBatch
from tandem.models.builder import Builder
from tandem.models.layers import DecoderLayer, decoder_layer
from tandem.models.operator import SeesBlocks
from tandem.models.passing import ForwardState, States
from tandem.models.residual import add_pending, summed_up, widened

Embedding = Callable[[Tensor], Tensor]


class DraftBlock:
    """Row p of a batch is of the model's hidden state at p, and has the token at p + 1. Behind a row that is wanted the
    tokens at p + 2 and on are drafted, as many as the block has."""

    def __init__(self, b: Builder, names: Names) -> None:
        config, drafter = b.config, b.config.drafter
        assert drafter is not None and drafter.block is not None and drafter.layer.hyper is not None
        self.block, self.eps, self._dtype, self._ops = drafter.block, drafter.norm.eps, b.dtype, b.ops
        at, hidden, self._hyper = BLOCK_NAMES.of(self.block.layers), config.hidden, drafter.layer.hyper
        self._project = b.linear([at.projection], [hidden], len(self.block.reads) * hidden)
        self._projected_norm, self._norm = (
            b.norm(f"{name}.weight", drafter.norm, hidden) for name in (at.projected_norm, at.norm)
        )
        self.layers = [
            decoder_layer(b, len(config.layers) + number, replace(names, layer=at.at(number)))
            for number in range(self.block.layers)
        ]
        self._streams = summed_up(b, self._hyper, at.streams)
        self._pairs = _TokenPairs(b, at, self.block.rank)

    def __call__(
        self, embedding: Embedding, head: Linear, batch: ForwardBatch, states: States
    ) -> tuple[Tensor, Tensor]:
        """Draft tokens behind batch.logits_rows, int64 [R, n], and how likely each is, given those before it, float32
        [R, n]. states: each layer's ring, then the model's hidden states."""
        rings = [arrays[0] for arrays in states[:-1]]
        self._keep(batch, rings, states[-1][0])
        at, ids = self._rows(batch)
        if not len(ids):
            return ids, torch.empty(ids.shape)
        p = ForwardState(batch, widened(embedding(ids.flatten()).to(self._dtype), self._hyper))
        for layer, ring in zip(self.layers, rings, strict=True):
            self._through(layer, p, at, ring)
        add_pending(p)
        x = self._streams.summed(p.residual)
        logits = head(self._ops.rms_norm(x, self._norm, self.eps), torch.float32)
        return self._pairs(ids[:, 0], logits.view(*ids.shape, -1), x.view(*ids.shape, -1))

    def keep(self, layer: int, p: ForwardState, memory: Tensor) -> None:
        """Keeps the streams that a layer has left: whole once the next block has begun, or the streams have ended."""
        if layer in self.block.reads:
            means, at = p.residual.mean(1), self.block.reads.index(layer)
            p.rows.keep(memory.unflatten(2, (len(self.block.reads), -1))[:, :, at], means)

    def _keep(self, batch: ForwardBatch, rings: list[Tensor], hidden_ring: Tensor) -> None:
        """The batch's rows become keys of every layer."""
        rows = step_rows(batch)
        hidden = hidden_ring[rows.slots[rows.sequence], rows.positions % hidden_ring.shape[1]]
        x = self._ops.rms_norm(self._project(hidden), self._projected_norm, self.eps)
        for layer, ring in zip(self.layers, rings, strict=True):
            _attention(layer).keep(x, rows, ring)

    def _rows(self, batch: ForwardBatch) -> tuple[BlockRows, Tensor]:
        """Rows of the blocks behind the batch's `logits_rows`; and their tokens [R, n]."""
        logits_rows, rows = batch.logits_rows, step_rows(batch)
        last, n = rows.positions[logits_rows], self.block.size
        positions = last[:, None] + 1 + torch.arange(n, device=last.device)
        ids = torch.full_like(positions, self.block.unknown)
        ids[:, 0] = batch.input_ids[logits_rows]
        return BlockRows(positions.flatten(), rows.slots[rows.sequence[logits_rows]], last), ids

    def _through(self, layer: DecoderLayer, p: ForwardState, at: BlockRows, ring: Tensor) -> None:
        first, *others = layer.blocks
        p.pending = first.leave(_attention(layer).block(first.enter(p), at, ring))
        for block in others:
            p.pending = block.leave(block.operator(block.enter(p), p, ()))


def _attention(layer: DecoderLayer) -> SeesBlocks:
    operator = layer.blocks[0].operator
    assert isinstance(operator, SeesBlocks)
    return operator


class _TokenPairs:
    """Which token follows which: the token before a draft token moves its logits. So a block's draft tokens are made in
    turn."""

    def __init__(self, b: Builder, at: BlockNames, rank: int) -> None:
        vocab, self._dtype = b.config.vocab, b.dtype
        self._earlier = b.lookup(f"{at.earlier}.weight", vocab, rank)
        self._later = b.linear([at.later], [vocab], rank)
        self._confidence_head: Tensor | None = None
        if b.checkpoint.has_matrix(at.confidence):
            self._confidence_head = b.float_tensor(f"{at.confidence}.weight", 1, b.config.hidden + rank)[0]

    def __call__(self, before: Tensor, logits: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """before [R]; logits float32 [R, n, vocab], of the block alone; x [R, n, hidden]: before the last norm."""
        draft_tokens, chances = [before], list[Tensor]()
        for i in range(logits.shape[1]):
            earlier = self._earlier(draft_tokens[-1]).to(self._dtype)
            draft_tokens.append((logits[:, i] + self._later(earlier, torch.float32)).argmax(-1))
            chances.append(self._chance(x[:, i], earlier))
        return torch.stack(draft_tokens[1:], 1), torch.stack(chances, 1)

    def _chance(self, x: Tensor, earlier: Tensor) -> Tensor:
        """That a draft token is accepted, [R]; 1 where the checkpoint does not say."""
        if self._confidence_head is None:
            return x.new_ones(len(x), dtype=torch.float32)
        return torch.mv(torch.cat((x, earlier), 1).float(), self._confidence_head).sigmoid()
