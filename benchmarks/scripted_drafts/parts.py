"""`told_parts`: a made-up model that answers and routes as it is told."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Rows
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from scripted_drafts.routing import ScriptedRouting
from tandem.bench.gaps.made_up import CopiedExperts, MadeUpStart, made_up_parts
from tandem.bench.synthetic import SyntheticStore
from tandem.engine.cpu_runner import StepModel
from tandem.engine.speculation.rollout import DraftingModel
from tandem.engine.start.parts import EngineParts
from tandem.experts import ExpertStore
from tandem.experts.cpu_experts import Ticket
from tandem.flags.engine_config import EngineConfig
from tandem.kernels.ops import Ops, Routing
from tandem.models.batch import ForwardBatch
from tandem.planner.plan import Plan
from tandem.spec.activation import SILU, Activation

if TYPE_CHECKING:
    from tandem.experts.handoff import Handoff
    from tandem.experts.hybrid_store import HybridStore

SURE = 1e4  # more than any logit of a made-up model
STRIDE = 7919  # from an answer's token to the next; odd, and no vocabulary's divisor


def told_tokens(first: int, count: int, vocab: int) -> list[int]:
    """`count` tokens of every answer, at positions from `first` on."""
    return [position * STRIDE % vocab for position in range(first, first + count)]


class ScriptedModel:
    """A model's work, with answers that depend on positions alone."""

    def __init__(self, model: StepModel, routing: ScriptedRouting, vocab: int) -> None:
        self._model, self._routing, self._vocab = model, routing, vocab

    def forward(self, batch: ForwardBatch, states: Rows[tuple[Tensor, ...]]) -> Tensor:
        self._routing.begin(batch)
        logits = self._model.forward(batch, states)
        answers = (batch.positions[batch.logits_rows] + 1) * STRIDE % self._vocab
        return logits.scatter_(1, answers[:, None], SURE)

    def draft(
        self, hidden: Tensor | None, batch: ForwardBatch, states: Rows[tuple[Tensor, ...]]
    ) -> tuple[Tensor, Tensor]:
        assert isinstance(self._model, DraftingModel), "this model has no draft layer"
        self._routing.begin_drafts(batch)
        return self._model.draft(hidden, batch, states)


class ScriptedCopies(CopiedExperts):
    """In CPU memory, without a GPU."""

    chosen: Tensor  # int32 [rows, k]

    def submit(self, x: Tensor, routing: Routing) -> Ticket:
        shared = routing.ids[:, self.chosen.shape[1] :]
        ids = torch.cat((self.chosen[: len(x)], shared), 1)
        return super().submit(x, Routing(ids, routing.weights))


class ScriptedStore:
    """Every layer's experts in CPU memory, without a GPU."""

    def __init__(self, ops: Ops, hidden: int, chosen: Tensor) -> None:
        self._ops, self._hidden, self._chosen = ops, hidden, chosen

    def layer(
        self, index: int, count: int, width: int, fmt: str, activation: Activation = SILU
    ) -> ScriptedCopies:
        experts = ScriptedCopies(self._ops.experts(count, self._hidden, width, fmt, activation))
        experts.chosen = self._chosen[index]
        return experts


@dataclass(frozen=True)
class ScriptedStart(MadeUpStart):
    """`routing` in place of the routers' choice."""

    routing: ScriptedRouting | None = None

    def cpu_store(self) -> ExpertStore:
        assert self.routing is not None
        return ScriptedStore(self.ops, self.model_config.expert_channels, self.routing.chosen)

    def gpu_store(self, store: HybridStore, handoff: Handoff) -> ExpertStore:
        assert self.routing is not None
        self.routing.move(handoff.device)
        return SyntheticStore(store, handoff, chosen=self.routing.chosen)


class ScriptedSetup(NamedTuple):
    """And what routes it."""

    parts: EngineParts
    routing: ScriptedRouting


def told_parts(config: EngineConfig, dense: str, overlap: float) -> ScriptedSetup:
    """Engine parts of the folder `config.model`, and their routing. Raises ConfigError."""
    routings: list[ScriptedRouting] = []
    parts = made_up_parts(config, dense=dense, start=partial(_start, overlap, routings))
    model, [routing] = parts.model_config, routings
    scripted = ScriptedModel(parts.model, routing, model.vocab)
    return ScriptedSetup(replace(parts, model=scripted), routing)


def _start(
    overlap: float, routings: list[ScriptedRouting], config: EngineConfig, plan: Plan, *rest: object
) -> MadeUpStart:
    make: Callable[..., ScriptedStart] = ScriptedStart
    start = make(config, plan, *rest)
    routings.append(ScriptedRouting(start.model_config, overlap, plan.max_step_tokens))
    return replace(start, routing=routings[0])
