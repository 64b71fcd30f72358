"""Which tensors of a checkpoint make which tensor of a module, as Transformers' own conversions say."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from tandem.checkpoint.parts import CODES, part_of

INSIDE = "model.language_model."


@dataclass(slots=True)
class TensorRecipe:
    """converter: what makes one tensor of several, or others of one; None: it is only called otherwise. found: names in
    the checkpoint by the converter's patterns, in the order of their numbers."""

    converter: Any = None
    stored_names: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))

    @property
    def name(self) -> str:
        """Where there is one."""
        return next(iter(self.stored_names.values()))[0]

    def converted(self, target: str, model: Any, tensors: dict[str, list[Tensor]]) -> dict[str, Tensor]:
        """The module tensors that the converter makes of `tensors`, by name."""
        work = copy.deepcopy(self.converter)
        for pattern, each in tensors.items():
            for name, tensor in zip(self.stored_names[pattern], each, strict=False):
                work.add_tensor(target, name, pattern, lambda tensor=tensor: tensor)
        by_name = work.convert(target, model=model, config=model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in by_name.items()}


def sources(model: Any, names: Iterable[str]) -> tuple[dict[str, TensorRecipe], list[str]]:
    """By the module tensor that they make, the first where a converter makes several; and names that make none."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    targets, prefix = model.state_dict(), model.base_model_prefix
    mapping = get_model_conversion_mapping(model)
    renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
    converters = [each for each in mapping if isinstance(each, WeightConverter)]
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    by_target: dict[str, TensorRecipe] = {}
    unused = []
    for name in sorted(matrix_names(names), key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, targets)
        if target not in targets:
            target, pattern = _spelt_otherwise(name, target, pattern, targets)
        if target not in targets:
            unused.append(name)
            continue
        source = by_target.setdefault(target, TensorRecipe(by_pattern.get(pattern) if pattern else None))
        source.stored_names[pattern or name].append(name)
    return by_target, unused


def _spelt_otherwise(
    name: str, target: str, pattern: str | None, targets: Mapping[str, Tensor]
) -> tuple[str, str | None]:
    """The module tensor of a name that Transformers' conversions do not lead to one. It is the same name, or that of a
    text model inside a multimodal one; a checkpoint has such names without the part before."""
    if name in targets:
        return name, None
    inside = target.replace("model.", INSIDE, 1) if target.startswith("model.") else target
    return (inside, pattern) if inside in targets else (target, pattern)


def matrix_names(names: Iterable[str]) -> set[str]:
    """One name for each matrix, as if its numbers were stored: scales and the like beside it are left out. What is
    called a scale, without codes or numbers beside it, is a tensor as any other."""
    roles: dict[str, dict[str, str]] = defaultdict(dict)
    for name in names:
        module, role = part_of(name)
        roles[module][role] = name
    coded = {module for module, each in roles.items() if not each.keys().isdisjoint(CODES)}
    matrices = {_as_numbers(module, roles[module]) for module in coded}
    return matrices | {name for module in roles.keys() - coded for name in roles[module].values()}


def _as_numbers(module: str, roles: dict[str, str]) -> str:
    if roles.get("weight") == module or "blocks" in roles:
        return module
    return f"{module}.weight"


def module_of(name: str) -> str:
    """As `Checkpoint.weight` takes it."""
    return name.removesuffix(".weight")
