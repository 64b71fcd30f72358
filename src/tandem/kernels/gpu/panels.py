"""How the packed panels of csrc/abi/weight_view.h are read on the GPU: the same bytes that the CPU kernels read.

A panel holds 16 output rows. It is read in words: bf16, int4 and fp4 as 32 bits, [block][16 rows], int8 and fp8 as 16
bits. A word holds `codes` consecutive k of one row; those of even k are in its low half, those of odd k in its high
half. A plane is the same code of every word: k = codes * block + plane. int6 has two blocks as int4, then a word of
upper bits for both; uint2 has such words alone, and int3 has words of 5 and bytes of 2 codes for both,
whose other bits are the 8th. Codebooks have indices and signs, from which a word's 8 codes are looked up.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.errors import KernelError
from tandem.formats.gpu_reading import CODEBOOKS, EXPERT_CODES, refusal
from tandem.kernels.gpu.codebooks import codebook_bytes, table

KINDS = {name: kind for kind, name in enumerate(EXPERT_CODES)}  # what FMT says
SCALE_TYPES = {
    "f32": torch.float32,
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "e8m0": torch.uint8,
    "e4m3": torch.uint8,
    "bytes8": torch.int8,
    "bytes16": torch.int8,
    "nibbles16": torch.int8,
    "odd8": torch.int8,
    "odd16": torch.int8,
}
# what SCALED says: 0 for no scales
NUMBERS, E8M0, E4M3, BYTES8, BYTES16, NIBBLES16, ODD8, ODD16 = 1, 2, 3, 4, 5, 6, 7, 8
SCALED = {
    "e8m0": E8M0, "e4m3": E4M3, "bytes8": BYTES8, "bytes16": BYTES16, "nibbles16": NIBBLES16, "odd8": ODD8,
    "odd16": ODD16,
}  # fmt: skip
# nl4's values, a byte each, the first lowest.
NL4_0, NL4_1 = tl.constexpr(-1079142271), tl.constexpr(-152379953)
NL4_2, NL4_3 = tl.constexpr(639175937), tl.constexpr(1901675829)
FACTOR_BYTES = 64  # of e4m3's 16 factors, before the groups


@dataclass(frozen=True, slots=True)
class Panels:
    """One matrix [columns, depth] of a packed expert; sizes in bytes. Made from the C++ core's own layout."""

    fmt: str
    columns: int
    depth: int
    padded_depth: int
    panels: int
    panel_bytes: int
    scale_offset: int  # of the scales in a panel; 0: the format has none
    scales: str  # their type, a key of SCALE_TYPES; behind it "+zeros" or "+offsets", where something is added
    group: int  # k per scale; 0: one per row
    shift_offset: int = 0  # of that in a panel: zero points are signed bytes, offsets lie as the scales; 0: nothing

    def __post_init__(self) -> None:
        if why := refusal(self.fmt, self.scales, self.depth):
            raise KernelError(why)
        if (self.shift_offset > 0) != (self.shift != ""):
            raise KernelError(f"panels with scales {self.scales!r} have offsets at {self.shift_offset}")

    @property
    def scale(self) -> str:
        """Type of the scales."""
        return self.scales.partition("+")[0]

    @property
    def shift(self) -> str:
        """Kind of numbers that are added after scaling: "zeros", "offsets" or ""."""
        return self.scales.partition("+")[2]

    @property
    def bytes(self) -> int:
        return self.panels * self.panel_bytes

    @property
    def codes(self) -> int:
        """Codes of one word."""
        eight = ("int4", "fp4", "uint4", "int6", "uint2", "int3", "nl4", *CODEBOOKS)
        return 8 if self.fmt in eight else 2

    @property
    def word_bytes(self) -> int:
        return 2 if self.fmt in ("int8", "fp8") else 4

    @property
    def blocks(self) -> int:
        """Words along k."""
        return self.padded_depth // self.codes

    @property
    def word_type(self) -> torch.dtype:
        return torch.int16 if self.word_bytes == 2 else torch.int32

    @property
    def scale_type(self) -> torch.dtype:
        return SCALE_TYPES[self.scale]

    @property
    def scale_bytes(self) -> int:
        return self.scale_type.itemsize

    def expert_constants(self) -> dict[str, int]:
        """Constants of a kernel of experts over such panels. ZERO_AT: bytes from a panel's first word to its zero
        points; SHIFT_AT: from its scales to its offsets, in numbers of scales; 0: it has none."""
        zeros = self.shift_offset if self.shift == "zeros" else 0
        offsets = self.shift_offset - self.scale_offset if self.shift == "offsets" else 0
        shifts = {"ZERO_AT": zeros, "SHIFT_AT": offsets // self.scale_bytes, "WORD": self.word_bytes}
        return self._constants() | shifts

    def constants(self) -> dict[str, int]:
        """Constants of any other kernel over such panels. Raises KernelError where it cannot read them."""
        if why := refusal(self.fmt, self.scales, experts=False):
            raise KernelError(why)
        return self._constants()

    def _constants(self) -> dict[str, int]:
        scaled = SCALED.get(self.scale, NUMBERS) if self.scale_offset else 0
        scale_at = self.scale_offset + (FACTOR_BYTES if scaled == E4M3 else 0)
        return {
            "FMT": KINDS[self.fmt], "CODES": self.codes, "GROUP": self.group // self.codes,
            "SCALED": scaled, "PANEL": self.panel_bytes // self.word_bytes,
            "SCALE_PANEL": self.panel_bytes // self.scale_bytes, "SCALE_AT": scale_at // self.scale_bytes,
        }  # fmt: skip


def views(pool: Tensor, offset: int, panels: Panels) -> tuple[Tensor, Tensor]:
    """The words and the scales of a uint8 pool from byte `offset` on."""
    return pool[offset:].view(panels.word_type), pool[offset:].view(panels.scale_type)


def expert_views(pool: Tensor, offset: int, panels: Panels) -> tuple[Tensor, Tensor, Tensor]:
    """And signed bytes, for kernels that know zero points; or the table of a codebook, which has none."""
    if panels.fmt in CODEBOOKS:
        return *views(pool, offset, panels), table(panels.fmt, pool.device)
    return *views(pool, offset, panels), pool[offset:].view(torch.int8)


@triton.jit
def halves(word):
    """A word of two bfloat16 as float32: even k, odd k."""
    return (word << 16).to(tl.float32, bitcast=True), (word & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _half_of(bits):
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def scale_value(raw, SCALED: tl.constexpr):
    """Scales as loaded, as float32; e4m3 without its row's factor."""
    if SCALED == 2:  # e8m0: 0 is a subnormal, 255 NaN
        byte = raw.to(tl.int32)
        ends = tl.where((byte == 0) | (byte == 255), 0x400000, 0)
        value = (byte << 23 | ends).to(tl.float32, bitcast=True)
    elif SCALED == 3:
        byte = raw.to(tl.int32)
        value = _half_of((byte & 0x80) << 8 | (byte & 0x7F) << 7) * 256.0
    else:
        value = raw.to(tl.float32)
    return value


@triton.jit
def group_values(scales, group, lane, inside, SCALED: tl.constexpr):
    """Scales, or offsets that lie as they do, of the rows `lane` of a panel, as float32; e4m3 without its row's factor.
    `scales` points at the panel's table."""
    if SCALED >= 7:  # a half of 256 k in front of bytes of two groups: n stands for (2 n + 1) / 8
        odd: tl.constexpr = 8 if SCALED == 7 else 16
        of_half = scales + group // odd * (16 * (2 + odd // 2))
        byte, half = _nibble_table(of_half, 32 + 16 * (group % odd // 2) + lane, lane, inside)
        value = ((byte >> (group % 2 * 4) & 15).to(tl.float32) * 0.25 + 0.125) * half
    elif SCALED >= 6:  # two halves of 256 k in front of bytes, whose low halves are scales
        byte, half = _nibble_table(scales + group // 16 * 320, 64 + 16 * (group % 16) + lane, lane, inside)
        value = (byte & 15).to(tl.float32) * half
    elif SCALED >= 4:  # 256 k share 16 halves, which are in front of their bytes
        shared: tl.constexpr = 8 if SCALED == 4 else 16
        table = scales + group // shared * (16 * (2 + shared))
        low = tl.load(table + 2 * lane, inside, other=0).to(tl.int32) & 255
        high = tl.load(table + (2 * lane + 1), inside, other=0).to(tl.int32)
        byte = tl.load(table + (16 * (2 + group % shared) + lane), inside, other=0)
        value = byte.to(tl.float32) * _half_of(high << 8 | low)
    else:
        value = scale_value(tl.load(scales + (group * 16 + lane), inside, other=0), SCALED)
    return value


@triton.jit
def _nibble_table(table, at, lane, inside):
    low = tl.load(table + 2 * lane, inside, other=0).to(tl.int32) & 255
    high = tl.load(table + (2 * lane + 1), inside, other=0).to(tl.int32)
    return tl.load(table + at, inside, other=0).to(tl.int32), _half_of(high << 8 | low)


@triton.jit
def group_offsets(offsets, group, lane, inside, SCALED: tl.constexpr):
    """`group_values` of offsets."""
    if SCALED >= 6:  # `offsets` points at the second halves, 32 bytes into the table
        byte, half = _nibble_table(offsets + group // 16 * 320, 32 + 16 * (group % 16) + lane, lane, inside)
        value = (byte >> 4 & 15).to(tl.float32) * half
    else:
        value = group_values(offsets, group, lane, inside, SCALED)
    return value


@triton.jit
def row_factor(scales, lane):
    """e4m3: the float32 factors of the rows `lane` of a panel; `scales` points at its first group."""
    bits = tl.zeros(lane.shape, tl.int32)
    for i in tl.static_range(4):
        bits |= tl.load(scales + (4 * lane + i - 64)).to(tl.int32) << 8 * i
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def block_words(words, at, lane, inside, FMT: tl.constexpr, table=None):
    """The words of blocks `at` of the rows `lane` of the panel at `words`; and what has their codes' upper bits.
    table: of a codebook."""
    if FMT >= 10:
        word, upper = codebook_bytes(words, at, lane, inside, table, FMT)
    elif FMT == 6:
        own = words + (at // 2 * 48 + lane)
        word = tl.load(own + at % 2 * 16, inside, other=0)
        upper = tl.load(own + 32, inside, other=0) >> (at % 2 * 4)
    elif FMT == 7:
        word = tl.load(words + (at // 2 * 16 + lane), inside, other=0) >> (at % 2 * 4)
        upper = word
    elif FMT == 8:
        own = words + at // 2 * 24
        upper = tl.load(own + lane, inside, other=0)
        byte = tl.load(own + (16 + lane // 2), inside, other=0) >> (lane % 2 * 16)
        byte = (byte & 255) | (byte & 0xFF00) << 8
        last = (upper >> 15 & 0x10001) | (byte >> 5 & 0x60006)
        word = tl.where(at % 2 == 0, upper, (upper >> 12 & 0x70007) | (byte & 0x3F003F) << 3 | last << 9)
    else:
        word = tl.load(words + (at * 16 + lane), inside, other=0)
        upper = word
    return word, upper


@triton.jit
def plane(word, upper, j: tl.constexpr, FMT: tl.constexpr):
    """Plane j of a tile of `block_words`: each code's own number, float32, without its scale."""
    shift: tl.constexpr = 4 * (j // 2) + 16 * (j % 2)
    pair: tl.constexpr = 16 * (j % 2) + 8 * (j // 4) + j // 2 % 2 * 2  # of upper bits: those of 4 k lie together
    if FMT >= 10:  # codebooks: bytes, plus 128 each
        four = word if j < 4 else upper
        value = ((four >> 8 * (j % 4) & 255) | 0x4B000000).to(tl.float32, bitcast=True) - 8388736.0
    elif FMT == 0:  # bf16
        value = ((word << 16) if j == 0 else (word & -65536)).to(tl.float32, bitcast=True)
    elif FMT == 1:  # int8
        value = ((word.to(tl.int32) << (24 - 8 * j)) >> 24).to(tl.float32)
    elif FMT == 2:  # int4: 2^23 + code + 8 in the mantissa; exact, and cheaper than a conversion
        value = (((word ^ -2004318072) >> shift & 15) | 0x4B000000).to(tl.float32, bitcast=True) - 8388616.0
    elif FMT == 3:  # fp8: the bits of a half 2^8 times smaller
        byte = word.to(tl.int32) >> 8 * j
        value = _half_of((byte & 0x80) << 8 | (byte & 0x7F) << 7) * 256.0
    elif FMT == 4:  # fp4, likewise 2^14
        nibble = word >> shift
        value = _half_of((nibble & 8) << 12 | (nibble & 7) << 9) * 16384.0
    elif FMT == 5:  # uint4, as int4
        value = ((word >> shift & 15) | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0
    elif FMT == 6:  # int6, likewise
        code = (word >> shift & 15) | (upper >> pair & 3) << 4
        value = ((code ^ 32) | 0x4B000000).to(tl.float32, bitcast=True) - 8388640.0
    elif FMT == 7:  # uint2
        value = ((word >> pair & 3) | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0
    elif FMT == 9:  # nl4: bytes of a table in four words
        code = word >> shift & 15
        low = tl.where((code & 4) != 0, NL4_1, NL4_0)
        high = tl.where((code & 4) != 0, NL4_3, NL4_2)
        four = tl.where((code & 8) != 0, high, low)
        value = ((four >> (code & 3) * 8) << 24 >> 24).to(tl.float32)
    else:  # int3
        code = word >> (3 * (j // 2) + 16 * (j % 2)) & 7
        value = ((code ^ 4) | 0x4B000000).to(tl.float32, bitcast=True) - 8388612.0
    return value
