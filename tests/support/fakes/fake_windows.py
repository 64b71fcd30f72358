"""A fake model of a layer that sees all tokens and one that sees a window, whose pages come and go.

Every row reads what kernels read: from a multiple of 64 tokens on. A page that went too early, is somebody else's, or
was overwritten fails at once.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from fake_model import FakeModel, FakeTokenizer, fake_config, fake_plan
from tandem.engine.engine import Engine
from tandem.engine.speculation.draft import Drafter
from tandem.engine.start.parts import EngineParts
from tandem.engine.state.windows import WindowPages
from tandem.mechanisms.dense.shape import Dense
from tandem.mechanisms.grouped_query.shape import Gqa
from tandem.planner.choices.speculation import SpeculationPlan
from tandem.spec.layers import pre_norm
from tandem.spec.model_config import ModelConfig
from tandem.spec.norm import Norm
from tandem.spec.rope import Rope
from tandem.spec.state import KEY_BLOCK

WINDOW = 10


def windowed_config() -> ModelConfig:
    full = Gqa(heads=1, kv_heads=1, head_dim=1, rope=Rope(1.0, 0))
    layers = [pre_norm(each, Dense(1), Norm(1e-6)) for each in (replace(full, window=WINDOW), full)]
    return replace(fake_config(), layers=tuple(layers))


class WindowModel(FakeModel):
    """The answer depends on all tokens; the layer with the window says whether it has those that it should."""

    def forward(self, batch, states) -> torch.Tensor:
        (tokens, places), whole = states
        own = batch.windowed
        tokens.view(-1)[own.cache_slots] = own.input_ids.to(tokens.dtype)
        places.view(-1)[own.cache_slots] = own.positions.to(places.dtype)
        starts = own.query_starts.tolist()
        for s, length in enumerate(own.seq_lens.tolist()):
            first = max(0, length - (starts[s + 1] - starts[s]) + 1 - WINDOW) // KEY_BLOCK * KEY_BLOCK
            known = self._read(batch.block_tables[s], whole[0], first, length)
            assert np.array_equal(self._read(own.block_tables[s], places, first, length), np.arange(first, length))
            written = slice(None, -1) if batch is own else slice(None, length - first - (starts[s + 1] - starts[s]))
            found = self._read(own.block_tables[s], tokens, first, length)
            assert np.array_equal(found[written], known[written]), "a window's page has other tokens"
        return super().forward(batch, [whole])

    def _read(self, table, pages, first: int, end: int) -> np.ndarray:
        size = pages.shape[1]
        positions = torch.arange(first, end)
        return pages.view(-1)[table[positions // size].long() * size + positions % size].numpy()


def windows_of(engine: Engine) -> WindowPages:
    windows = engine._scheduler._store._windows
    assert windows is not None
    return windows


def windowed_engine(*, drafter: Drafter | None = None, windows: int | None = None, **changes) -> Engine:
    """windows: their pages; None: as many as the planner has."""
    plan, config = fake_plan(**changes), windowed_config()
    if drafter is not None:
        plan = replace(plan, speculation=SpeculationPlan("made up", 4, False))
    layout = config.state_layout(plan.dtype, plan.page_size, plan.draft_tokens)
    count = windows or layout.window_pages(plan.max_running_requests, plan.max_step_tokens)
    plan = replace(plan, num_window_pages=min(count, plan.num_pages))
    return Engine.from_parts(EngineParts(plan, config, WindowModel(), FakeTokenizer(), drafter=drafter))


def poison(engine: Engine) -> None:
    """Pages that nobody holds and no prefix is known by become NaN."""
    free = windows_of(engine)._free
    for state, arrays in zip(engine.model_config.states, engine._runner._states, strict=True):
        for array in arrays if state.window else ():
            array[free] = float("nan")


def check_windows(engine: Engine) -> None:
    """No page leaked, none owned twice; each holds what lies beside it in the pages of all tokens."""
    windows, users = windows_of(engine), {}
    for sequence in engine._scheduler.running:
        held = sequence.window_table[sequence.window_first : sequence.window_end].tolist()
        assert not sequence.window_table[: sequence.window_first].any()
        assert not sequence.window_table[sequence.window_end :].any()
        for page in held:
            users[page] = users.get(page, 0) + 1
    assert users == {page: count for page, count in enumerate(windows._users) if count}
    free, idle = set(windows._free), set(windows._idle)
    assert len(free) == len(windows._free) and not free & idle and not (free | idle) & set(users)
    assert free | idle | set(users) == set(range(len(windows._users)))
    assert windows._prefix == {own: page for page, own in windows._window_page.items()}
    assert idle <= set(windows._prefix) and not free & set(windows._prefix)
    known = engine._kv._tree
    assert not windows._window_page if known is None else all(page in known for page in windows._window_page)


def scored(engine: Engine, requests: list) -> dict:
    """Answers of an engine. Where layers keep windows, pages that went hold NaN before each step."""
    for each in requests:
        engine.add(each)
    found: dict = {}
    while engine.has_work():
        if engine.plan.num_window_pages:
            poison(engine)
        for output in engine.step():
            found.setdefault((output.id, output.index), []).append((output.token_ids, output.logprobs))
    return found
