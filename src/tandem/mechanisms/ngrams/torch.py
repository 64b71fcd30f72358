"""N-grams in torch: which rows of a table a token reads, how their sums are gated, and a dilated convolution."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.kernels.batch_layout import TokenBatch
from tandem.kernels.gates import in_whole_vectors
from tandem.kernels.ops import Lookup, Ops
from tandem.kernels.step_rows import StepRows
from tandem.kernels.unread_rows import unread_rows, unread_tokens
from tandem.mechanisms.gated_streams.torch import GatedMix
from tandem.mechanisms.ngrams.shape import Ngram

LEAST_GATE = 1e-6
CONVOLVED_ROWS = 256  # at a time: four rows of all streams each are gathered for one


class Hashes(NamedTuple):
    """int64: a multiplier of each place of an n-gram [longest]; of each hash how many rows of the table are its own,
    and the first of them, [hashes]."""

    multipliers: Tensor
    sizes: Tensor
    offsets: Tensor


class NgramWeights(NamedTuple):
    """Hashes, where their rows are found, norms' weights float32 [n * hidden] of keys and of what is given, taps
    float32 [taps, n * hidden]. mix: norms of all streams. rows: of a step, at most."""

    hashes: Hashes
    find: Lookup
    key_norm: Tensor
    given_norm: Tensor
    taps: Tensor
    mix: GatedMix
    rows: int


class Ngrams(Protocol):
    """n-grams around their matrix."""

    def entries(self, batch: TokenBatch, rows: StepRows, ids: Tensor) -> Tensor:
        """[T, width]: the table's rows that each token's hashes name, side by side. ids [slots, R, 1]: a ring of the
        last ids, where this machine keeps them so."""
        ...

    def additions(self, projected: Tensor, x: Tensor, rows: StepRows, ring: Tensor) -> Tensor:
        """projected [T, n * hidden + hidden]: keys and values; x [T, n, hidden]: streams, normed → what each stream is
        given, [T, n, hidden]. ring [slots, R, n * hidden]: what last tokens gave to the convolution."""
        ...


class TorchNgrams:
    """`Ngrams` in torch, on the CPU."""

    def __init__(self, shape: Ngram, weights: NgramWeights) -> None:
        self._shape, self._weights = shape, weights

    def entries(self, batch: TokenBatch, rows: StepRows, ids: Tensor) -> Tensor:
        """As `Ngrams`, of the stored type or float32."""
        s, w = self._shape, self._weights
        numbers, parts = hashed(last_ids(batch.input_ids, rows, ids, s), w.hashes, s.heads), dict[int, Tensor]()

        def read(part: slice) -> None:
            parts[part.start] = w.find(numbers[part].flatten()).view(-1, s.width)

        if unread := unread_tokens(read, len(numbers)):
            unread_rows.tell(batch, unread)
            parts |= {token: torch.full((1, s.width), torch.nan) for token in unread}
        return parts[0] if len(parts) == 1 else torch.cat([part for _, part in sorted(parts.items())])

    def additions(self, projected: Tensor, x: Tensor, rows: StepRows, ring: Tensor) -> Tensor:
        """As `Ngrams`."""
        s, w = self._shape, self._weights
        keys, values = projected.split((s.channels, s.hidden), 1)
        keys = w.mix.normed(keys.unflatten(1, (s.streams, s.hidden)), w.key_norm, s.norm.eps)
        gated = gated_values(keys, x, values)
        new = w.mix.normed(gated, w.given_norm, s.norm.eps).flatten(1)
        mixed: Tensor = gated + convolved(new, rows, ring, w.taps, s.dilation).view(gated.shape)
        return mixed


def last_ids(ids: Tensor, rows: StepRows, ring: Tensor, shape: Ngram) -> Tensor:
    """ids int64 [T] → int64 [T, longest]: each row's own, then those before it, newest first; `stop` for those that
    its segment lacks. ring [slots, R, 1] takes the ids in."""
    known, at = rows.taken_in(ring, ids[:, None].to(ring.dtype), shape.longest)
    mask = rows.positions[:, None] >= torch.arange(shape.longest)
    last = torch.where(mask, known[at][..., 0], float(shape.stop)).long()
    ended = (last[:, 1:] == shape.stop).cumsum(1) > 0
    return torch.cat((last[:, :1], last[:, 1:].masked_fill(ended, shape.stop)), 1)


def hashed(ids: Tensor, hashes: Hashes, heads: int) -> Tensor:
    """`last_ids` [T, longest] → numbers of the table's rows, int64 [T, hashes]."""
    products = ids * hashes.multipliers
    mixed, each = products[:, 0], list[Tensor]()
    for place in range(1, ids.shape[1]):
        mixed = mixed ^ products[:, place]
        each.append(mixed[:, None].expand(-1, heads))
    return torch.cat(each, 1) % hashes.sizes + hashes.offsets


def gated_values(keys: Tensor, queries: Tensor, values: Tensor) -> Tensor:
    """keys and queries [T, n, hidden], both normed; values [T, hidden] → what each stream is given, [T, n, hidden]."""
    products = (keys * queries).sum(-1) / keys.shape[2] ** 0.5
    roots = products.abs().clamp_min(LEAST_GATE).sqrt() * products.sign()
    gates = in_whole_vectors(torch.sigmoid, roots)
    gated: Tensor = gates[..., None] * values[:, None]
    return gated


def convolved(new: Tensor, rows: StepRows, ring: Tensor, taps: Tensor, dilation: int) -> Tensor:
    """silu of a causal convolution of each channel of new [T, C], whose taps lie `dilation` tokens apart. taps float32
    [taps, C], the newest token's last. ring [slots, R, C], with room for all tokens from tap to tap, takes in the new
    rows."""
    span = (len(taps) - 1) * dilation + 1
    known, at = rows.taken_in(ring, new, span)
    at = at[:, ::dilation]
    mask = rows.positions[:, None] >= dilation * torch.arange(len(taps))
    pieces = [_convolved(known, at[i : i + CONVOLVED_ROWS], mask[i : i + CONVOLVED_ROWS], taps)
              for i in range(0, len(new), CONVOLVED_ROWS)]  # fmt: skip
    return in_whole_vectors(F.silu, torch.cat(pieces).to(new.dtype))


def _convolved(known: Tensor, at: Tensor, mask: Tensor, taps: Tensor) -> Tensor:
    """float32 [t, C]. at, mask [t, taps]: where the tokens lie, newest first, and whether they do."""
    mixed = known[at[:, 0]].float() * taps[-1]
    for back in range(1, len(taps)):
        mixed += torch.where(mask[:, back, None], known[at[:, back]].float(), 0.0) * taps[-1 - back]
    return mixed


def bound(ops: Ops, shape: Ngram, weights: NgramWeights) -> Ngrams:
    return TorchNgrams(shape, weights)
