"""What a plan's choice of speculation becomes."""

from __future__ import annotations

from tandem.config.speculation.choice import SpeculationPlan
from tandem.engine.speculation.draft import Drafter
from tandem.engine.speculation.foretold import Instead
from tandem.engine.speculation.nextn import DraftingModel, NextN
from tandem.engine.speculation.ngram import NGram
from tandem.engine.speculation.speculation import Speculation
from tandem.engine.start.parts import EngineParts
from tandem.engine.state.arrays import StateArrays
from tandem.engine.state.kv_cache import KVCache


def speculation_of(parts: EngineParts, states: StateArrays, pages: KVCache) -> Speculation | None:
    """Of an engine's parts; None: each step decodes one token."""
    asked = parts.plan.speculation
    if asked is None:
        return None
    drafter = _drafter(parts, states, pages, asked)
    return Speculation(drafter, asked.algorithm, asked.most_guesses, governed=asked.governed)


def _drafter(parts: EngineParts, states: StateArrays, pages: KVCache, asked: SpeculationPlan) -> Drafter:
    if asked.algorithm != "NEXTN":
        return parts.drafter or NGram(asked.least_match, asked.longest_match)
    assert isinstance(parts.model, DraftingModel), "this model has no draft layer"
    layer = NextN(parts.model, states.arrays, pages, most_rows=parts.plan.max_step_tokens)
    return layer if parts.drafter is None else Instead(layer, parts.drafter)
