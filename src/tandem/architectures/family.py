"""Interface of a family: data over shared mechanisms, in one file each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from tandem.architectures.names import PLAIN_DRAFT_NAMES, DraftNames, Names, Renames
from tandem.spec.json_keys import JsonKeys
from tandem.spec.model_config import ModelConfig

SIGMOID = 2  # of GGUF's expert_gating_func; 1 is softmax


class GgufKeys(Protocol):
    """`{architecture}.{key}` of a GGUF file's metadata, and what its tensors say."""

    def need(self, key: str) -> int: ...
    def size(self, key: str) -> int:
        """At least 1: something is divided by it."""
        ...

    def optional(self, key: str, default: int) -> int: ...
    def number(self, key: str, default: float) -> float: ...
    def flag(self, key: str, default: bool) -> bool: ...
    def flags(self, key: str) -> list[bool]:
        """Bools of an array that has bools, or 0 and 1; [] when absent."""
        ...

    def numbers(self, key: str) -> list[float]:
        """Numbers of an array, or a single number; [] when absent."""
        ...

    def wholes(self, key: str) -> list[int]:
        """Whole numbers from 0 of an array, or one alone, exactly; [] when absent."""
        ...

    def layers(self, key: str, count: int) -> list[int]:
        """Whole numbers, one for each of `count` layers; a number alone is that of all."""
        ...

    def vector(self, name: str) -> list[float]:
        """Numbers of a tensor of float32; [] where there is none."""
        ...

    def has(self, key: str) -> bool: ...
    def has_tensor(self, name: str) -> bool: ...
    def rows(self, ending: str) -> int:
        """Output rows of the first matrix whose name ends so."""
        ...

    def only(self, key: str, value: int, means: str) -> None:
        """Raises an error where the file says something else."""
        ...

    def refuse(self, key: str, why: str) -> Exception: ...
    def rope(self) -> dict[str, Any]:
        """`rope_parameters` of Transformers 5."""
        ...

    @property
    def depth(self) -> int:
        """Layers of the model itself."""
        ...

    @property
    def drafts(self) -> int:
        """Draft layers whose tensors are there."""
        ...

    @property
    def has_bias(self) -> bool: ...
    @property
    def expert_width(self) -> int: ...


@dataclass(frozen=True, slots=True)
class DerivedTensor:
    """A tensor as Hugging Face has it, made of one that a file has otherwise.

    of: that one, as `Gguf.stems` calls it. rows, columns: which of its rows and columns, in this order; (): all.
    numbers: what becomes of each number x. Columns and numbers are not taken from codes, but from what they stand for.
    """

    of: str
    rows: tuple[int, ...] = ()
    columns: tuple[int, ...] = ()
    numbers: Literal["x", "x - 1", "log(x)", "log(-x)"] = "x"

    @property
    def keeps_codes(self) -> bool:
        return not self.columns and self.numbers == "x"


def no_parts(_: GgufKeys) -> dict[str, DerivedTensor]:
    return {}


def no_wholes(_: GgufKeys) -> dict[str, list[int]]:
    return {}


@dataclass(frozen=True, slots=True)
class Gguf:
    """A family in GGUF files. config: what `config.json` would say beside sizes that all files name alike;
    stems: tensor names without `blk.{layer}.` → Hugging Face's below `model.layers.{L}.`; parts: names below
    `model.layers.{L}.`, or whole names of what lies outside, that are not as the file has them. pairs: rows of q and k
    are those of rotary halves in turns. wholes: tensors of whole numbers by their whole names, which a file has as
    arrays of its metadata."""

    architecture: str
    config: Callable[[GgufKeys], dict[str, Any]]
    stems: Mapping[str, str]
    parts: Callable[[GgufKeys], Mapping[str, DerivedTensor]] = no_parts
    pairs: bool = False
    wholes: Callable[[GgufKeys], Mapping[str, list[int]]] = no_wholes


@dataclass(frozen=True, slots=True)
class Family:
    """model_types: as `config.json` names them. names: tried in turn, the first whose tensors are there is used.
    renames: done before, whatever a configuration says."""

    model_types: tuple[str, ...]
    config: Callable[[JsonKeys, JsonKeys], ModelConfig]
    names: tuple[Names, ...] = (Names(),)
    gguf: Gguf | None = None
    drafts: DraftNames = PLAIN_DRAFT_NAMES
    renames: Renames | None = None
