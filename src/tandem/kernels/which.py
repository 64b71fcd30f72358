"""Which kernel multiplies an expert's rows. Each side chooses here, and `kt bench kernels --explain` says it."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from tandem import _core
from tandem.spec.gpu_scratch import CODES_PAIRS, PLAIN_PAIRS, WGMMA_LEAST_PAIRS, WGMMA_PAIRS

FEW_TOKENS = 16  # up to here every (token, expert) pair streams its weights; from there on tiles share them
MANY_TOKENS, MANY_PAIRS = (
    128,
    24,
)  # where they cannot be: from so many tokens and pairs of an expert they are unpacked


class ExpertPath(Enum):
    """Kernels that take a step's rows through a layer's experts on the GPU."""

    MMA = "mma/expert_mma"
    ROWS = "expert_rows"
    TILES = "expert_tiles"
    CODES = "prompts/code_product"
    PROMPTS = "prompts"


class Reads(NamedTuple):
    """Ways in which kernels can read a layer's experts. mma: codes that become operands of tensor cores; prompts:
    matrices that may be unpacked, outside of graphs; each_row: only kernels that compute a row as if it were alone are
    taken; codes: as mma, for tiles of rows; plain: these codes are bfloat16 itself; wgmma: whole warpgroups multiply
    them."""

    mma: bool
    prompts: bool
    each_row: bool = False
    codes: bool = False
    plain: bool = False
    wgmma: bool = False


def by_warpgroups(pairs: int, experts: int) -> bool:
    """True for so many (token, expert) pairs of a layer that whole warpgroups share its codes, where a kernel can."""
    return pairs > WGMMA_LEAST_PAIRS * experts


def from_codes(pairs: int, experts: int, plain: bool = False, wgmma: bool = False) -> bool:
    """True for so few (token, expert) pairs of a layer that its experts are multiplied without unpacking, where a
    kernel can. plain: they are bfloat16. wgmma: whole warpgroups can."""
    if wgmma and by_warpgroups(pairs, experts):
        return pairs <= WGMMA_PAIRS * experts
    return pairs <= (PLAIN_PAIRS if plain else CODES_PAIRS) * experts


def gpu_way(tokens: int, pairs: int, experts: int, reads: Reads) -> ExpertPath:
    """pairs: (token, expert) pairs of the step; experts: of the layer."""
    if tokens <= FEW_TOKENS or reads.each_row:
        return ExpertPath.MMA if reads.mma else ExpertPath.ROWS
    if reads.codes and from_codes(pairs, experts, reads.plain, reads.wgmma):
        return ExpertPath.CODES
    many = tokens >= MANY_TOKENS and pairs >= MANY_PAIRS * experts
    return ExpertPath.PROMPTS if reads.prompts and many else ExpertPath.TILES


class Kernel(NamedTuple):
    """name: of the kernel or its file; why: in words."""

    name: str
    why: str


def cpu_kernel(workspace: _core.Workspace, fmt: str, rows: int) -> Kernel:
    """CPU kernel for `rows` rows of one expert; the C++ core compares the same number."""
    least = workspace.tile_from_rows(fmt)
    if rows >= least:
        return Kernel("tile_mm", f"from {least} rows of an expert on, a panel is unpacked once for all")
    return Kernel("dot_rows", f"fewer than {least} rows of an expert: weights are read once, into registers")


_WHY = {
    ExpertPath.MMA: f"at most {FEW_TOKENS} tokens: each pair streams its codes through tensor cores",
    ExpertPath.ROWS: f"at most {FEW_TOKENS} tokens: each pair streams its weights",
    ExpertPath.TILES: "tiles of rows share the weights of their expert",
    ExpertPath.CODES: f"at most {CODES_PAIRS} pairs an expert ({PLAIN_PAIRS} of bf16): its rows share its codes"
    f" (Hopper: up to {WGMMA_PAIRS}, more than {WGMMA_LEAST_PAIRS} by wgmma)",
    ExpertPath.PROMPTS: f"{MANY_TOKENS} tokens and {MANY_PAIRS} pairs an expert: weights are unpacked once",
}


def gpu_kernel(tokens: int, top_k: int, experts: int, reads: Reads) -> Kernel:
    """GPU kernel for a layer's experts in a step of `tokens` tokens."""
    way = gpu_way(tokens, tokens * top_k, experts, reads)
    return Kernel(f"kernels/gpu/{way.value}", _WHY[way])
