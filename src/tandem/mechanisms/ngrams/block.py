"""N-grams of tokens in the residual streams, written in `Ops` only; what lies between its matrices is in `torch.py`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tandem.architectures.names import Names
from tandem.errors import CheckpointError
from tandem.kernels.ops import StoredTable, SureRead
from tandem.mechanisms.gated_streams.block import whole_streams
from tandem.mechanisms.gated_streams.torch import GatedMix
from tandem.mechanisms.ngrams.numbers import RowNumbers
from tandem.mechanisms.ngrams.shape import Ngram
from tandem.mechanisms.ngrams.torch import Hashes, Ngrams, NgramWeights
from tandem.models.builder import Builder
from tandem.models.linear import sure_reads
from tandem.models.operator import ReadsTable, TakesStreams, TokenSpan
from tandem.models.passing import ForwardState, States


class NgramBlock(TakesStreams, ReadsTable):
    """One product makes a key of each stream and a value, of what a token's hashes name."""

    def __init__(self, b: Builder, shape: Ngram, name: str) -> None:
        """name: of the module that holds its own."""
        self.shape, self.ops, self.dtype, name = shape, b.ops, b.dtype, name + "."
        self.norm_name, self.norm_channels = f"{name}norm_query.weight", shape.channels
        self.residual = whole = whole_streams(b.ops, shape.streams)
        sizes = [shape.channels, shape.hidden]
        self.projected = b.linear([f"{name}key_proj", f"{name}value_proj"], sizes, shape.width)
        weights = self._weights(b, name, whole.mix)
        self.ngrams: Ngrams = b.ops.bound(shape, weights)
        self._find, self._numbers = weights.find, RowNumbers(shape, weights.hashes)

    def _weights(self, b: Builder, name: str, mix: GatedMix) -> NgramWeights:
        shape, at = self.shape, f"{name}ple_embedding."
        hashes = Hashes(
            b.whole_numbers(f"{at}layer_multipliers", shape.longest),
            b.whole_numbers(f"{at}ngram_heads_vocab_sizes", shape.hashes),
            b.whole_numbers(f"{at}ngram_heads_offsets", shape.hashes),
        )
        self._check(b, hashes, at)
        find = b.table(f"{at}ngram_embedding", shape.table)
        key_norm, given_norm = (
            b.norm(f"{name}norm_{which}.weight", shape.norm, shape.channels) for which in ("key", "conv")
        )
        taps = b.float_tensor(f"{name}conv1d.weight", shape.channels, 1, shape.taps)
        taps = b.ops.resident(taps[:, 0].T.contiguous())
        return NgramWeights(hashes, find, key_norm, given_norm, taps, mix, b.plan.max_step_tokens)

    def _check(self, b: Builder, hashes: Hashes, at: str) -> None:
        """Raises CheckpointError where numbers of rows would lie outside the table."""
        rows = self.shape.table.rows
        least = int(hashes.sizes.min()), int(hashes.offsets.min())
        empty = bool(hashes.sizes.any()) and least[0] < 1  # a trial, which reads no tensor, has zeros alone
        if empty or least[1] < 0 or int((hashes.offsets + hashes.sizes).max()) > rows:
            raise CheckpointError(f"{b.checkpoint.path_of(at)}: {at}ngram_heads_* name rows beyond the table's {rows}")

    def reads(self) -> list[SureRead]:
        return sure_reads(self.projected)

    def read_ahead(self, spans: Sequence[TokenSpan]) -> None:
        """As `ReadsTable`."""
        if isinstance(self._find, StoredTable) and spans:
            numbers = [self._numbers.of_text(*span) for span in spans]
            self._find.read_ahead(torch.cat(numbers).view(-1))

    def __call__(self, x: Tensor, p: ForwardState, states: States) -> Tensor:
        """x [T, n, hidden]: the streams, normed -> what each is given, [T, n, hidden]."""
        (ids,), (ring,) = states
        entries = self.ngrams.entries(p.batch, p.rows, ids).to(self.dtype)
        return self.ngrams.additions(self.projected(entries), x, p.rows, ring)


def operator(b: Builder, index: int, names: Names, shape: Ngram) -> NgramBlock:
    return NgramBlock(b, shape, names.at(index) + names.ngram)
