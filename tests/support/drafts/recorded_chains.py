"""Chains as CUDA graphs compute them, run by the CPU."""

from __future__ import annotations

from typing import Any

import torch

from tandem.engine.engine import Engine
from tandem.engine.speculation.gpu_rollout import GpuDrafts, GpuRollouts
from tandem.engine.speculation.rollout_inputs import RolloutShape
from tandem.experts.handoff import Handoff
from tandem.experts.handoff_counts import HandoffSizes
from tandem.planner.plan import Plan

CPU = torch.device("cpu")


def recording(engine: Engine, sizes: tuple[int, ...], rows: int = 8, at_once: int = 0) -> list[int]:
    """Makes it draw as on a GPU; of each call, for how many sequences a recording was used: 0 for none."""
    runner = engine._runner
    chains, used = recorded(runner._model, runner._states, engine.plan, sizes, rows, at_once), []
    draw = chains.chains

    def noted(runs, widths):
        found = draw(runs, widths)
        used.append(0 if chains.unusual else len(runs))
        return found

    chains.chains = noted
    engine._speculation._drafter._chain = chains
    return used


def recorded(
    model: Any, states: Any, plan: Plan, sizes: tuple[int, ...], rows: int, at_once: int = 0, ranked: bool = False
) -> GpuRollouts:
    """Chains of so many sequences, of so many rows each."""
    handoff = Handoff(HandoffSizes(8, 8, 64, 1), CPU, 1.0)
    pages = -(-plan.context_length // plan.page_size)
    shapes = [RolloutShape(size, rows, plan.draft_tokens, pages, plan.page_size) for size in sizes]
    drafts = GpuDrafts(model, states, handoff, lambda batch, captured: None, at_once, ranked)
    return GpuRollouts(drafts, shapes, plan.page_size)
