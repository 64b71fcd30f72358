"""`TimedTurns`: the same answers with draft tokens and without, one after the other, on one model."""

from __future__ import annotations

from dataclasses import replace
from time import perf_counter
from typing import NamedTuple

import msgspec

from scripted_drafts.paid import PricedDrafter
from scripted_drafts.parts import ScriptedSetup, told_tokens
from tandem.engine.engine import Engine
from tandem.engine.protocol import GenerateRequest, SamplingSettings, SpeculationStats
from tandem.engine.speculation.oracle_drafter import OracleDrafter
from tandem.planner.choices.speculation import DRAFT_ALGORITHMS, SpeculationPlan


class ScriptedLoad(NamedTuple):
    """batch: sequences, each with a prompt of `context` tokens and an answer of `tokens`."""

    batch: int
    context: int
    tokens: int


class ScriptedDrafts(NamedTuple):
    """algorithm: NEXTN where a draft layer does its work, whose draft tokens are replaced. acceptance: the share that
    is accepted; most: of a sequence in a step; seconds: of each one that is drawn without a layer."""

    algorithm: str
    acceptance: float
    most: int
    governed: bool
    seconds: float


class Timed(NamedTuple):
    """From when all prompts are computed. cpu_experts: of a step, in all layers, each once; None: nobody counts."""

    tok_s: float
    step_seconds: float
    cpu_experts: float | None


class TimedPair(NamedTuple):
    """One after the other."""

    speculative: Timed
    plain: Timed


class TimedTurns:
    def __init__(self, setup: ScriptedSetup, load: ScriptedLoad) -> None:
        self._told, self._asked = setup, load
        self._plain = self._engine(None)
        self.timed(self._plain)

    def measure(self, drafts: ScriptedDrafts, repeats: int) -> tuple[list[TimedPair], SpeculationStats]:
        """And what the engine says of them."""
        engine = self._engine(drafts)
        for _ in range(2):
            self.timed(engine)  # it learns what steps take
        before, turns = _stats(engine), []
        for i in range(repeats):
            ways = (engine, self._plain) if i % 2 else (self._plain, engine)
            timings = {way: self.timed(way) for way in ways}
            turns.append(TimedPair(timings[engine], timings[self._plain]))
        return turns, _since(_stats(engine), before)

    def timed(self, engine: Engine) -> Timed:
        batch, context, tokens = self._asked
        params = SamplingSettings(temperature=0.0, ignore_eos=True, max_tokens=tokens)
        for i in range(batch):
            engine.add(GenerateRequest(id=str(i), prompt_ids=_prompt(i, context), sampling=params))
        counts = [0] * batch
        while not all(counts):
            _count(engine, counts)
        before, used, started, steps = sum(counts), self._used(), perf_counter(), 0
        while engine.has_work():
            _count(engine, counts)
            steps += 1
        seconds = perf_counter() - started
        cpu_experts = None if used is None else ((self._used() or 0) - used) / steps
        return Timed((sum(counts) - before) / seconds, seconds / steps, cpu_experts)

    def _used(self) -> int | None:
        handoff = self._told.parts.handoff
        return None if handoff is None else handoff.used()[1]

    def _engine(self, drafts: ScriptedDrafts | None) -> Engine:
        """With those graphs alone that its steps may need."""
        parts, load = self._told.parts, self._asked
        plan, vocab = parts.plan, parts.model_config.vocab
        if plan.gpu is not None:
            most = load.batch * (1 + (drafts.most if drafts else 0))
            plan = replace(
                plan, gpu=replace(plan.gpu, graph_sizes=_sizes(plan.gpu.graph_sizes, load.batch, most))
            )
        if drafts is None:
            return Engine.from_parts(replace(parts, plan=replace(plan, speculation=None)))
        plan = replace(plan, speculation=SpeculationPlan(drafts.algorithm, drafts.most, drafts.governed))
        answers = {(str(i), 0): told_tokens(load.context, load.tokens, vocab) for i in range(load.batch)}
        foretold = answers, drafts.acceptance, vocab
        drafter = (
            OracleDrafter(*foretold)
            if drafts.algorithm in DRAFT_ALGORITHMS
            else PricedDrafter(*foretold, drafts.seconds)
        )
        return Engine.from_parts(replace(parts, plan=plan, drafter=drafter))


def _sizes(captured: tuple[int, ...], batch: int, most: int) -> tuple[int, ...]:
    """From the batch on, up to the first that holds `most` rows."""
    enough = next((size for size in captured if size >= most), most)
    return tuple(size for size in captured if batch <= size <= enough)


def _stats(engine: Engine) -> SpeculationStats:
    stats = engine.stats().speculation
    assert stats is not None
    return stats


def _since(now: SpeculationStats, before: SpeculationStats) -> SpeculationStats:
    """Draft tokens, those that were accepted, and widths."""
    return msgspec.structs.replace(
        now,
        draft_tokens=now.draft_tokens - before.draft_tokens,
        accepted_tokens=now.accepted_tokens - before.accepted_tokens,
        widths=[a - b for a, b in zip(now.widths, before.widths, strict=True)],
    )


def _count(engine: Engine, counts: list[int]) -> None:
    for output in engine.step():
        if output.error is not None:
            raise RuntimeError(output.error)
        counts[int(output.id)] += len(output.token_ids)


def _prompt(number: int, context: int) -> list[int]:
    """Those of a batch begin differently."""
    return [(number + place) % 251 for place in range(context)]
