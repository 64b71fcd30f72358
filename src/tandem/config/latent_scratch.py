"""What latent attention takes of GPU memory beside its weights and pages: sizes that planner and kernels share."""

from __future__ import annotations

from tandem.config.layers import Latent

PARTIAL_BYTES = (
    256 << 20
)  # of sums of rows that decode, before they are merged; once for graphs, once for other steps
HEAD_BYTES = 512 << 20  # of a prompt's queries, keys, values and results, of as many heads as fit
PIECE = 16384  # tokens of a prefix whose keys and values are there at a time
SQUARE = 8192  # rows of a chunk at a time
ROUND_ROWS, ROUND_KEYS = 256, 512  # tokens: lengths are rounded up, because cuDNN plans every new shape


def latent_scratch_bytes(shape: Latent, context: int, step_rows: int) -> int:
    """Of one layer, at most: of rows that decode, and of a chunk of so many rows in so long a context."""
    rows = -(-min(step_rows, SQUARE) // ROUND_ROWS) * ROUND_ROWS + ROUND_KEYS
    tokens = max(rows, min(PIECE, context))
    head = head_bytes(shape.nope_dim, shape.rope_dim, shape.value_dim, rows, tokens)
    return 2 * PARTIAL_BYTES + max(HEAD_BYTES, head) + 2 * tokens * shape.cached_dim


def head_bytes(nope: int, rope: int, value: int, rows: int, tokens: int) -> int:
    """Of one head of a chunk. For each token: keys and values as one product makes them, and keys beside the rotary
    channels. For each row: a query, two pieces and their sum."""
    return 2 * tokens * (2 * nope + rope + value) + rows * (2 * (nope + rope) + (2 + 2 + 4) * value)
