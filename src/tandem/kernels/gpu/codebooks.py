"""Codebook formats on the GPU: 8 k of a row are an index, or two, into a table of 16-bit entries, and signs.

An entry has 2 bits of each of 8 values, or 3 bits of each of 4. So the tables are 0.5 to 4 KB, and a warp's look-ups
touch few cache lines. Entries become bytes four at a time; of a row's 8 bytes the planes are taken (`panels.py`).
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.formats.gguf_grids import FORMATS, grid_entries

BYTES = {"iq2_xxs": 32, "iq2_xs": 32, "iq2_s": 36, "iq3_xxs": 48, "iq3_s": 52, "iq1": 24}
"""Bytes of 8 k of a panel's 16 rows: csrc/format/grids.h."""
assert tuple(BYTES) == FORMATS


@functools.cache
def table(fmt: str, device: torch.device) -> Tensor:
    """A codebook's entries on the device, int16 [entries]."""
    with torch.inference_mode(False):
        return grid_entries(fmt).to(device)


@triton.jit
def _field(words, row, inside, PER: tl.constexpr, BITS: tl.constexpr):
    """The row's field of the words from `words` on, PER fields of BITS bits in each."""
    return tl.load(words + row // PER, inside, other=0) >> (row % PER * BITS) & ((1 << BITS) - 1)


@triton.jit
def _entry(table, index):
    return tl.load(table + index).to(tl.int32) & 0xFFFF


@triton.jit
def _four_pairs(bits):
    """Four fields of 2 bits, as bytes."""
    two = (bits | bits << 12) & 0x000F000F
    return (two | two << 6) & 0x03030303


@triton.jit
def _four_threes(bits):
    """Four fields of 3 bits, as bytes."""
    two = (bits | bits << 10) & 0x003F003F
    return (two | two << 5) & 0x07070707


@triton.jit
def _signed(sizes, signs):
    """Four bytes of 1 to 127, negative where one of the lower 4 bits of `signs` is set, plus 128 each."""
    negative = ((signs & 15) * 0x00204081) & 0x01010101
    return ((sizes ^ ((negative << 8) - negative)) + negative) ^ -2139062144


@triton.jit
def _with_parity(seven):
    """The eighth sign makes the number of negative ones even."""
    odd = seven ^ seven >> 4
    odd ^= odd >> 2
    return seven | ((odd ^ odd >> 1) & 1) << 7


@triton.jit
def _iq2_sizes(bits):
    """8, 25 and 43 for 0, 1 and 2."""
    code = _four_pairs(bits)
    return code * 17 + (code >> 1 & 0x01010101) + 0x08080808


@triton.jit
def _iq3_sizes(bits, FMT: tl.constexpr):
    """8, 24, 40 ...; IQ3_XXS' last one is 124."""
    code = _four_threes(bits)
    sizes = code * 16 + 0x08080808
    if FMT == 13:
        sizes += (code & code >> 1 & code >> 2 & 0x01010101) * 4
    return sizes


@triton.jit
def codebook_bytes(words, at, lane, inside, table, FMT: tl.constexpr):
    """The 8 values of blocks `at` of the rows `lane` of the panel at `words`, plus 128 each: bytes in two words."""
    if FMT == 15:  # iq1: 8 times -1, 0 or 1, plus or minus 1
        own = words + at * 6
        upper = _field(own + 4, lane, inside, 8, 4)
        entry = _entry(table, _field(own, lane, inside, 4, 8) | (upper & 7) << 8)
        base = 0x79797979 - (upper >> 3) * 0x02020202
        low = _four_pairs(entry & 255) * 8 + base
        high = _four_pairs(entry >> 8) * 8 + base
    elif FMT >= 13:  # iq3
        own = words + at * (12 if FMT == 13 else 13)
        both = _field(own, lane, inside, 2, 16)
        first = both & 255
        second = both >> 8
        if FMT == 14:
            more = tl.load(own + 12, inside, other=0) >> (lane * 2)
            first |= (more & 1) << 8
            second |= (more & 2) << 7
        signs = _field(own + 8, lane, inside, 4, 8)
        low = _signed(_iq3_sizes(_entry(table, first), FMT), signs)
        high = _signed(_iq3_sizes(_entry(table, second), FMT), signs >> 4)
    else:  # iq2
        own = words + at * (9 if FMT == 12 else 8)
        if FMT == 11:
            both = _field(own, lane, inside, 2, 16)
            index = both & 511
            signs = _with_parity(both >> 9)
        else:
            index = _field(own, lane, inside, 4, 8)
            signs = _field(own + 4, lane, inside, 4, 8)
        if FMT == 12:
            index |= (tl.load(own + 8, inside, other=0) >> (lane * 2) & 3) << 8
        entry = _entry(table, index)
        low = _signed(_iq2_sizes(entry & 255), signs)
        high = _signed(_iq2_sizes(entry >> 8), signs >> 4)
    return low, high
