"""GGUF's codebook blocks → `WeightCodes`, nothing rounded: 4 bytes for 8 weights, scales as nibbles.

The bytes are two indices into a grid (IQ3: of 4 values each), what is above them, and 8 signs. Layouts are
ggml-common.h's. Values of grids are such that every scale is (2 n + 1) * d / 8 (csrc/abi/grids.h).
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from gguf import quants
from torch import Tensor

from tandem.formats.codes import WeightCodes
from tandem.formats.gguf_raw import gguf_rows, half_at

BYTES = 4  # of 8 weights
EIGHT = 8
IQ1_ENTRIES = 2048
_THREES, _SEVENS, _PAIRS, _NIBBLES = (0, 3, 6, 9), (0, 7, 14, 21), (0, 2, 4, 6), (0, 4)
_GRIDS = {  # and what their values are multiplied by here
    "iq2_xxs": (quants.IQ2_XXS, 1), "iq2_xs": (quants.IQ2_XS, 1), "iq2_s": (quants.IQ2_S, 1),
    "iq3_xxs": (quants.IQ3_XXS, 2), "iq3_s": (quants.IQ3_S, 8), "iq1": (quants.IQ1_S, 8),
}  # fmt: skip
FORMATS = tuple(_GRIDS)


def _words(data: Tensor, dtype: torch.dtype) -> Tensor:
    """Little-endian numbers [..], as int32."""
    words = data.clone(memory_format=torch.contiguous_format).view(dtype).int()  # a lone block may lie at any byte
    return words & 0xFFFF if dtype is torch.int16 else words


def _fields(words: Tensor, shifts: tuple[int, ...], mask: int) -> Tensor:
    """[N, blocks, n] → [N, blocks, n * fields]: those of a word after each other."""
    return torch.stack([words >> shift & mask for shift in shifts], -1).flatten(2)


def _with_parity(seven: Tensor) -> Tensor:
    """The eighth sign makes the number of negative ones even."""
    ones = sum(seven >> bit & 1 for bit in range(7))
    return seven | (ones & 1) << 7


def _codes(
    fmt: str, indices: Tensor, upper: Tensor, signs: Tensor | None, scales: Tensor, halves: Tensor
) -> WeightCodes:
    """indices [N, blocks, 32], or pairs of them [.., 32, 2]; upper and signs [N, blocks, 32]; scales [N, blocks,
    groups]."""
    pair = indices if indices.dim() == 4 else torch.stack((indices & 255, torch.zeros_like(indices)), -1)
    rest = torch.stack((upper, torch.zeros_like(upper) if signs is None else signs), -1)
    codes = torch.cat((pair & 255, rest), -1).to(torch.uint8).flatten(1).contiguous()
    groups = scales.to(torch.uint8).flatten(1).contiguous()
    depth = codes.shape[1] // BYTES * EIGHT
    return WeightCodes(codes, groups, fmt, depth // groups.shape[1], depth, halves=halves)


def gguf_iq2_xxs(data: Tensor) -> WeightCodes:
    """IQ2_XXS [N, K / 256 * 66]: a half; for 32 k 4 indices, then 4 times 7 signs and a scale of 4 bits."""
    blocks = gguf_rows(data, 66)
    words = blocks[..., 2:].unflatten(-1, (8, 8))
    indices, rest = words[..., :4].flatten(2).int(), _words(words[..., 4:], torch.int32)[..., 0]
    signs = _with_parity(_fields(rest, _SEVENS, 127))
    return _codes("iq2_xxs", indices, indices * 0, signs, rest >> 28 & 15, half_at(blocks, 0))


def gguf_iq2_xs(data: Tensor) -> WeightCodes:
    """IQ2_XS [N, K / 256 * 74]: a half, 32 words of an index of 9 bits and 7 signs, 16 scales of 4 bits."""
    blocks = gguf_rows(data, 74)
    words = _words(blocks[..., 2:66], torch.int16)
    scales = _fields(blocks[..., 66:], _NIBBLES, 15)
    return _codes("iq2_xs", words, words >> 8 & 1, _with_parity(words >> 9), scales, half_at(blocks, 0))


def gguf_iq2_s(data: Tensor) -> WeightCodes:
    """IQ2_S [N, K / 256 * 82]: a half, 32 lower bytes of indices, 32 of signs, upper pairs of bits, 16 scales."""
    blocks = gguf_rows(data, 82)
    indices, signs, upper = blocks[..., 2:34].int(), blocks[..., 34:66].int(), blocks[..., 66:74].int()
    scales = _fields(blocks[..., 74:], _NIBBLES, 15)
    return _codes("iq2_s", indices, _fields(upper, _PAIRS, 3), signs, scales, half_at(blocks, 0))


def gguf_iq3_xxs(data: Tensor) -> WeightCodes:
    """IQ3_XXS [N, K / 256 * 98]: a half, 64 indices; for 32 k 4 times 7 signs and a scale of 4 bits."""
    blocks = gguf_rows(data, 98)
    indices, rest = blocks[..., 2:66].int().unflatten(-1, (32, 2)), _words(blocks[..., 66:], torch.int32)
    signs = _with_parity(_fields(rest, _SEVENS, 127))
    return _codes("iq3_xxs", indices, signs * 0, signs, rest >> 28 & 15, half_at(blocks, 0))


def gguf_iq3_s(data: Tensor) -> WeightCodes:
    """IQ3_S [N, K / 256 * 110]: a half, 64 lower bytes of indices, 64 upper bits, 32 bytes of signs, 8 scales."""
    blocks = gguf_rows(data, 110)
    indices, signs = blocks[..., 2:66].int().unflatten(-1, (32, 2)), blocks[..., 74:106].int()
    upper, scales = _fields(blocks[..., 66:74].int(), _PAIRS, 3), _fields(blocks[..., 106:], _NIBBLES, 15)
    return _codes("iq3_s", indices, upper, signs, scales, half_at(blocks, 0))


def gguf_iq1_s(data: Tensor) -> WeightCodes:
    """IQ1_S [N, K / 256 * 50]: a half, 32 lower bytes of indices; for 32 k 4 upper 3 bits, a scale, a shift's sign."""
    blocks = gguf_rows(data, 50)
    indices, words = blocks[..., 2:34].int(), _words(blocks[..., 34:], torch.int16)
    below = (words >> 15 & 1).repeat_interleave(4, -1) << 3
    upper = _fields(words, _THREES, 7) | below
    return _codes("iq1", indices, upper, None, words >> 12 & 7, half_at(blocks, 0))


def gguf_iq1_m(data: Tensor) -> WeightCodes:
    """IQ1_M [N, K / 256 * 56]: 32 lower bytes of indices; 32 nibbles of 3 upper bits and a shift's sign; 4 words of 4
    scales of 3 bits and a quarter of a half."""
    blocks = gguf_rows(data, 56)
    indices, upper = blocks[..., :32].int(), _fields(blocks[..., 32:48].int(), _NIBBLES, 15)
    words = _words(blocks[..., 48:], torch.int16)
    quarters = torch.stack([(words[..., i] >> 12) << 4 * i for i in range(4)])
    halves = quarters.sum(0).to(torch.int16).view(torch.float16)
    return _codes("iq1", indices, upper, None, _fields(words, _THREES, 7), halves)


GRID_CODES: dict[str, Callable[[Tensor], WeightCodes]] = {
    "IQ1_M": gguf_iq1_m,
    "IQ1_S": gguf_iq1_s,
    "IQ2_S": gguf_iq2_s,
    "IQ2_XS": gguf_iq2_xs,
    "IQ2_XXS": gguf_iq2_xxs,
    "IQ3_S": gguf_iq3_s,
    "IQ3_XXS": gguf_iq3_xxs,
}


@functools.cache
def _grid(fmt: str) -> Tensor:
    """float32 [entries, 8 or 4]."""
    quant, times = _GRIDS[fmt]
    quant.init_grid()  # type: ignore[no-untyped-call]
    assert quant.grid is not None
    values = torch.from_numpy(quant.grid[0, 0].copy()).float() * times
    return torch.cat((values + 1, values - 1)) if fmt == "iq1" else values


def grid_entries(fmt: str) -> Tensor:
    """int16 [entries]: of each entry the places of its values among the grid's own, k after k, in 2 bits each (IQ3: 3).
    An IQ1 entry is the same with values above and below its codes."""
    grid = _grid(fmt)[: IQ1_ENTRIES if fmt == "iq1" else None]
    places = torch.searchsorted(grid.unique(), grid)
    bits = 2 if grid.shape[1] == EIGHT else 3
    return (places << torch.arange(grid.shape[1]) * bits).sum(1).to(torch.int16)


def grid_values(codes: WeightCodes) -> Tensor:
    """float32 [N, K]: every code's own number, without its scale."""
    first, second, upper, signs = codes.codes.view(codes.rows, -1, BYTES).long().unbind(-1)
    grid = _grid(codes.fmt)
    if grid.shape[1] == EIGHT:
        values = grid[first | upper << 8]
    else:
        values = torch.cat((grid[first | (upper & 1) << 8], grid[second | (upper & 2) << 7]), -1)
    negative = torch.stack([signs >> bit & 1 for bit in range(EIGHT)], -1)
    return torch.where(negative == 1, -values, values).flatten(1)
