"""Numbers, rows, columns and stacks of weights, whatever they are stored as. Nothing is rounded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from tandem.formats.codes import Weight, WeightCodes
from tandem.formats.reference import decoded


def numbers(weight: Weight) -> Tensor:
    """float32 [N, K] of codes; a tensor as it is."""
    return decoded(weight) if isinstance(weight, WeightCodes) else weight


def weight_bytes(weight: Weight) -> int:
    """As stored, or nearly so: codes and scales."""
    return weight.codes.nbytes + weight.scales.nbytes if isinstance(weight, WeightCodes) else weight.nbytes


def rows_of(weight: Weight, rows: slice) -> Weight:
    """weight[rows] of a matrix [N, K]; steps allowed."""
    if not isinstance(weight, WeightCodes):
        return weight[rows]
    start, stop, step = rows.indices(weight.rows)
    block = weight.block_rows
    if step == 1 and start % block == 0 and (stop == weight.rows or stop % block == 0):
        return _scales_cut(weight, slice(start // block, -(-stop // block)), codes=weight.codes[rows])
    apart = _row_scales(weight)
    return _scales_cut(apart, rows, codes=apart.codes[rows])


def columns_of(weight: Weight, columns: slice) -> Weight:
    """weight[:, columns]; codes stay codes where the cut is between groups."""
    if not isinstance(weight, WeightCodes):
        return weight[:, columns]
    start, stop, _ = columns.indices(weight.depth)
    group, width = weight.group, weight.codes.shape[1]
    halves = 1 if width == weight.depth else 2
    if start % (group or halves) or (stop != weight.depth and stop % (group or halves)):
        return decoded(weight)[:, columns]
    codes = weight.codes[:, start // halves : -(-stop // halves)]
    cut = slice(start // group, -(-stop // group)) if group else slice(None)
    return replace(_scales_cut(weight, (slice(None), cut), codes=codes), depth=stop - start)


def stacked(weights: Sequence[Weight]) -> Weight | None:
    """All rows in one matrix; None where formats differ, so that they must stay side by side."""
    if len(weights) == 1:
        return weights[0]
    codes = [w for w in weights if isinstance(w, WeightCodes)]
    plain = [w for w in weights if not isinstance(w, WeightCodes)]
    if not codes:
        return torch.cat(plain) if len({w.dtype for w in plain}) == 1 else None
    if plain or len({(w.fmt, w.group, w.scales.dtype, w.depth) for w in codes}) > 1:
        return None
    if not _blocks_line_up(codes):
        codes = [_row_scales(w) for w in codes]
    offsets = None if codes[0].offsets is None else torch.cat([_offsets(w) for w in codes])
    both = torch.cat([w.codes for w in codes]), torch.cat([w.scales for w in codes])
    return replace(codes[0], codes=both[0], scales=both[1], offsets=offsets)


def _blocks_line_up(codes: Sequence[WeightCodes]) -> bool:
    block_rows = codes[0].block_rows
    return all(w.block_rows == block_rows for w in codes) and not any(w.rows % block_rows for w in codes[:-1])


def _row_scales(weight: WeightCodes) -> WeightCodes:
    """The same weights with scales of their own for every row."""
    if weight.block_rows == 1:
        return weight
    apart = torch.arange(weight.rows) // weight.block_rows
    return replace(_scales_cut(weight, apart, codes=weight.codes), block_rows=1)


def _scales_cut(
    weight: WeightCodes, index: slice | tuple[slice, slice] | Tensor, codes: Tensor
) -> WeightCodes:
    """Other codes, and what `index` chooses of the scales and offsets."""
    offsets = None if weight.offsets is None else weight.offsets[index].contiguous()
    return replace(
        weight, codes=codes.contiguous(), scales=weight.scales[index].contiguous(), offsets=offsets
    )


def _offsets(weight: WeightCodes) -> Tensor:
    return torch.zeros_like(weight.scales) if weight.offsets is None else weight.offsets
