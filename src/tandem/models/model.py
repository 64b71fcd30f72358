"""`Model`: embedding, decoder layers, head; the same for every family."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tandem.architectures import family_of
from tandem.architectures.names import Names
from tandem.formats.cut import numbers
from tandem.kernels.ops import Linear, Ops, Recorded
from tandem.models.batch import ForwardBatch, ImageRowBatch
from tandem.models.builder import Builder
from tandem.models.draft_block import DraftBlock
from tandem.models.draft_layer import DraftLayer, head_name
from tandem.models.foresight import operators
from tandem.models.layers import DecoderLayer, decoder_layer
from tandem.models.linear import GatheredLinear, sure_reads
from tandem.models.operator import Routed
from tandem.models.passing import ForwardState, States
from tandem.models.residual import OneStream, Residual, add_pending, end_of, norm_channels, widened
from tandem.models.vision.tower import tower_of
from tandem.spec.model_config import ModelConfig, head_rows

# Steps of few rows are recorded: in those, Python's part of the time is worth the memory of all their intermediate
# results (some twenty arrays of rows * hidden a layer).
RECORDED_ROWS = 8
RECORDED_ELEMENTS = 1 << 20  # rows * layers * hidden
UNIT_EPS = 1e-7  # beside the length of a head's column


class Model:
    """A decoder. Holds packed weights; what it keeps of sequences is the caller's, as `ModelConfig.state_layout` says.

    `forward` is begin, every layer in turn, end. A caller may pause between them: a `ForwardState` holds all there is.
    """

    def __init__(self, b: Builder) -> None:
        config = b.config
        self.config, self.ops, self.dtype = config, b.ops, b.dtype
        b.place(len(config.layers) - 1)
        self.head = head_of(b)
        self.final_norm = final_norm_of(b)
        names = names_of(b)
        self.ending = end_of(b, names)
        self.layers: list[DecoderLayer] = []
        for index in range(len(config.layers)):
            b.place(index)
            self.layers.append(decoder_layer(b, index, names))
            b.layer_done(index)
        _join_late(b.ops, self.layers, self.ending)
        self._spans = _spans(self.layers)
        self._operators = operators(self.layers)
        reads = [read for layer in self.layers for read in layer.reads()]
        self.ops.read_in_order([*reads, *sure_reads(self.head)])
        self.drafter = drafter_of(b, names)
        self.tower = tower_of(b)
        self._read = self.drafter if isinstance(self.drafter, DraftBlock) else None
        self._recorded: dict[int, Recorded | None] = {}  # by rows; for one KV cache
        self._recorded_cache: Tensor | None = None
        b.all_done()
        self._turning, self._streams = b.turning, b.config.layers[0].hyper
        b.place(0)
        # Stays in the mapped file, as it is stored: a step reads a few rows of it.
        self.embedding = embedding_of(b)

    def forward(self, batch: ForwardBatch, states: States) -> Tensor:
        """Runs T new tokens and keeps of them what `states` are for. Returns logits of batch.logits_rows, f32
        [R, vocab]."""
        embedded = self._embedded(batch)
        rows = len(embedded)
        # As in decode steps, with drafts or without.
        all_rows = rows == len(batch.logits_rows) and batch.image_rows is None
        if all_rows and self._worth_recording(rows):
            x = self._recorded_layers(embedded, batch, states)
            return self._logits(x, ForwardState(batch, x), states)
        return self.logits(self._through(embedded, batch, states), states)

    def draft(self, hidden: Tensor | None, batch: ForwardBatch, states: States) -> tuple[Tensor, Tensor]:
        """The draft layer's token for each of batch.logits_rows, int64 [R], and hidden rows for the next, [R, n].
        Of layers that draft a block, all that they draft, [R, n], and how likely each is.

        Row p of the batch has the token at p + 1. hidden: what stands for the model's hidden states; None: they are
        those that `forward` kept of the batch's positions.
        """
        assert self.drafter is not None, "a model without a draft layer"
        first = self._spans[-1][1] + sum(len(block.states) for block in self.layers[-1].blocks)
        if isinstance(self.drafter, DraftBlock):
            return self.drafter(self.embedding, self.head, batch, states[first:])
        if hidden is None:
            hidden = self.drafter.hidden_of(batch, states[-1][0])
        x, hidden = self.drafter(self.embedding(batch.input_ids), hidden, batch, states[first:-1])
        return self.drafter.draft_tokens(x, self.head), hidden

    def _logits_rows(self, x: Tensor, p: ForwardState, states: States) -> Tensor:
        """The rows whose logits are wanted. Where a draft layer follows, x has all rows, and it can read them later."""
        if self.drafter is None:
            return x
        if self._read is not None:
            self._read.keep(len(self.layers) - 1, p, states[-1][0])
        elif isinstance(self.drafter, DraftLayer):
            self.drafter.keep(self.drafter.hidden_rows(p, x), p, states[-1][0])
        rows = p.batch.logits_rows
        return x if len(rows) == len(x) else x[rows]

    def begin(self, batch: ForwardBatch) -> ForwardState:
        """A pass over T new tokens, before the first layer."""
        return ForwardState(batch, widened(self._embedded(batch), self._streams))

    def _embedded(self, batch: ForwardBatch) -> Tensor:
        """[T, hidden] before the first layer; rows of images have what was seen there."""
        embedded = self.embedding(batch.input_ids).to(self.dtype)
        if batch.image_rows is not None:
            self._turned(batch.image_rows)
            embedded[batch.image_rows.rows] = batch.image_rows.features[:, 0].to(self.dtype)
        return embedded

    def _turned(self, images: ImageRowBatch) -> None:
        """Makes the rows of the rotary tables that image rows turn by: each pair has that of one of three positions."""
        for rope, axes in self._turning:
            places, rows = images.places[:, axes], slice(images.first, images.first + len(images.rows))
            for table in (rope.cos, rope.sin):
                table[rows] = table.gather(0, places)

    def layer(self, p: ForwardState, index: int, states: States) -> None:
        """Takes a pass through layer `index`; the caller has taken it through all before."""
        first_block, first_state = self._spans[index]
        for i, block in enumerate(self.layers[index].blocks, first_block):
            last_state = first_state + len(block.states)
            own, x = states[first_state:last_state], block.enter(p)
            if i == first_block and self._read is not None:
                self._read.keep(index - 1, p, states[-1][0])
            p.pending = block.leave(self._operators[i](x, p, own))
            first_state = last_state
        if p.batch.image_rows is not None and index + 1 < p.batch.image_rows.features.shape[1]:
            add_pending(p)
            assert p.addend is None, "a layer whose result is not whole yet"
            p.residual.index_add_(0, p.batch.image_rows.rows, p.batch.image_rows.features[:, index + 1].to(self.dtype))

    def end(self, p: ForwardState) -> Tensor:
        """The normed rows whose logits are wanted, [R, hidden]; all where a draft layer wants them."""
        assert p.pending is not None or p.batch.image_rows is not None, "no layer has run"
        rows = p.batch.logits_rows
        if len(rows) != len(p.residual) and self.drafter is None:
            p = p.of(rows)
        return self.ending.enter(p, self.final_norm, self.config.norm.eps)

    @property
    def depth(self) -> int:
        """Layers."""
        return len(self.layers)

    def logits(self, p: ForwardState, states: States) -> Tensor:
        """Logits as `forward` returns them, of a pass that has run through all layers."""
        return self._logits(self.end(p), p, states)

    def _logits(self, x: Tensor, p: ForwardState, states: States) -> Tensor:
        return finished(self.head(self._logits_rows(x, p, states), torch.float32), self.config)

    def _layers(self, embedded: Tensor, batch: ForwardBatch, states: States) -> Tensor:
        """From the embedded tokens, which it changes, to the normed rows whose logits are wanted."""
        return self.end(self._through(embedded, batch, states))

    def _through(self, embedded: Tensor, batch: ForwardBatch, states: States) -> ForwardState:
        p = ForwardState(batch, widened(embedded, self._streams))
        for index in range(len(self.layers)):
            self.layer(p, index, states)
        return p

    def _worth_recording(self, rows: int) -> bool:
        if self._streams is not None:  # torch mixes streams, which a recording cannot repeat
            return False
        elements = rows * len(self.layers) * self.config.hidden
        return rows <= RECORDED_ROWS and elements <= RECORDED_ELEMENTS

    def _recorded_layers(self, embedded: Tensor, batch: ForwardBatch, states: States) -> Tensor:
        """`_layers` where all logits are wanted: from the second call of its size on, a recording of the first. Which
        rows are whose does not matter: the indices are exchanged as a whole."""
        if states[0][0] is not self._recorded_cache:
            self._recorded_cache, self._recorded = states[0][0], {}
        rows = len(embedded)
        if rows not in self._recorded:
            x, self._recorded[rows] = self.ops.record(
                lambda x, b: self._layers(x, b, states), embedded, batch
            )
            return x
        recorded = self._recorded[rows]
        return self._layers(embedded, batch, states) if recorded is None else recorded(embedded, batch)


def drafter_of(b: Builder, names: Names) -> DraftLayer | DraftBlock | None:
    """Model part that drafts tokens; None where none is loaded."""
    drafter = b.config.drafter
    if drafter is None:
        return None
    return DraftLayer(b, names) if drafter.block is None else DraftBlock(b, names)


def _join_late(ops: Ops, layers: list[DecoderLayer], ending: Residual) -> None:
    """A shared expert's result is added by the norm that follows, where nothing else stands between the two."""
    blocks = [block for layer in layers for block in layer.blocks]
    following = [*(block.residual for block in blocks[1:]), ending]
    for block, after in zip(blocks, following, strict=True):
        if isinstance(block.operator, Routed) and block.post is None and isinstance(after, OneStream):
            block.operator.fuse_shared_add = ops.fuse_shared_add and after.scale is None


def _spans(layers: list[DecoderLayer]) -> list[tuple[int, int]]:
    """Numbers of each layer's first block and first state."""
    spans, block, state = [], 0, 0
    for layer in layers:
        spans.append((block, state))
        block += len(layer.blocks)
        state += sum(len(each.states) for each in layer.blocks)
    return spans


def names_of(b: Builder) -> Names:
    """Names of the checkpoint's layers: of the family's spellings the first whose router is there, with its bias if it
    has one."""
    spellings = family_of(b.config.model_type).names
    layers, router = b.config.moe_layers, b.config.moe.router
    for names in spellings if layers else ():
        layer = names.at(layers[0])
        needed = [f"{layer}{names.router}.weight", *([layer + names.router_bias] if router.has_bias else [])]
        if all(name in b.checkpoint for name in needed):
            return names
    return spellings[0]


def head_of(b: Builder) -> Linear:
    own = b.linear([head_name(b)], [head_rows(b.config)], b.config.hidden)
    return own if b.ops.group is None else GatheredLinear(own, b.ops.group, b.config.vocab)


def final_norm_of(b: Builder) -> Tensor:
    """The last norm's weight. What a head's columns are divided by, its inputs are instead."""
    name, hidden = "model.norm.weight", b.config.hidden
    if not b.config.unit_head:
        return b.norm(name, b.config.norm, norm_channels(b, b.config.layers[-1].hyper))
    head = numbers(b.checkpoint.weight(head_name(b), (b.config.vocab, hidden)))
    lengths = torch.linalg.vector_norm(head, dim=0, dtype=torch.float32) + UNIT_EPS
    return b.ops.resident(b.checkpoint.get(name, (hidden,)).float().to(lengths.device) / lengths)


def embedding_of(b: Builder) -> Callable[[Tensor], Tensor]:
    """Ids [T] → rows [T, hidden] out of the mapped file, in the stored dtype or float32; scaled ones in the
    activations'."""
    in_ram, dtype = b.plan.gpu is not None and b.plan.gpu.embedding_in_ram, b.dtype
    find = b.lookup(f"{_embedding_name(b)}.weight", b.config.vocab, b.config.hidden, in_ram)
    if b.config.embedding_scale == 1.0:
        return find
    scale = b.config.embedding_scale
    if b.config.embedding_scale_rounded:
        scale = torch.tensor(scale).to(dtype).item()
    return lambda ids: find(ids).to(dtype) * scale


def _embedding_name(b: Builder) -> str:
    """Its module: a checkpoint of tied matrices may have the head alone."""
    name = "model.embed_tokens"
    head_alone = b.config.tied_embeddings and not b.checkpoint.has_matrix(name) and b.checkpoint.has_matrix("lm_head")
    return "lm_head" if head_alone else name


def finished(logits: Tensor, config: ModelConfig) -> Tensor:
    """Logits from the head's products: scaled and capped as the model has it, in place."""
    cap, scaled = config.logit_cap, logits if config.logit_scale == 1.0 else logits.mul_(config.logit_scale)
    return scaled if not cap else scaled.div_(cap).tanh_().mul_(cap)
