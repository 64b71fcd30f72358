"""Chains as CUDA graphs compute them, run by the CPU."""

from __future__ import annotations

import torch

from tandem.engine.engine import Engine
from tandem.engine.speculation.gpu_rollout import GpuDrafts, GpuRollouts
from tandem.engine.speculation.rollout_inputs import RolloutShape
from tandem.experts.handoff import Handoff
from tandem.experts.handoff_counts import HandoffSizes

CPU = torch.device("cpu")


def recording(engine: Engine, sizes: tuple[int, ...], rows: int = 8, at_once: int = 0) -> list[int]:
    """Makes it draw as on a GPU; of each call, for how many sequences a recording was used: 0 for none."""
    runner, plan = engine._runner, engine.plan
    handoff = Handoff(HandoffSizes(8, 8, engine.model_config.hidden, 1), CPU, 1.0)
    pages = -(-plan.context_length // plan.page_size)
    shapes = [RolloutShape(size, rows, plan.draft_tokens, pages, plan.page_size) for size in sizes]
    drafts = GpuDrafts(runner._model, runner._states, handoff, lambda batch, captured: None, at_once)
    chains, used = GpuRollouts(drafts, shapes, plan.page_size), []
    draw = chains.chains

    def noted(runs, widths):
        found = draw(runs, widths)
        used.append(0 if chains.unusual else len(runs))
        return found

    chains.chains = noted
    engine._speculation._drafter._chain = chains
    return used
