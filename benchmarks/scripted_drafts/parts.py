"""`told_parts`: a made-up model that answers and routes as it is told."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Rows
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from scripted_drafts.routing import ToldRouting
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


class ToldModel:
    """A model's work, with answers that depend on positions alone."""

    def __init__(self, model: StepModel, routing: ToldRouting, vocab: int) -> None:
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
        self._routing.begin_guesses(batch)
        return self._model.draft(hidden, batch, states)


class ToldCopies(CopiedExperts):
    """In CPU memory, without a GPU."""

    chosen: Tensor  # int32 [rows, k]

    def submit(self, x: Tensor, routing: Routing) -> Ticket:
        shared = routing.ids[:, self.chosen.shape[1] :]
        ids = torch.cat((self.chosen[: len(x)], shared), 1)
        return super().submit(x, Routing(ids, routing.weights))


class ToldStore:
    """Every layer's experts in CPU memory, without a GPU."""

    def __init__(self, ops: Ops, hidden: int, chosen: Tensor) -> None:
        self._ops, self._hidden, self._chosen = ops, hidden, chosen

    def layer(
        self, index: int, count: int, width: int, fmt: str, activation: Activation = SILU
    ) -> ToldCopies:
        experts = ToldCopies(self._ops.experts(count, self._hidden, width, fmt, activation))
        experts.chosen = self._chosen[index]
        return experts


@dataclass(frozen=True)
class ToldStart(MadeUpStart):
    """`routing` in place of the routers' choice."""

    routing: ToldRouting | None = None

    def cpu_store(self) -> ExpertStore:
        assert self.routing is not None
        return ToldStore(self.ops, self.model_config.expert_channels, self.routing.chosen)

    def gpu_store(self, store: HybridStore, handoff: Handoff) -> ExpertStore:
        assert self.routing is not None
        self.routing.move(handoff.device)
        return SyntheticStore(store, handoff, chosen=self.routing.chosen)


class Told(NamedTuple):
    """And what routes it."""

    parts: EngineParts
    routing: ToldRouting


def told_parts(config: EngineConfig, dense: str, overlap: float) -> Told:
    """Engine parts of the folder `config.model`, and their routing. Raises ConfigError."""
    routings: list[ToldRouting] = []
    parts = made_up_parts(config, dense=dense, start=partial(_start, overlap, routings))
    model, [routing] = parts.model_config, routings
    scripted = ToldModel(parts.model, routing, model.vocab)
    return Told(replace(parts, model=scripted), routing)


def _start(
    overlap: float, routings: list[ToldRouting], config: EngineConfig, plan: Plan, *rest: object
) -> MadeUpStart:
    make: Callable[..., ToldStart] = ToldStart
    start = make(config, plan, *rest)
    routings.append(ToldRouting(start.model_config, overlap, plan.max_step_tokens))
    return replace(start, routing=routings[0])
