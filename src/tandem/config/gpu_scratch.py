"""What steps take of GPU memory beside weights and pages: sizes that planner and kernels share."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from tandem.config.layers import Mixer
from tandem.config.state import DTYPE_BYTES
from tandem.mechanisms.grouped_query.shape import Gqa
from tandem.mechanisms.latent.shape import Latent
from tandem.mechanisms.shared_kv.shape import SharedKv
from tandem.mechanisms.streams.shape import Hyper

PARTIAL_BYTES = (
    256 << 20
)  # of sums of rows that decode, before they are merged; once for graphs, once for other steps
HEAD_BYTES = 512 << 20  # of a prompt's queries, keys, values and results, of as many heads as fit
SCORE_BYTES = 256 << 20  # of scores of tokens that rows may choose; once for graphs, once for other steps
PIECE = 16384  # tokens of a prefix whose keys and values are there at a time
DECODED_ROWS, DECODE_PARTS = 256, 32  # rows that decode at a time, and parts of a row's keys
GQA_PIECE, GQA_ROUND = 32768, 1024  # the same of grouped heads, which are few; and what rows are rounded up to
SQUARE = 8192  # rows of a chunk at a time
MLP_BYTES = 512 << 20  # of what lies between the matrices of a dense feed-forward, at a time
ROUND_ROWS, ROUND_KEYS = 256, 512  # tokens: lengths are rounded up, because cuDNN plans every new shape


class StepSize(NamedTuple):
    """Of a step, at most: rows, tokens of a sequence, and sequences."""

    rows: int
    context: int
    sequences: int


def mixer_scratch_bytes(mixer: Mixer, hyper: Hyper | None, hidden: int, step: StepSize) -> int:
    """Of a layer's mixer."""
    if isinstance(mixer, Latent):
        return latent_scratch_bytes(mixer, step.context, step.rows)
    if isinstance(mixer, SharedKv):
        return shared_kv_scratch_bytes(mixer, hyper, hidden, step)
    if isinstance(mixer, Gqa):
        return gqa_scratch_bytes(mixer, step)
    return step.rows * mixer.chunk_row_bytes


def decode_sums_bytes(mixers: Iterable[Mixer], rows: int) -> int:
    """Of so many rows that decode: sums of each part of their keys, once for graphs and once for other steps."""
    each = max((mixer.heads * (mixer.value_dim + 2) for mixer in mixers if isinstance(mixer, Gqa)), default=0)
    return 2 * min(rows, DECODED_ROWS) * DECODE_PARTS * each * 4


def latent_scratch_bytes(shape: Latent, context: int, step_rows: int) -> int:
    """Of one layer, at most: of rows that decode, and of a chunk of so many rows in so long a context."""
    rows = -(-min(step_rows, SQUARE) // ROUND_ROWS) * ROUND_ROWS + ROUND_KEYS
    tokens = max(rows, min(PIECE, context))
    head = head_bytes(shape.nope_dim, shape.rope_dim, shape.value_dim, rows, tokens)
    return 2 * PARTIAL_BYTES + max(HEAD_BYTES, head) + 2 * tokens * shape.cached_dim + _index_bytes(shape, step_rows)


def _index_bytes(shape: Latent, step_rows: int) -> int:
    """Scores, half as much again for the lists of the best of them; turned queries, and choices."""
    index = shape.index
    return 0 if index is None else 3 * SCORE_BYTES + step_rows * (2 * index.heads * index.dim + 4 * index.budget)


SHARED_KEY_BYTES = 1 << 26  # of keys that are gathered at a time, and as many of an index's products


def shared_kv_scratch_bytes(shape: SharedKv, hyper: Hyper | None, hidden: int, step: StepSize) -> int:
    """Gathered keys twice in bfloat16 and in float32, an index's products three times. Of each row: queries as
    projected and normed, results, and what turns of them in float32; streams before and after a block, and three times
    in float32 while they mix. What grows with the context comes beside."""
    row = 2 * 3 * shape.heads * shape.dim + 4 * 4 * shape.heads * shape.rope.dims
    streams = 0 if hyper is None else (2 * 2 + 3 * 4) * hyper.streams * hidden
    return 9 * SHARED_KEY_BYTES + step.rows * (row + streams) + _entry_bytes(shape, step)


def _entry_bytes(shape: SharedKv, step: StepSize) -> int:
    """Of each sequence the places of all its entries, in three arrays of int64. Of each row the order of its keys, in
    two. One row's products with an index count three times, where they are more than what is taken at a time."""
    if shape.pool is None:
        return 0
    entries, index = step.context // shape.pool.stride, shape.pool.index
    seen = entries if index is None else min(entries, index.budget)
    one = 0 if index is None else 4 * entries * (index.heads + index.dim)
    order = 2 * 8 * step.rows * (shape.window + seen)
    return 3 * 8 * step.sequences * entries + order + 3 * max(0, one - SHARED_KEY_BYTES)


def gqa_rows(heads: int, dim: int, value: int) -> int:
    """How many rows of a chunk have room at a time: queries, two pieces of results, and their sum in float32."""
    room = HEAD_BYTES // (heads * (2 * dim + (2 + 2 + 4) * value)) // ROUND_KEYS * ROUND_KEYS
    return max(ROUND_KEYS, min(SQUARE, room))


def gqa_scratch_bytes(mixer: Gqa, step: StepSize) -> int:
    """Of one layer whose long chunks are computed piece by piece (`kernels/gpu/pieces/`). Two pieces' keys and values:
    the next is gathered before the last is free. Those in pages of another dtype are gathered as they are, one kind at
    a time, and converted. Results of all rows wait to be put together, which takes them twice."""
    if mixer.window or mixer.sinks:
        return 0
    rows = min(step.rows, gqa_rows(mixer.heads, mixer.head_dim, mixer.value_dim)) + 3 * GQA_ROUND
    tokens = max(rows, min(GQA_PIECE, step.context))
    each = mixer.heads * (2 * mixer.head_dim + (2 + 2 + 4) * mixer.value_dim)
    pieces = rows * each + 2 * 2 * tokens * mixer.kv_heads * (mixer.head_dim + mixer.value_dim)
    if mixer.cached != "act":
        pieces += DTYPE_BYTES[mixer.cached] * tokens * mixer.kv_heads * mixer.head_dim
    results = 2 * step.rows * mixer.heads * mixer.value_dim
    return max(pieces + results, 2 * results)


def head_bytes(nope: int, rope: int, value: int, rows: int, tokens: int) -> int:
    """Of one head of a chunk. For each token: keys and values as one product makes them, and keys beside the rotary
    channels. For each row: a query, two pieces and their sum."""
    return 2 * tokens * (2 * nope + rope + value) + rows * (2 * (nope + rope) + (2 + 2 + 4) * value)


# Of experts with many rows (`kernels/gpu/prompts/`).
LEAST_EXPERT_BYTES, MOST_EXPERT_BYTES = 128 << 20, 1280 << 20  # unpacked at a time: a layer of Qwen3-30B-A3B at most
EXPERT_SHARE = 64  # ... of the GPU's memory
LEAST_ROW_BYTES, MOST_ROW_BYTES = 512 << 20, 1536 << 20  # two kinds of rows: before, between or after the products
ROW_SHARE = 48  # ... of the GPU's memory. Each piece of rows reads all experts again
CODES_PAIRS = 192  # (token, expert) pairs of an expert, on average, up to which its codes are not unpacked

MOST_SHARED_SECONDS = 0.4
"""Of a step in which all experts travel, for which those that decode wait: it moves a whole chunk of a prompt. Where it
would be longer, such steps are short and the CPU computes its experts."""


def unpacked_bytes(hidden: int, width: int) -> int:
    """Of one expert in bfloat16."""
    return 2 * 3 * hidden * width


def pair_bytes(hidden: int, width: int) -> int:
    """Of a row of one expert, at most: as gathered and times gate and up; or these and their activation; or that and
    the result."""
    return 2 * max(hidden + 2 * width, 3 * width)


def expert_scratch_bytes(gpu_bytes: int) -> int:
    """On a GPU of so much memory."""
    return max(LEAST_EXPERT_BYTES, min(MOST_EXPERT_BYTES, gpu_bytes // EXPERT_SHARE))


def expert_row_bytes(gpu_bytes: int) -> int:
    """On a GPU of so much memory."""
    return max(LEAST_ROW_BYTES, min(MOST_ROW_BYTES, gpu_bytes // ROW_SHARE))


def experts_at_once(hidden: int, width: int, scratch: int) -> int:
    """How many are unpacked together; one may need more than the scratch. PyTorch refuses 1024 groups."""
    return min(1023, max(1, scratch // unpacked_bytes(hidden, width)))


# Of experts that travel to the GPU for a step (`experts/streams/`).
PART_BYTES = 128 << 20  # of the ring that are copied, waited for and unpacked at once; or one expert
RING_BYTES = 768 << 20
PART_EXPERTS = 16  # of large ones a part has so many, as far as two fit: the host gives each part's kernels for 0.5 ms
MOST_PARTS, LEAST_PARTS = 6, 2


@dataclass(frozen=True, slots=True)
class Ring:
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


def ring_of(expert_bytes: int, at_once: int) -> Ring:
    """expert_bytes: of the largest expert, packed. at_once: how many are unpacked together."""
    each = max(1, expert_bytes)
    experts = max(1, min(at_once, max(PART_BYTES // each, min(PART_EXPERTS, RING_BYTES // (LEAST_PARTS * each)))))
    part = -(-experts * expert_bytes // 256) * 256
    return Ring(max(LEAST_PARTS, min(MOST_PARTS, RING_BYTES // max(1, part))), experts, part)
