"""Speculation of an engine, from its plan's choice."""

from __future__ import annotations

from tandem.engine.speculation.draft import Drafter
from tandem.engine.speculation.draft_kv import DraftKvInPages, DraftKvInSlots
from tandem.engine.speculation.gpu_rollout import GpuDrafts, GpuRollouts
from tandem.engine.speculation.nextn import NextN
from tandem.engine.speculation.ngram import NGram
from tandem.engine.speculation.oracle_drafter import ReplacingDrafter
from tandem.engine.speculation.rollout import BlockRollouts, DraftingModel, Rollouts, StepwiseRollouts, on_cpu
from tandem.engine.speculation.rollout_inputs import RolloutShape
from tandem.engine.speculation.speculation import Speculation
from tandem.engine.start.parts import EngineParts
from tandem.engine.state.arrays import StateArrays
from tandem.engine.state.kv_cache import KVCache
from tandem.engine.step.hooks import nothing_begins
from tandem.planner.choices.speculation import SpeculationPlan
from tandem.planner.cuda_graphs import draft_sizes
from tandem.spec.drafts import window_of

SEQUENCES_AT_ONCE = 16  # of a pass that drafts blocks and is no graph: each has logits of all its rows
ROWS_OF_EACH = 2  # times the rows of a step: what may have come since a draft layer's last pass, in a graph


def speculation_of(parts: EngineParts, states: StateArrays, pages: KVCache) -> Speculation | None:
    """Speculation of an engine's parts; None: each step decodes one token."""
    choice = parts.plan.speculation
    if choice is None:
        return None
    drafter = _drafter(parts, states, pages, choice)
    return Speculation(drafter, choice.algorithm, choice.most_draft_tokens, governed=choice.governed)


def _drafter(parts: EngineParts, states: StateArrays, pages: KVCache, choice: SpeculationPlan) -> Drafter:
    if not parts.plan.drafts:
        return parts.drafter or NGram(choice.least_match, choice.longest_match)
    drafter = parts.model_config.drafter
    window = 0 if drafter is None else window_of(drafter.states(parts.model_config.hidden))
    rows = DraftKvInSlots(window) if window else DraftKvInPages(pages)
    layer = NextN(rollouts_of(parts, states), rows, pages.page_size, most_rows=parts.plan.max_step_tokens)
    return layer if parts.drafter is None else ReplacingDrafter(layer, parts.drafter)


def rollouts_of(parts: EngineParts, states: StateArrays) -> Rollouts:
    """Rollouts of the model's draft layer. A first rank's tell the other ranks what they make."""
    rollouts = _rollouts(parts, states)
    if parts.leader is None:
        return rollouts
    from tandem.engine.ranks.leading_rollouts import LeadingRollouts  # and sockets

    return LeadingRollouts(rollouts, parts.leader, parts.group)


def _rollouts(parts: EngineParts, states: StateArrays) -> Rollouts:
    plan, model = parts.plan, parts.model
    assert isinstance(model, DraftingModel), "this model has no draft layer"
    block = None if parts.model_config.drafter is None else parts.model_config.drafter.block
    if plan.gpu is None or parts.handoff is None:
        run = on_cpu(model, states.arrays)
        return (
            StepwiseRollouts(run, plan.page_size)
            if block is None
            else BlockRollouts(run, plan.page_size, SEQUENCES_AT_ONCE)
        )
    at_once = 0 if block is None else max(1, min(SEQUENCES_AT_ONCE, parts.handoff.sizes.tokens // block.size))
    begin_step = nothing_begins if parts.begin_step is None else parts.begin_step.of_drafts
    drafts = GpuDrafts(model, states.arrays, parts.handoff, begin_step, at_once, ranked=parts.group is not None)
    most = max(plan.draft_tokens, 0 if block is None else block.size - 1)
    pages, rows = -(-plan.context_length // plan.page_size), ROWS_OF_EACH * (1 + plan.draft_tokens)
    shapes = [
        RolloutShape(sequences, rows, plan.draft_tokens, pages, plan.page_size)
        for sequences in draft_sizes(plan.gpu.graph_sizes, most)
    ]
    return GpuRollouts(drafts, shapes, plan.page_size)
