"""What memories of constant size, and convolutions over few tokens, take beside their projections.

Between those a GPU has few small kernels, which were counted in a step of each kind. On a CPU the core computes all.
"""

from __future__ import annotations

from typing import NamedTuple

from tandem.mechanisms.channel_delta.shape import CORRECT_CHUNK, ChannelDelta
from tandem.mechanisms.short_conv.shape import ShortConv
from tandem.mechanisms.state_space.shape import SCAN_CHUNK, StateSpace

# Of a prompt's chunk that waits for the one before, on an H100: Kimi-Linear's, beside what passes between kernels; of
# state spaces between Nemotron-3-Nano's, 17 us, and Granite-4.0-H-Small's, 30 us.
CORRECT_SECONDS, SCAN_SECONDS = 2.1e-5, 2.2e-5


class Small(NamedTuple):
    """kernels: of a GPU's decode step, beyond those of attention; launches: beyond those of attention outside of
    graphs, in PyTorch's time."""

    kernels: int = 0
    launches: int = 0


SMALL = {StateSpace: Small(4, 16), ChannelDelta: Small(10, 13), ShortConv: Small()}


def small(mixer: object) -> Small:
    return SMALL.get(type(mixer), Small())


def memory_flops(mixer: object, rows: int, chunked: bool) -> float:
    """What is corrected, taken in and asked, and convolutions. chunked: rows of a chunk see each other in products, as
    on a GPU."""
    if isinstance(mixer, ShortConv):
        return 2.0 * rows * mixer.channels * (mixer.taps + 1)
    if isinstance(mixer, ChannelDelta):
        beside = min(rows, CORRECT_CHUNK) * 4 * mixer.inner if chunked else 0
        return 2.0 * rows * (3 * mixer.inner * (mixer.dim + mixer.taps) + beside)
    if isinstance(mixer, StateSpace):
        beside = min(rows, SCAN_CHUNK) * (mixer.groups * mixer.state + mixer.inner) if chunked else 0
        return 2.0 * rows * (2 * mixer.inner * mixer.state + mixer.channels * mixer.taps + beside)
    return 0.0


def prompt_seconds(mixer: object, rows: int, gpu_gbps: float) -> float:
    """Of a prompt's rows on a GPU, whatever its peak: what kernels leave each other is written and read, and the memory
    goes from chunk to chunk."""
    if not isinstance(mixer, StateSpace | ChannelDelta | ShortConv):
        return 0.0
    between = 2.0 * rows * mixer.chunk_row_bytes / gpu_gbps / 1e9
    if isinstance(mixer, ChannelDelta):
        return between + -(-rows // CORRECT_CHUNK) * CORRECT_SECONDS
    return between + (-(-rows // SCAN_CHUNK) * SCAN_SECONDS if isinstance(mixer, StateSpace) else 0.0)
