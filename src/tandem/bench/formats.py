"""Weights of every format for `kt bench kernels`, made the way a checkpoint would be read, and their packed size."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.errors import ConfigError
from tandem.formats import codes as stored_codes
from tandem.formats import gguf_blocks, gguf_grids, reference
from tandem.formats.codes import Weight, WeightCodes
from tandem.kernels.cpu import PackedExperts, WorkerPool, Workspace

SMALL_HALF = 0x0818  # 0.000125: scales of random blocks, so that weights are of a model's size


@dataclass(frozen=True, slots=True)
class RandomBlocks:
    """GGUF blocks of random bytes: how many weights and bytes each has, where its halves are, and how it is read."""

    weights: int
    bytes: int
    halves: tuple[int, ...]
    read: Callable[[Tensor], WeightCodes]

    def random(self, name: str, rows: int, depth: int) -> WeightCodes:
        if depth % self.weights:
            raise ConfigError(f"--format {name}: sizes must be multiples of {self.weights}, not {depth}")
        random = torch.Generator().manual_seed(2)
        shape = (rows, depth // self.weights, self.bytes)
        blocks = torch.randint(0, 256, shape, generator=random, dtype=torch.uint8)
        for offset in self.halves:
            blocks[..., offset], blocks[..., offset + 1] = SMALL_HALF & 255, SMALL_HALF >> 8
        return self.read(blocks.flatten(1))


GGUF = {
    "q4_0": RandomBlocks(32, 18, (0,), gguf_blocks.gguf_q4_0),
    "q4_1": RandomBlocks(32, 20, (0, 2), gguf_blocks.gguf_q4_1),
    "q8_0": RandomBlocks(32, 34, (0,), gguf_blocks.gguf_q8_0),
    "q2_k": RandomBlocks(256, 84, (80, 82), gguf_blocks.gguf_q2_k),
    "q3_k": RandomBlocks(256, 110, (108,), gguf_blocks.gguf_q3_k),
    "q4_k": RandomBlocks(256, 144, (0, 2), gguf_blocks.gguf_q4_k),
    "q5_k": RandomBlocks(256, 176, (0, 2), gguf_blocks.gguf_q5_k),
    "q6_k": RandomBlocks(256, 210, (208,), gguf_blocks.gguf_q6_k),
    "iq4_nl": RandomBlocks(32, 18, (0,), gguf_blocks.gguf_iq4_nl),
    "iq4_xs": RandomBlocks(256, 136, (0,), gguf_blocks.gguf_iq4_xs),
    "iq3_s": RandomBlocks(256, 110, (0,), gguf_grids.gguf_iq3_s),
    "iq3_xxs": RandomBlocks(256, 98, (0,), gguf_grids.gguf_iq3_xxs),
    "iq2_s": RandomBlocks(256, 82, (0,), gguf_grids.gguf_iq2_s),
    "iq2_xs": RandomBlocks(256, 74, (0,), gguf_grids.gguf_iq2_xs),
    "iq2_xxs": RandomBlocks(256, 66, (0,), gguf_grids.gguf_iq2_xxs),
    "iq1_s": RandomBlocks(256, 50, (0,), gguf_grids.gguf_iq1_s),
}
NUMBERS = ("bf16", "f32", "int8", "int4")  # rounded by the packer; int8 and int4 in groups of 32
CODES = {
    "fp8": ("fp8", 128),  # blocks of 128 x 128
    "fp8-row": ("fp8", 0),
    "int4-g64": ("int4", 64),
    "int4-g128": ("int4", 128),
    "int4-zeros": ("int4_zeros", 128),  # GPTQ, AWQ
    "mxfp4": ("mxfp4", 32),
    "mxfp8": ("mxfp8", 32),
    "nvfp4": ("nvfp4", 16),
}
FORMATS = (*NUMBERS, *CODES, *GGUF)
NO_INTEGERS = ("bf16", "f32", "fp8", "fp8-row", "mxfp8")
"""No kernels with int8 activations."""


def as_stored(weight: Tensor, name: str) -> Weight:
    """weight [N, K] in a format of FORMATS; GGUF's blocks hold random numbers instead."""
    if name in NUMBERS:
        return weight
    if name in GGUF:
        return GGUF[name].random(name, *weight.shape)
    fmt, group = CODES[name]
    if fmt == "int4":
        return _rounded(weight, fmt, group)
    return reference.stored(weight, fmt, group)


def _rounded(weight: Tensor, fmt: str, group: int) -> WeightCodes:
    codes, scales = reference.quantise(weight, fmt, group)
    nibbles = (codes.flatten(1)[:, : weight.shape[1]].int() & 15).to(torch.uint8)
    joined = stored_codes.join_nibbles(nibbles)
    return WeightCodes(joined, scales[..., 0].bfloat16(), fmt, group, weight.shape[1])


def empty_layer(hidden: int, width: int, name: str) -> PackedExperts:
    """A layer of one expert, with the layout that such experts have."""
    layer = PackedExperts(_workspace(), 1, hidden, width, name if name in NUMBERS else "bf16")
    if name not in NUMBERS:
        up, down = (as_stored(torch.ones(1, depth), name) for depth in (hidden, width))
        layer.hold(up, up, down)
    return layer


@functools.cache
def expert_bytes(hidden: int, width: int, name: str) -> int:
    """Bytes of one expert once it is packed, scales and padding included: an empty layer is asked."""
    return empty_layer(hidden, width, name).bytes_per_expert


@functools.cache
def _workspace() -> Workspace:
    return Workspace(WorkerPool([-1]), "scalar")
