"""Messages of the first rank to the others (msgpack over ZeroMQ)."""

from __future__ import annotations

import msgspec

from tandem.engine.step.prefill import TaskEvent
from tandem.flags.engine_config import EngineConfig
from tandem.planner.plan import Plan

Place = tuple[int, int]
"""The number of a page in a sequence's table, and the page."""


class StartRank(msgspec.Struct, frozen=True, kw_only=True):
    """The first one. plan: the first rank's; the others take all of it but its threads. file: where they meet."""

    config: EngineConfig
    plan: Plan
    file: str


class SentRows(msgspec.Struct, frozen=True, array_like=True):
    """Rows of one sequence in a step: `tokens` from position `first` on, logits of the last `logits`. It holds `held`
    pages. Of a draft layer's rows each token is the one behind its position, and `logits` is 1 where the last drafts.

    pages, windows: places of its tables that differ from what was said of it before. draft_tokens: so many last tokens
    are drafts. state_len: tokens that its slot's folds hold.
    """

    sequence: int
    first: int
    tokens: list[int]
    logits: int
    slot: int
    held: int
    pages: list[Place]
    windows: list[Place]
    draft_tokens: int
    state_len: int


class StepList(msgspec.Struct, frozen=True, array_like=True):
    """Copies of slots, from and to, then a step. ended: sequences that no later list names. warms: it loads GPU kernels
    before the start, through one layer of each kind; streams: whose experts are streamed. committed: tokens that the
    rows of the step before were, once rejected drafts were dropped; None: nobody says so. widths: how many drafts are
    made of each run that drafts, where these are rows of the draft layer; None: of the model. task: what becomes of a
    prefill that is computed in pieces between steps; these are the rows of one that begins; None: it is no matter of
    one."""

    number: int
    rows: list[SentRows]
    ended: list[int]
    copies: list[tuple[int, int]]
    warms: bool = False
    streams: bool = False
    committed: int | None = None
    widths: list[int] | None = None
    task: TaskEvent | None = None
