"""GPU memory of steps, beside weights and pages: sizes that planner and kernels share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

HEAD_BYTES = 512 << 20  # of a prompt's queries, keys, values and results, of as many heads as fit
SQUARE = 8192  # rows of a chunk at a time
MLP_BYTES = 512 << 20  # of what lies between the matrices of a dense feed-forward, at a time
ROUND_ROWS, ROUND_KEYS = 256, 512  # tokens: lengths are rounded up, because cuDNN plans every new shape
DECODED_ROWS, DECODE_PARTS = 256, 32  # rows that decode at a time, and parts of a row's keys
GQA_PIECE, GQA_ROUND = 32768, 1024  # tokens of a prefix that are there at a time; what rows are rounded up to


class StepSize(NamedTuple):
    """Most rows, tokens of a sequence, and sequences of a step."""

    rows: int
    context: int
    sequences: int


def gqa_rows(heads: int, dim: int, value: int) -> int:
    """How many rows of a chunk have room at a time: queries, two pieces of results, and their sum in float32."""
    room = HEAD_BYTES // (heads * (2 * dim + (2 + 2 + 4) * value)) // ROUND_KEYS * ROUND_KEYS
    return max(ROUND_KEYS, min(SQUARE, room))


# Of experts with many rows (`kernels/gpu/prompts/`).
LEAST_EXPERT_BYTES, MOST_EXPERT_BYTES = 128 << 20, 1280 << 20  # unpacked at a time: a layer of Qwen3-30B-A3B at most
EXPERT_SHARE = 64  # ... of the GPU's memory
LEAST_ROW_BYTES, MOST_ROW_BYTES = 512 << 20, 1536 << 20  # two kinds of rows: before, between or after the products
ROW_SHARE = 48  # ... of the GPU's memory. Each piece of rows reads all experts again
CODES_PAIRS = 192  # (token, expert) pairs of an expert, on average, up to which its codes are not unpacked
HOPPER = 9, 0  # compute capability: others have no wgmma
WGMMA_LEAST_PAIRS, WGMMA_PAIRS = 28, 384  # where whole warpgroups multiply codes or bfloat16: from, and up to
PLAIN_PAIRS = 16  # likewise of bfloat16, multiplied as it lies: 4 and 16 pairs take 0.74 and 0.90 of a step with tiles

EXCHANGE_BYTES = 96 << 20
"""For experts on their way to slots, while placement follows use: two of them at least."""
LEAST_EXCHANGE_BUFFERS, MOST_EXCHANGE_BUFFERS = 2, 64
SLOTS_OF_EXCHANGE_BUFFER = 8
"""Experts that are on a GPU for each buffer, at least: on a small one buffers would take the place of nearly all."""

MOST_SHARED_SECONDS = 0.4
"""Seconds of the longest step in which all experts are streamed, for which rows that decode wait.

It moves a whole chunk of a prompt. Where it would be longer, such steps are short and the CPU computes its experts.
"""


def exchange_buffers(
    expert_bytes: int, slots: int = MOST_EXCHANGE_BUFFERS * SLOTS_OF_EXCHANGE_BUFFER
) -> int:
    """How many experts can be on their way. expert_bytes: of the largest one, packed; slots: experts on the GPU where
    none moves."""
    most = min(MOST_EXCHANGE_BUFFERS, slots // SLOTS_OF_EXCHANGE_BUFFER, EXCHANGE_BYTES // max(1, expert_bytes))
    return max(LEAST_EXCHANGE_BUFFERS, most)


def unpacked_bytes(hidden: int, width: int) -> int:
    """Bytes of one expert in bfloat16."""
    return 2 * 3 * hidden * width


def pair_bytes(hidden: int, width: int) -> int:
    """Bytes of a row of one expert, at most. As gathered and times gate and up; or these, which become their activation
    where they are, and the result."""
    return 2 * (hidden + 2 * width)


def expert_row_bytes(gpu_bytes: int) -> int:
    """On a GPU of so much memory."""
    return max(LEAST_ROW_BYTES, min(MOST_ROW_BYTES, gpu_bytes // ROW_SHARE))


def experts_at_once(gpu_bytes: int, experts: int, hidden: int, width: int) -> int:
    """How many of a layer's experts are unpacked together on a GPU of so much memory. One always is. PyTorch refuses
    1024 groups."""
    room = max(LEAST_EXPERT_BYTES, min(MOST_EXPERT_BYTES, gpu_bytes // EXPERT_SHARE))
    return min(1023, max(1, min(experts, room // max(1, unpacked_bytes(hidden, width)))))


def expert_scratch_bytes(gpu_bytes: int, experts: int, hidden: int, width: int) -> int:
    """Bytes of those unpacked experts."""
    return experts_at_once(gpu_bytes, experts, hidden, width) * unpacked_bytes(hidden, width)


# Of experts streamed to the GPU for a step (`experts/streaming/`).
PART_BYTES = 128 << 20  # of the ring that are copied, waited for and unpacked at once; or one expert
RING_BYTES = 768 << 20
PART_EXPERTS = 16  # of large ones a part has so many, as far as two fit: the host gives each part's kernels for 0.5 ms
MOST_PARTS, LEAST_PARTS = 6, 2


@dataclass(frozen=True, slots=True)
class StagingRing:
    """Parts of so many experts each. One is unpacked while the others arrive."""

    parts: int
    experts: int
    part_bytes: int

    @property
    def nbytes(self) -> int:
        return self.parts * self.part_bytes

    def holds(self, places: int) -> bool:
        """Whether a layer of so many fits, and the copies can go on meanwhile."""
        return 2 * -(-places // self.experts) <= self.parts


def ring_of(expert_bytes: int, at_once: int) -> StagingRing:
    """expert_bytes: of the largest expert, packed. at_once: how many are unpacked together."""
    each = max(1, expert_bytes)
    experts = max(1, min(at_once, max(PART_BYTES // each, min(PART_EXPERTS, RING_BYTES // (LEAST_PARTS * each)))))
    part = -(-experts * expert_bytes // 256) * 256
    return StagingRing(max(LEAST_PARTS, min(MOST_PARTS, RING_BYTES // max(1, part))), experts, part)
