"""Absorbed queries against latent pages: a row's keys are divided among PARTS programs; a second kernel merges them.

All heads of a row share its keys: they are the rows of a product on tensor cores, and a block of latents is key and
value in one. As in `attention_decode.py`, program p takes blocks p, p + parts, … of a fixed number of keys. Where the
parts are as many for any number of rows, the result is the same in every batch.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.kernels.gpu.attention_decode import LOG2_E
from tandem.kernels.gpu.dependent_launch import begin, overlapped
from tandem.kernels.gpu.shared_memory import has_tensor_memory, shared_bytes
from tandem.mechanisms.latent.absorbed import LatentSizes
from tandem.mechanisms.latent.cost import PARTIAL_BYTES
from tandem.mechanisms.latent.gpu.per_head import precision

PARTS = 64  # of a row's keys, for all tiles of heads together: one row fills half of a large GPU
LEAST_PARTS = 8  # one long row beside short ones is not to be alone on few processors
MERGED = 8  # parts at a time
HOPPER_RANK, HOPPER_ROPE = 512, 64  # what `decode_hopper.py` is written for, in tiles of 64 heads and 64 keys
VARYING = ["table_width", "table_row"]
UNALIGNED = ["tables", "lens"]  # may begin anywhere: Triton would compile anew for multiples of 16 bytes

_log = logging.getLogger(__name__)


class DecodeTile(NamedTuple):
    """heads: rows of a product; keys: of a block; stages: blocks in shared memory."""

    heads: int
    keys: int
    warps: int
    stages: int

    def shared_bytes(self, width: int) -> int:
        """Blocks of keys, queries where wgmma reads them there, and what reductions take."""
        queries = self.heads if self.heads >= 64 else self.heads // 4
        return 2 * width * (self.stages * self.keys + queries) + (4 << 10)


# The first that fits. Tiles of 64 heads are wgmma's; their sums are half of the registers.
MANY_HEADS = (DecodeTile(64, 64, 8, 2), DecodeTile(32, 32, 8, 2), DecodeTile(32, 16, 8, 2))
SOME_HEADS = (DecodeTile(32, 32, 8, 2), DecodeTile(32, 16, 8, 2))
FEW_HEADS = (DecodeTile(16, 64, 4, 2), DecodeTile(16, 32, 4, 2), DecodeTile(16, 16, 4, 2))


class LatentPages(NamedTuple):
    """Whose latents each row reads. tables int32 [rows, P], or [1, P] for all of them; lens int32 [rows]: keys that a
    row sees. Keys that rows have chosen are pages of one token."""

    latents: Tensor  # [num_pages, page_size, 1, width]
    tables: Tensor
    lens: Tensor

    @property
    def chosen(self) -> bool:
        """A kernel of the same step may have written tables and lengths."""
        return self.latents.shape[1] == 1


@triton.jit
def _attend(turned, straight, r, c, inside, m, sums, acc, scale, ROPE: tl.constexpr, PRECISION: tl.constexpr):
    """Adds a block of keys, r [N, rope] and c [N, rank]; inside [N]. Without ROPE nothing turns."""
    if ROPE:
        scores = tl.dot(turned, tl.trans(r), input_precision=PRECISION)
        scores = tl.dot(straight, tl.trans(c), scores, input_precision=PRECISION)
    else:
        scores = tl.dot(straight, tl.trans(c), input_precision=PRECISION)
    scores = tl.where(inside[None, :], scores, float("-inf"))
    top = tl.maximum(m, tl.max(scores, 1) * scale)  # finite: a block has at least one key
    p = tl.exp2(scores * scale - top[:, None])
    shrink = tl.exp2(m - top)
    acc = tl.dot(p.to(c.dtype), c, acc * shrink[:, None], input_precision=PRECISION)
    return top, sums * shrink + tl.sum(p, 1), acc


@triton.jit(do_not_specialize=VARYING, do_not_specialize_on_alignment=UNALIGNED)
def _decode(x, latents, tables, lens, partial, stats, scale, table_width, table_row,
            HEADS: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr, PAGE: tl.constexpr, PARTS: tl.constexpr,
            ROWS: tl.constexpr, BLOCK: tl.constexpr, TURNED: tl.constexpr, KEYS: tl.constexpr,
            PRECISION: tl.constexpr, CHOSEN: tl.constexpr, OVERLAP: tl.constexpr):  # fmt: skip
    tile, part, t = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    HOP: tl.constexpr = KEYS * PARTS
    WIDTH: tl.constexpr = ROPE + RANK
    table, room = tables + t * table_row, table_width * PAGE
    ahead = part * KEYS + tl.arange(0, KEYS)
    begin(OVERLAP and CHOSEN)
    page = tl.load(table + ahead // PAGE, ahead < room, other=0)
    n = tl.load(lens + t)
    begin(OVERLAP and not CHOSEN)  # pages and lengths are there before a step starts
    if part * KEYS >= n:
        return
    h, d, e = tile * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK), tl.arange(0, TURNED)
    row, real = x + (t * HEADS + h)[:, None] * WIDTH, (h < HEADS)[:, None]
    turned = tl.load(row + e[None, :], real & (e < ROPE)[None, :], other=0.0)
    straight = tl.load(row + ROPE + d[None, :], real & (d < RANK)[None, :], other=0.0)
    m = tl.full([ROWS], float("-inf"), tl.float32)
    sums = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(part * KEYS, n, HOP):
        keys = start + tl.arange(0, KEYS)
        rows = ((page.to(tl.int64) * PAGE + keys % PAGE) * WIDTH)[:, None]
        ahead = keys + HOP
        page = tl.load(
            table + ahead // PAGE, ahead < room, other=0
        )  # a turn early: no load waits for another
        inside = keys < n
        r = tl.load(latents + rows + e[None, :], inside[:, None] & (e < ROPE)[None, :], other=0.0)
        c = tl.load(latents + rows + ROPE + d[None, :], inside[:, None] & (d < RANK)[None, :], other=0.0)
        m, sums, acc = _attend(turned, straight, r, c, inside, m, sums, acc, scale, ROPE, PRECISION)
    out = (t * HEADS + h) * PARTS + part
    tl.store(partial + out[:, None] * RANK + d[None, :], acc, real & (d < RANK)[None, :])
    tl.store(stats + out * 2, m, h < HEADS)
    tl.store(stats + out * 2 + 1, sums, h < HEADS)


@triton.jit(do_not_specialize=["parts"], do_not_specialize_on_alignment=UNALIGNED[1:])
def _merge(partial, stats, lens, out, parts, HEADS: tl.constexpr, RANK: tl.constexpr, MOST: tl.constexpr,
           KEYS: tl.constexpr, BLOCK: tl.constexpr, MERGED: tl.constexpr, CHOSEN: tl.constexpr,
           OVERLAP: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    part, d = tl.arange(0, MOST), tl.arange(0, BLOCK)
    begin(OVERLAP and CHOSEN)
    used = tl.minimum(tl.cdiv(tl.load(lens + row // HEADS), KEYS), parts)  # the others have written nothing
    begin(OVERLAP and not CHOSEN)
    at = row * parts + part
    m = tl.load(stats + at * 2, part < used, other=float("-inf"))
    most = tl.max(m)
    total = tl.sum(tl.load(stats + at * 2 + 1, part < used, other=0.0) * tl.exp2(m - most))
    y = tl.zeros([BLOCK], tl.float32)
    for first in range(0, used, MERGED):
        some = first + tl.arange(0, MERGED)
        mask, source = some < used, row * parts + some
        acc = tl.load(
            partial + source[:, None] * RANK + d[None, :], mask[:, None] & (d < RANK)[None, :], other=0.0
        )
        shrink = tl.exp2(tl.load(stats + source * 2, mask, other=float("-inf")) - most)
        y += tl.sum(acc * shrink[:, None], 0)
    tl.store(out + row * RANK + d, (y / total).to(out.dtype.element_ty), d < RANK)


def tile_of(device: torch.device, sizes: LatentSizes) -> DecodeTile:
    """The fastest tile for so many heads that fits the GPU; the last one if none does."""
    width = block_of(sizes.rank) + block_of(sizes.rope)
    tiles: tuple[DecodeTile, ...] = (
        MANY_HEADS if sizes.heads > 32 else SOME_HEADS if sizes.heads > 16 else FEW_HEADS
    )
    if has_tensor_memory(device):  # tiles of 64 heads would not fit there
        tiles = tuple(tile for tile in tiles if tile.heads < 64)
    return next((tile for tile in tiles if tile.shared_bytes(width) <= shared_bytes(device)), tiles[-1])


def block_of(width: int) -> int:
    return max(16, 1 << (width - 1).bit_length())


def parts_of(sizes: LatentSizes, tile: DecodeTile) -> int:
    """For any number of rows: one row fills half of a large GPU, tiles of few heads all of it."""
    tiles = -(-sizes.heads // tile.heads)
    return max(16, PARTS >> (tiles - 1).bit_length())


def parts_of_rows(device: torch.device, sizes: LatentSizes, rows: int) -> int:
    """Parts of the keys for so many rows together. A program of 64 heads fills a processor, and its sums are written
    and read once more. So with many rows, fewer parts keep all processors busy."""
    tile = tile_of(device, sizes)
    if tile.heads < 64:
        return parts_of(sizes, tile)
    programs = rows * -(-sizes.heads // tile.heads)
    each = max(1, _processors(device) // programs)
    return min(PARTS, max(LEAST_PARTS, 1 << (each.bit_length() - 1)))


@cache
def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 132  # a large GPU's, for kernels that are only compiled
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def decode(x: Tensor, pages: LatentPages, sizes: LatentSizes, scale: float, parts: int = 0) -> Tensor:
    """x [T, H, width], absorbed and turned -> what each head sees, [T, H, rank]. scale > 0. parts: of a row's keys, 0:
    as many as suit so many rows."""
    tile = tile_of(x.device, sizes)
    parts, out = (
        parts or parts_of_rows(x.device, sizes, len(x)),
        x.new_empty((len(x), sizes.heads, sizes.rank)),
    )
    each = max(1, PARTIAL_BYTES // (sizes.heads * parts * (sizes.rank + 2) * 4))
    for first in range(0, len(x), each):
        some = slice(first, first + each)
        tables = pages.tables if len(pages.tables) == 1 else pages.tables[some]
        _some_rows(
            x[some], LatentPages(pages.latents, tables, pages.lens[some]), sizes, scale, (tile, parts), out[some]
        )
    return out


def _some_rows(
    x: Tensor, pages: LatentPages, sizes: LatentSizes, scale: float, shape: tuple[DecodeTile, int], out: Tensor
) -> None:
    tile, parts = shape
    heads, rank, rows = sizes.heads, sizes.rank, len(x)
    partial = x.new_empty((rows, heads, parts, rank), dtype=torch.float32)
    stats = x.new_empty((rows, heads, parts, 2), dtype=torch.float32)
    shared = {"HEADS": heads, "RANK": rank, "KEYS": tile.keys, "CHOSEN": pages.chosen}
    shared |= overlapped(x.device)
    width = pages.tables.shape[1]
    common = (
        x, pages.latents, pages.tables, pages.lens, partial, stats, scale * LOG2_E, width,
        0 if len(pages.tables) == 1 else width,
    )  # fmt: skip
    grid, page = (triton.cdiv(heads, tile.heads), parts, rows), pages.latents.shape[1]
    if tile == MANY_HEADS[0] and x.dtype is torch.bfloat16 and (kernel := hopper_kernel(x.device, sizes)):
        kernel[grid](
            *common, parts, HEADS=heads, PAGE=page, CHOSEN=pages.chosen, num_warps=8, **overlapped(x.device)
        )
    else:
        _decode[grid](
            *common, ROPE=sizes.rope, PAGE=page, ROWS=tile.heads, BLOCK=block_of(rank), TURNED=block_of(sizes.rope),
            PRECISION=precision(x), PARTS=parts, **shared, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
    _merge[(rows * heads,)](
        partial,
        stats,
        pages.lens,
        out,
        parts,
        BLOCK=block_of(rank),
        MOST=PARTS,
        MERGED=MERGED,
        **shared,
        num_warps=4,
    )


def hopper_kernel(device: torch.device, sizes: LatentSizes) -> Any:
    """The kernel in Gluon where it can run; None elsewhere."""
    return None if (sizes.rank, sizes.rope) != (HOPPER_RANK, HOPPER_ROPE) else _hopper_kernel(device)


@cache
def _hopper_kernel(device: torch.device) -> Any:
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return None
    try:
        from tandem.mechanisms.latent.gpu.decode_hopper import decode_hopper

        _try(decode_hopper, device)
    except Exception as error:  # Gluon is new: its names change from one Triton to the next
        _log.warning("latent attention: Triton's kernel instead of Gluon's, which fails here: %s", error)
        return None
    return decode_hopper


def _try(kernel: Any, device: torch.device) -> None:
    """One row of zeros, with one key of ones: its values are the key's."""
    x = torch.zeros(1, 64, 576, dtype=torch.bfloat16, device=device)
    latents, table = torch.ones_like(x[:, :16, None]), torch.zeros(1, 1, dtype=torch.int32, device=device)
    partial, stats = torch.zeros(64, 16, 512, device=device), torch.zeros(64, 16, 2, device=device)
    kernel[(1, 16, 1)](
        x, latents, table, torch.ones_like(table[0]), partial, stats, 1.0, 1, 1, 16, HEADS=64, PAGE=16,
        CHOSEN=False, num_warps=8, **overlapped(device),
    )  # fmt: skip
    if not (bool((partial[:, 0] == 1).all()) and bool((stats[:, 0, 1] == 1).all())):
        raise RuntimeError("a wrong result")
