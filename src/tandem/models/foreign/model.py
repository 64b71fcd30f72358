"""`ForeignModel`: a decoder of Transformers between Tandem's scheduler and sampler."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor

from tandem.architectures.foreign.hooks import NAME, answering
from tandem.architectures.foreign.observe import Observation, observe
from tandem.architectures.foreign.skeleton import layer_of, skeleton
from tandem.errors import EngineError
from tandem.models.batch import ForwardBatch
from tandem.models.builder import Builder
from tandem.models.foreign.attention import PagedAttention
from tandem.models.foreign.experts import ForeignExperts
from tandem.models.foreign.single_sequence import AloneModel
from tandem.models.foreign.weights import WeightLoader
from tandem.models.passing import States


class ForeignModel:
    """Packed batches of sequences through Transformers' modules: one row of all their tokens, with their positions.

    Attention goes to Tandem's pages, which know where a sequence begins; everything else treats tokens apart.
    """

    def __init__(
        self, module: Any, experts: dict[int, ForeignExperts], attention: dict[int, PagedAttention]
    ) -> None:
        """experts and attention: by id of the module that calls them, attention in the order of `States`."""
        self._module, self._experts, self._attention = module, experts, attention
        self._order = {key: index for index, key in enumerate(attention)}
        self._keeps = "logits_to_keep" in inspect.signature(module.forward).parameters

    def forward(self, batch: ForwardBatch, states: States) -> Tensor:
        """As `Model.forward`."""
        rows = {"logits_to_keep": batch.logits_rows} if self._keeps else {}
        with answering(_ForeignStep(self, batch, states)):
            out = self._module(
                input_ids=batch.input_ids[None], position_ids=batch.positions[None], use_cache=False, **rows
            )
        logits: Tensor = out.logits[0].float()
        return logits if self._keeps else logits[batch.logits_rows]

    def attend(
        self, module: Any, qkv: tuple[Tensor, Tensor, Tensor], step: _ForeignStep, sinks: Tensor | None
    ) -> Tensor:
        key = id(module)
        return self._attention[key](*qkv, step.batch, step.states[self._order[key]], sinks)

    def experts(self, module: Any, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return self._experts[id(module)](x, ids, weights)


class _ForeignStep:
    """`Hooks` of one step."""

    def __init__(self, model: ForeignModel, batch: ForwardBatch, states: States) -> None:
        self._model, self.batch, self.states = model, batch, states
        self.experts = model.experts

    def mask(self, arguments: dict[str, Any]) -> None:
        """Pages say what a row sees, and the window that was watched."""

    def attend(
        self, module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, arguments: dict[str, Any]
    ) -> Tensor:
        return self._model.attend(module, (q, k, v), self, arguments.get("s_aux"))


def foreign_model(b: Builder) -> ForeignModel | AloneModel:
    """Loads a model whose configuration says that Transformers' modules run it."""
    code = b.config.foreign
    assert code is not None
    model = skeleton(code.config_json, b.dtype, None if code.why_single else NAME)
    observation = observe(skeleton(code.config_json, b.dtype))
    loader = WeightLoader(b, model, _ran(model, observation))
    loader.load()
    if code.why_single:
        return AloneModel(model, loader.experts)
    return ForeignModel(model, loader.experts, _attention(b, model, observation))


def _ran(model: Any, observation: Observation) -> set[str]:
    """Modules that text passes through; all where the pass did not come to its end."""
    return {name for name, _ in model.named_modules()} if observation.why_single else observation.ran


def _attention(b: Builder, model: Any, observation: Observation) -> dict[int, PagedAttention]:
    """In the order of the model's states: by layer, and within a layer as they were called."""
    modules = dict(model.named_modules())
    calls = sorted(observation.attention, key=lambda call: layer_of(call.module))
    if len(calls) != len(b.config.states):
        raise EngineError("Transformers' modules attend otherwise than when the model was planned")
    return {id(modules[call.module]): PagedAttention(b.ops, call) for call in calls}
