"""One layer's experts: read by the names and in the layout that Transformers' module has, computed by Tandem's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tandem.errors import CheckpointError
from tandem.experts import ExpertMatrices, RoutedExperts
from tandem.formats.codes import Weight, WeightCodes
from tandem.formats.cut import numbers, rows_of
from tandem.kernels.expert_counts import count_choices
from tandem.kernels.ops import ExpertCounts, Routing
from tandem.models.foreign.names import TensorRecipe, module_of
from tandem.models.foreign.stored import StoredTensors
from tandem.models.names import ungated

BOTH, UP, DOWN = "gate_up_proj", "up_proj", "down_proj"


class ForeignExperts:
    """Sum over a token's experts, in place of an experts module of Transformers."""

    def __init__(
        self, experts: RoutedExperts, tally: ExpertCounts | None, norm: Callable[[Tensor], Tensor] | None
    ) -> None:
        """norm: of each expert's result, before it is weighed."""
        self._experts, self._tally, self._norm = experts, tally, norm

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """x [T, hidden], ids and weights [T, k] -> [T, hidden]."""
        ids, weights = ids.to(torch.int32).contiguous(), weights.to(torch.float32).contiguous()
        if self._tally is not None:
            count_choices(self._tally, ids)
        if self._norm is None:
            return self._sum(x, ids, weights)
        each = [self._sum(x, ids, only) for only in torch.eye(ids.shape[1], device=x.device)]
        normed = torch.stack([self._norm(y).float() for y in each], dim=1)
        return (normed * weights[..., None]).sum(1).to(x.dtype)

    def _sum(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """weights: of each row, or of all. Both sides of a GPU take as many experts of a row as the model has."""
        slot_of = self._experts.slot_of
        routing = Routing(
            ids, weights.expand(ids.shape).contiguous(), None if slot_of is None else slot_of[ids]
        )
        return self._experts.wait(self._experts.submit(x.contiguous(), routing))


class ExpertReader:
    """The matrices of a layer's experts, by their numbers."""

    def __init__(self, model: Any, name: str, module: Any, stored: StoredTensors) -> None:
        """name: of the module."""
        self._model, self._module, self._checkpoint = model, module, stored.checkpoint
        self._first = BOTH if module.has_gate else UP
        self._names = {part: f"{name}.{part}" for part in (self._first, DOWN)}
        self._sources = {part: _need(stored, full) for part, full in self._names.items()}
        self._shapes = {part: tuple(stored.targets[full].shape) for part, full in self._names.items()}

    def __call__(self, expert: int) -> ExpertMatrices:
        """gate and up [width, hidden], down [hidden, width]."""
        both, down = self._matrices(self._first, expert), self._matrices(DOWN, expert)
        if self._first == UP:
            return ungated(both[0], down[0])
        if len(both) == 2:
            return both[0], both[1], down[0]
        return *self._cut(both[0]), down[0]

    def _matrices(self, part: str, expert: int) -> list[Weight]:
        """Gate and up apart, or in one matrix of output rows."""
        source = self._sources[part]
        if source.converter is None or self._is_upright(part, source):
            return [self._upright(self._fused(part, source.name, expert))]
        if _merges(source):
            return [self._one(part, names[expert], len(source.stored_names)) for names in source.stored_names.values()]
        return [self._upright(self._converted(part, source, expert))]

    def _is_upright(self, part: str, source: TensorRecipe) -> bool:
        """Whether a converter that only transposes what lies otherwise would leave it."""
        checks = all(getattr(each, "check_dims", False) for each in source.converter.operations)
        if not checks or source.name not in self._checkpoint:
            return False
        return tuple(self._checkpoint.get(source.name).shape) == self._shapes[part]

    def _one(self, part: str, name: str, of: int) -> Weight:
        """An expert's own matrix, stored under its own name."""
        _, rows, columns = self._shapes[part]
        return self._checkpoint.weight(module_of(name), (rows // of, columns))

    def _fused(self, part: str, name: str, expert: int) -> Weight:
        count, rows, columns = self._shapes[part]
        return self._checkpoint.expert_weight(module_of(name), expert, (count, rows, columns))

    def _converted(self, part: str, source: TensorRecipe, expert: int) -> Tensor:
        """Through Transformers' converter, with this expert alone."""
        count = self._shapes[part][0]
        tensors = {p: self._of_expert(names, expert, count) for p, names in source.stored_names.items()}
        by_name = source.converted(self._names[part], self._model, tensors)
        return by_name[self._names[part]][0]

    def _of_expert(self, names: list[str], expert: int, count: int) -> list[Tensor]:
        if len(names) == count:
            return [self._checkpoint.get(names[expert])]
        return [self._checkpoint.get(name)[expert : expert + 1] for name in names]

    def _upright(self, weight: Weight) -> Weight:
        """[output rows, input columns]."""
        if not self._module.is_transposed:
            return weight
        if isinstance(weight, WeightCodes):
            raise CheckpointError(
                f"{self._names[self._first]}: transposed experts that are stored as codes cannot be read"
            )
        return weight.T

    def _cut(self, both: Weight) -> tuple[Weight, Weight]:
        width = both.shape[0] // 2
        if self._module.is_concatenated:
            return rows_of(both, slice(0, width)), rows_of(both, slice(width, None))
        rows = numbers(both)
        return rows[0::2], rows[1::2]


def _merges(source: TensorRecipe) -> bool:
    """Experts that are stored one by one, and only stacked, gate before up."""
    kinds = [type(each).__name__ for each in source.converter.operations]
    return kinds in (["MergeModulelist"], ["MergeModulelist", "Concatenate"])


def _need(stored: StoredTensors, name: str) -> TensorRecipe:
    source = stored.source(name)
    if source is None:
        raise stored.missing(name)
    return source
