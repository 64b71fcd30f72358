"""Which tensors of a checkpoint belong to one matrix: `module.weight` and the scales, zero points, … beside it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from tandem.errors import CheckpointError

# What follows a module's name → what the tensor is: its whole last part or, since fused 3-D tensors have no `.weight`,
# the end of it.
SUFFIXES = {
    ".weight": "weight", ".weight_packed": "packed", ".qweight": "qweight",
    ".weight_scale_inv": "scale", ".weight_scale": "scale", ".scales": "scale", ".scale": "scale",
    ".weight_scale_2": "multiplier", ".weight_global_scale": "divisor",
    ".weight_zero_point": "zeros", ".qzeros": "zeros", ".weight_g_idx": "order", ".g_idx": "order",
    ".weight_shape": "shape",
    "_blocks": "blocks", "_scales": "scale", "_scale_inv": "scale", "_scale": "scale", "_scale_2": "multiplier",
    "_packed": "packed", "_global_scale": "divisor", "_zero_point": "zeros",
}  # fmt: skip
_LONGEST_FIRST = sorted((suffix for suffix in SUFFIXES if suffix[0] == "_"), key=len, reverse=True)
CODES = ("weight", "packed", "qweight", "blocks")
"""Roles that hold the numbers themselves; a module has one of them."""


class TensorPart(NamedTuple):
    """A tensor's header. `name` and `file` are those of the file, for messages."""

    name: str
    file: Path
    dtype: str  # as safetensors spells it
    shape: tuple[int, ...]

    def wrong(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.file}: tensor {self.name} {what}")


Parts = Mapping[str, TensorPart]  # by role


def squeezed(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Without sizes of 1, which files have more or fewer of: [1, K] and [K], [C, 1, K] and [C, K] are alike."""
    return tuple(size for size in shape if size != 1)


def is_expert(name: str) -> bool:
    """Whether `name` is of a routed expert; shared ones belong to the dense layers."""
    return ".experts." in name


def is_table(name: str) -> bool:
    """Whether `name` is of a table that is read by row (`tables/`): no matrix, never read as a whole with its layer."""
    return ".ngram_embedding." in name


def part_of(name: str) -> tuple[str, str]:
    """A tensor's name → (module, role). A name without a known ending is a fused tensor: ("name", "weight")."""
    module, dot, last = name.rpartition(".")
    if dot + last in SUFFIXES:  # nearly all, and there may be a hundred thousand
        return module, SUFFIXES[dot + last]
    for suffix in _LONGEST_FIRST:
        if name.endswith(suffix):
            return name.removesuffix(suffix), SUFFIXES[suffix]
    return name, "weight"


def by_module(tensors: Iterable[tuple[str, TensorPart]]) -> dict[str, dict[str, TensorPart]]:
    """Headers by Hugging Face name → {module: {role: header}}. CheckpointError when two tensors have one role."""
    modules: dict[str, dict[str, TensorPart]] = {}
    for name, part in tensors:
        module, role = part_of(name)
        roles = modules.setdefault(module, {})
        if role in roles:
            raise part.wrong(f"and {roles[role].name} are both the {role} of {module}: remove one")
        roles[role] = part
    return modules


def codes_part(parts: Parts) -> TensorPart | None:
    """The part that holds the numbers."""
    for role in CODES:
        if role in parts:
            return parts[role]
    return None


def one_expert(parts: Parts, experts: int | None = None) -> dict[str, TensorPart]:
    """The parts of one expert of a fused tensor: without the leading dimension, which must be `experts` in all."""
    cut = {}
    for role, part in parts.items():
        if not part.shape:
            raise part.wrong("is one number, but belongs to experts in one tensor: it must have one for each")
        if experts is not None and part.shape[0] != experts:
            raise part.wrong(f"has shape {part.shape}, but config.json implies {experts} experts")
        cut[role] = part._replace(shape=part.shape[1:])
    return cut
