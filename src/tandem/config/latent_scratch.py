"""What latent attention takes of GPU memory beside its weights and pages: sizes that planner and kernels share."""

from __future__ import annotations

from tandem.config.layers import Latent

PARTIAL_BYTES = (
    256 << 20
)  # of sums of rows that decode, before they are merged; once for graphs, once for other steps
KEY_BYTES = 512 << 20  # of a prompt's keys and values, of as many heads as fit
PIECE = 16384  # tokens of a prefix whose keys and values are there at a time
SQUARE = 8192  # rows of a chunk at a time
ROUND_ROWS, ROUND_KEYS = 256, 512  # tokens: lengths are rounded up, because cuDNN plans every new shape


def latent_scratch_bytes(shape: Latent, context: int, step_rows: int) -> int:
    """Of one layer, at most: of rows that decode, and of a chunk of so many rows in so long a context."""
    rows = -(-min(step_rows, SQUARE) // ROUND_ROWS) * ROUND_ROWS + ROUND_KEYS
    longest = max(rows, min(PIECE, context))
    each = head_key_bytes(shape.nope_dim, shape.rope_dim, shape.value_dim, longest)
    heads = min(shape.heads, max(1, KEY_BYTES // each))
    turned, summed = 2 * shape.qk_dim, (2 + 2 + 4) * shape.value_dim  # two pieces and their sum
    return 2 * PARTIAL_BYTES + heads * (each + rows * (turned + summed)) + 2 * longest * shape.cached_dim


def head_key_bytes(nope: int, rope: int, value: int, tokens: int) -> int:
    """Of one head's keys and values: as they come out of one product, and keys beside the rotary channels."""
    return 2 * tokens * (2 * nope + rope + value)
