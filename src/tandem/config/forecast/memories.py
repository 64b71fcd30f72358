"""What memories of constant size, and convolutions over few tokens, take beside their projections.

Their operations between the projections are mostly PyTorch's: small kernels on a GPU, and calls on a CPU. They were
counted in a step of each kind.
"""

from __future__ import annotations

from typing import NamedTuple

from tandem.config.mechanisms.channel_delta import ChannelDelta
from tandem.config.mechanisms.short_conv import ShortConv
from tandem.config.mechanisms.state_space import SCAN_CHUNK, StateSpace

OPERATION_SECONDS = 5e-6  # one of PyTorch's on a CPU, of one row
# Of a prompt's row or chunk that waits for the one before, on an H100: Kimi-Linear's rows; of state spaces between
# Nemotron-3-Nano's chunks, 17 us, and Granite-4.0-H-Small's, 30 us.
ROW_SECONDS, SCAN_SECONDS = 1.2e-6, 2.2e-5


class Small(NamedTuple):
    """kernels: of a GPU's decode step, beyond those of attention; launches: beyond those of attention outside of
    graphs, in PyTorch's time; operations: PyTorch's in a CPU's step."""

    kernels: int = 0
    launches: int = 0
    operations: int = 0


SMALL = {StateSpace: Small(22, 34, 20), ChannelDelta: Small(38, 37, 32), ShortConv: Small()}


def small(mixer: object) -> Small:
    return SMALL.get(type(mixer), Small())


def memory_flops(mixer: object, rows: int, chunked: bool) -> float:
    """What is corrected, taken in and asked, and convolutions. chunked: rows of a chunk see each other in products, as
    on a GPU."""
    if isinstance(mixer, ShortConv):
        return 2.0 * rows * mixer.channels * (mixer.taps + 1)
    if isinstance(mixer, ChannelDelta):
        return 6.0 * rows * mixer.inner * (mixer.dim + mixer.taps)
    if isinstance(mixer, StateSpace):
        beside = min(rows, SCAN_CHUNK) * (mixer.groups * mixer.state + mixer.inner) if chunked else 0
        return 2.0 * rows * (2 * mixer.inner * mixer.state + mixer.channels * mixer.taps + beside)
    return 0.0


def prompt_seconds(mixer: object, rows: int, gpu_gbps: float) -> float:
    """Of a prompt's rows on a GPU, whatever its peak: what kernels leave each other is written and read, and the memory
    goes from row to row or from chunk to chunk."""
    if not isinstance(mixer, StateSpace | ChannelDelta | ShortConv):
        return 0.0
    between = 2.0 * rows * mixer.chunk_row_bytes / gpu_gbps / 1e9
    if isinstance(mixer, ChannelDelta):
        return between + rows * ROW_SECONDS
    return between + (-(-rows // SCAN_CHUNK) * SCAN_SECONDS if isinstance(mixer, StateSpace) else 0.0)
