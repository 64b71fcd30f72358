"""Rows and columns of a matrix out of the mapped tensors that hold them: nothing else is read, and nothing decoded.

Where a cut goes through a group or a block of rows, all of those are read. Where it goes through what else belongs
together in the file (a word), all of the matrix is read first.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.checkpoint.parts import CODES, Parts, TensorPart
from tandem.checkpoint.stored_matrix import StoredMatrix, Tensors
from tandem.formats.codes import Weight
from tandem.formats.cut import columns_of, rows_of
from tandem.spec.shard import ALL

PER_PLACE = (1, 2, 4, 8, 32)  # codes that lie in one place of a tensor: in a byte, a word, a block

Cut = tuple[slice, ...]


def read_part(stored: StoredMatrix, parts: Parts, tensors: Tensors, rows: slice = ALL, columns: slice = ALL) -> Weight:
    """weight[rows, columns] of a matrix that was found in `parts`, its headers; `tensors` as `StoredMatrix.read`
    takes."""
    if rows == ALL and columns == ALL:
        return stored.read(tensors, stored.shape)
    units = stored.format.block_rows, stored.format.group
    wide = tuple(map(_covering, (rows, columns), units, stored.shape))
    if wide != (rows, columns):
        places = tuple(map(_inside, (rows, columns), wide, stored.shape))
        return own_columns(rows_of(read_part(stored, parts, tensors, wide[0], wide[1]), places[0]), places[1])
    cuts = _cuts(stored, parts, rows, columns)
    if cuts is None or not _in_order(stored, parts, tensors, columns):
        return own_columns(rows_of(stored.read(tensors, stored.shape), rows), columns)
    n, k = (len(range(*part.indices(size))) for part, size in zip((rows, columns), stored.shape, strict=True))
    first_group = (columns.start or 0) // (stored.format.group or k)

    def own(role: str) -> Tensor:
        part = tensors(role)[cuts[role]]
        return part - first_group if role == "order" else part

    weight = stored.read(own, (n, k))
    return weight.contiguous() if isinstance(weight, Tensor) else weight


def _covering(extent: slice, unit: int, size: int) -> slice:
    """Whole groups or blocks of `unit` that have those in them."""
    start, stop, step = extent.indices(size)
    first, last = start // max(1, unit) * unit, min(size, -(-stop // max(1, unit)) * unit)
    return extent if unit < 2 or step != 1 or (first, last) == (start, stop) else slice(first, last)


def _inside(extent: slice, wide: slice, size: int) -> slice:
    """The same places, counted from the beginning of `wide`."""
    (start, stop, _), first = extent.indices(size), wide.indices(size)[0]
    return ALL if extent == wide else slice(start - first, stop - first)


def own_columns(weight: Weight, columns: slice) -> Weight:
    """weight[:, columns]; numbers in memory of their own."""
    if columns == ALL:
        return weight
    cut = columns_of(weight, columns)
    return cut.contiguous() if isinstance(cut, Tensor) else cut


def _in_order(stored: StoredMatrix, parts: Parts, tensors: Tensors, columns: slice) -> bool:
    """Whether the inputs of a group lie side by side, where that matters."""
    if "order" not in parts or columns == ALL:
        return True
    depth = stored.shape[1]
    return torch.equal(tensors("order")[ALL], torch.arange(depth) // (stored.format.group or depth))


def _cuts(stored: StoredMatrix, parts: Parts, rows: slice, columns: slice) -> dict[str, Cut] | None:
    """Cuts of these rows and columns out of each tensor; None where they are no whole places of it."""
    if (rows.step or 1) != 1:
        return None
    cuts = {}
    for role, part in parts.items():
        cut = _cut(stored, part, role, rows, columns)
        if "qweight" in parts:
            cut = _cut(stored, part._replace(shape=part.shape[::-1]), role, rows, columns)
            cut = None if cut is None else cut[::-1]
        if cut is None:
            return None
        cuts[role] = cut
    return cuts


def _cut(stored: StoredMatrix, part: TensorPart, role: str, rows: slice, columns: slice) -> Cut | None:
    """The cut out of a tensor whose rows are the matrix's."""
    if role in ("shape", "multiplier", "divisor"):
        return ()
    if role == "order":
        return (columns,)
    sizes = zip(part.shape, stored.shape, strict=False)
    units = _units(stored, role, [_per_place(*each) for each in sizes])
    cut = [
        _places(range(*extent.indices(size)), size, unit)
        for extent, size, unit in zip((rows, columns), stored.shape, units, strict=False)
    ]
    return None if None in cut else tuple(each for each in cut if each is not None)


def _units(stored: StoredMatrix, role: str, per_place: list[int]) -> list[int]:
    """How many rows and columns share a place of the tensor; 0: all."""
    if role in CODES:
        return per_place
    shared = stored.format.block_rows, stored.format.group
    if role == "zeros" and shared[0]:
        shared = per_place[0], shared[1]
    return list(shared[: len(per_place)])


def _per_place(places: int, size: int) -> int:
    return next((each for each in PER_PLACE if -(-size // each) == places), 1)


def _places(extent: range, size: int, unit: int) -> slice | None:
    """Those of `size` rows or columns, `unit` in a place; None where these are no whole places."""
    if unit == 0 or len(extent) == size:
        return ALL
    if extent.start % unit or (extent.stop != size and extent.stop % unit):
        return None
    return slice(extent.start // unit, -(-extent.stop // unit))
