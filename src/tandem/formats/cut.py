"""Numbers, rows, columns and stacks of weights, whatever they are stored as. Nothing is rounded."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from tandem.formats.codes import SHARING, Blocks, Weight, WeightCodes, scale_tensors
from tandem.formats.packed import finer
from tandem.formats.quant_format import CUT_GROUP
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
    by_row = _row_scales(weight)
    return _scales_cut(by_row, rows, codes=by_row.codes[rows])


def arranged(weight: Weight, pieces: Sequence[slice]) -> Weight:
    """Those rows, one piece after the other."""
    return together([rows_of(weight, piece) for piece in pieces])


def together(pieces: Sequence[Weight]) -> Weight:
    """Matrix of these pieces, one after the other."""
    whole = stacked(pieces)
    if whole is None:  # zero points in the middle are no zero points, and some may have others
        whole = tuple(numbers(piece) for piece in pieces)
    return torch.cat(whole) if isinstance(whole, tuple) else whole


def columns_of(weight: Weight, columns: slice) -> Weight:
    """weight[:, columns]; codes stay codes where the cut is between groups, or parts of groups that kernels take."""
    if not isinstance(weight, WeightCodes):
        return weight[:, columns]
    start, stop, _ = columns.indices(weight.depth)
    weight = _in_groups(weight, start, stop)
    group, width = weight.group, weight.codes.shape[1]
    halves = 1 if width == weight.depth else 2
    unit = SHARING if weight.halves is not None else group or halves
    if start % unit or (stop != weight.depth and stop % unit):
        return decoded(weight)[:, columns]
    codes = weight.codes[:, start // halves : -(-stop // halves)]
    return _rebuilt(weight, codes, _scale_columns(weight, start, stop), stop - start)


def _in_groups(weight: WeightCodes, start: int, stop: int) -> WeightCodes:
    """Whose groups end at `start` and `stop`, if groups of CUT_GROUP do."""
    ends = [start] if stop == weight.depth else [start, stop]
    if weight.halves is not None or weight.group <= CUT_GROUP or weight.group % CUT_GROUP:
        return weight
    if not any(end % weight.group for end in ends) or any(end % CUT_GROUP for end in ends):
        return weight
    return finer(weight, CUT_GROUP)


def _scale_columns(weight: WeightCodes, start: int, stop: int) -> dict[str, Tensor]:
    """Scales and what goes with them, of columns [start, stop)."""
    if weight.group == 0:
        return scale_tensors(weight)
    units = {"halves": SHARING, "offset_halves": SHARING}

    def cut(name: str, tensor: Tensor) -> Tensor:
        unit = units.get(name, weight.group)
        return tensor if name == "factors" else tensor[:, start // unit : -(-stop // unit)]

    return {name: cut(name, tensor) for name, tensor in scale_tensors(weight).items()}


def _rebuilt(like: WeightCodes, codes: Tensor, scales: dict[str, Tensor], depth: int) -> WeightCodes:
    """Other codes and scales in the format of `like`."""
    tensors = {name: tensor.contiguous() for name, tensor in scales.items()}
    scale = tensors.pop("scales")
    return WeightCodes(codes.contiguous(), scale, like.fmt, like.group, depth, like.block_rows, **tensors)


def one_tensor(numbers: Tensor | Blocks) -> Tensor:
    """[N, K], joined if it is not yet."""
    return numbers if isinstance(numbers, Tensor) else torch.cat(numbers)


def form_of(weight: Weight) -> Hashable:
    """Key that weights must share to be stacked: a dtype, or the layout of their codes."""
    if not isinstance(weight, WeightCodes):
        return weight.dtype
    return weight.fmt, weight.group, weight.scales.dtype, weight.depth, *scale_tensors(weight)


def stacked(weights: Sequence[Weight]) -> Weight | Blocks | None:
    """All rows in one matrix; None where formats differ, so that they must stay side by side."""
    if len(weights) == 1:
        return weights[0]
    if len({form_of(weight) for weight in weights}) > 1:
        return None
    codes = [w for w in weights if isinstance(w, WeightCodes)]
    if not codes:
        return tuple(w for w in weights if not isinstance(w, WeightCodes))
    if not _blocks_line_up(codes):
        codes = [_row_scales(w) for w in codes]
    scales = {name: torch.cat([getattr(w, name) for w in codes]) for name in scale_tensors(codes[0])}
    return _rebuilt(codes[0], torch.cat([w.codes for w in codes]), scales, codes[0].depth)


def _blocks_line_up(codes: Sequence[WeightCodes]) -> bool:
    block_rows = codes[0].block_rows
    return all(w.block_rows == block_rows for w in codes) and not any(w.rows % block_rows for w in codes[:-1])


def _row_scales(weight: WeightCodes) -> WeightCodes:
    """The same weights with scales of their own for every row."""
    if weight.block_rows == 1:
        return weight
    blocks = torch.arange(weight.rows) // weight.block_rows
    return replace(_scales_cut(weight, blocks, codes=weight.codes), block_rows=1)


def _scales_cut(weight: WeightCodes, index: slice | Tensor, codes: Tensor) -> WeightCodes:
    """Other codes, and the rows of scales that `index` chooses."""
    cut = {name: tensor[index] for name, tensor in scale_tensors(weight).items()}
    return _rebuilt(weight, codes, cut, weight.depth)
