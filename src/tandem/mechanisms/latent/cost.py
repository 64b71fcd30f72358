"""Planner costs of latent attention."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tandem.mechanisms import cost
from tandem.mechanisms.cost import KeyShape, Limit, Output, cost_of, pairs
from tandem.mechanisms.latent.shape import Latent
from tandem.spec.gpu_scratch import HEAD_BYTES, ROUND_KEYS, ROUND_ROWS, SQUARE, StepSize
from tandem.spec.rope import Rope
from tandem.spec.stored import StoredFormats

PARTIAL_BYTES = 256 << 20  # of sums of rows that decode, before they are merged; once for graphs, once for others
PIECE = 16384  # tokens of a prefix whose keys and values are there at a time
KERNELS = 3  # five and two products, where others have four and one
LAUNCHES = 110  # outside of graphs: two thirds more of Triton's kernels than others have


class Cost(cost.Cost[Latent]):
    """Cost of one latent for each token. All tokens see it, or those that an indexer chooses."""

    own_kernels = "latents have kernels of their own, with cuDNN's for prompts"
    launches = LAUNCHES

    @property
    def kernels(self) -> int:
        index = self.shape.index
        return KERNELS + (0 if index is None else cost_of(index).kernels)

    @property
    def keys(self) -> KeyShape:
        s = self.shape
        return KeyShape(s.heads, 1, s.cached_dim, s.kv_rank, s.scale)

    @property
    def ropes(self) -> tuple[Rope, ...]:
        index = self.shape.index
        return (self.shape.rope,) if index is None else (self.shape.rope, *cost_of(index).ropes)

    def scratch_bytes(self, step: StepSize, hidden: int, streams: int) -> int:
        return latent_scratch_bytes(self.shape, step.context, step.rows)

    @property
    def number_params(self) -> int:
        return self.shape.head_params

    def unread(self, context: int) -> int:
        return (context - self.shape.visible_tokens(context)) * self.shape.cached_dim

    def flops(self, rows: int, before: int, per_head: bool) -> float:
        """Rows that choose among the tokens before them are always in absorbed form. per_head: with each head's keys
        and values; else in absorbed form."""
        s, end = self.shape, before + rows
        absorbed = s.cached_dim + s.kv_rank
        whole = s.qk_dim + s.value_dim if per_head else absorbed
        plain = max(0, min(rows, s.visible_tokens(end) - before))  # rows that see all tokens before them
        products = pairs(plain, before, end) * whole + (rows - plain) * s.visible_tokens(end) * absorbed
        return 2.0 * (products * s.heads + pairs(rows, before, end) * s.scored_channels)

    def why_no_gpu(self) -> str:
        index = self.shape.index
        return super().why_no_gpu() or ("" if index is None else cost_of(index).why_no_gpu())

    def cut(self, ranks: int) -> Latent:
        return replace(self.shape, heads=self.shape.heads // ranks)

    def limits(self, expert_unit: int, stored: StoredFormats) -> Iterator[Limit]:
        yield Limit(f"{self.shape.heads} heads", self.shape.heads)

    @property
    def output(self) -> Output:
        return Output("o_proj", self.shape.heads * self.shape.value_dim)

    @property
    def reads_choice(self) -> bool:
        return self.shape.index is not None

    @property
    def chosen_by(self) -> int | None:
        return None if self.shape.index is None else self.shape.index.reuse

    def choosing_as(self, layer: int | None) -> Latent:
        index = self.shape.index
        return self.shape if index is None else replace(self.shape, index=replace(index, reuse=layer))


def latent_scratch_bytes(shape: Latent, context: int, step_rows: int) -> int:
    """Scratch bytes of one layer, at most: of rows that decode, and of a chunk of so many rows in so long a context."""
    rows = -(-min(step_rows, SQUARE) // ROUND_ROWS) * ROUND_ROWS + ROUND_KEYS
    tokens = max(rows, min(PIECE, context))
    head = head_bytes(shape.nope_dim, shape.rope_dim, shape.value_dim, rows, tokens)
    index = 0 if shape.index is None else cost_of(shape.index).scratch_bytes(StepSize(step_rows, context, 1), 0, 0)
    return 2 * PARTIAL_BYTES + max(HEAD_BYTES, head) + 2 * tokens * shape.cached_dim + index


def head_bytes(nope: int, rope: int, value: int, rows: int, tokens: int) -> int:
    """Bytes of one head of a chunk. For each token: keys and values as one product makes them, and keys beside the
    rotary channels. For each row: a query, two pieces and their sum."""
    return 2 * tokens * (2 * nope + rope + value) + rows * (2 * (nope + rope) + (2 + 2 + 4) * value)
