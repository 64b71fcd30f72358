"""`SafetensorsCheckpoint`: a directory of safetensors files as named tensors and matrices, mapped, not read.

Knows no model: `models/` says which names exist and what they mean. Names are Hugging Face's, however they are spelt in
the files (`key_names.py`). A name says two things: which matrix the tensor is part of (`parts.py`), and its layer, for
reading a layer's pages ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from tandem.checkpoint.layouts import detect
from tandem.checkpoint.mapped.cut import read_part
from tandem.checkpoint.mapped.tensors import MappedTensors
from tandem.checkpoint.parts import Parts, TensorPart, by_module, codes_part, one_expert
from tandem.checkpoint.quant_hints import quant_hints
from tandem.checkpoint.stored_matrix import StoredMatrix
from tandem.checkpoint.survey import stored_formats, survey
from tandem.checkpoint.tables.readers import ignored, lookup_of
from tandem.checkpoint.tables.stored_rows import stored_rows, stored_tables
from tandem.errors import CheckpointError
from tandem.formats.codes import Weight
from tandem.formats.quant_format import QuantFormat
from tandem.spec.shard import ALL
from tandem.spec.stored import StoredFormats


def open_checkpoint(path: str | Path) -> SafetensorsCheckpoint:
    """A model directory: one or several `*.safetensors`, with or without an index.

    Opening reads only headers. Raises CheckpointError, which names the file (and tensor). Reasons: a missing directory,
    no weights, a missing or truncated shard, a tensor in two shards, an index that does not match, scales that are
    missing or do not fit.
    """
    return SafetensorsCheckpoint(Path(path))


class SafetensorsCheckpoint(MappedTensors):
    """Tensors by name, and what they are together: matrices [N, K] of numbers, or of codes and scales."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._modules = by_module(self._parts.items())
        self._hints = quant_hints(path)
        self._survey = survey(self._modules, self._hints)

    def has_matrix(self, module: str) -> bool:
        """Whether `weight(module)` (or `expert_weight`) would find something, however it is stored."""
        return codes_part(self._modules.get(module, {})) is not None

    def table(
        self, module: str, shape: tuple[int, int], where: str = "map", progress: Callable[[int], None] = ignored
    ) -> Callable[[Tensor], Tensor]:
        """Rows of a table by their numbers, read from where `--tables` says."""
        return lookup_of(stored_rows(self, module, shape), where, progress)

    def weight(self, module: str, shape: tuple[int, int], rows: slice = ALL, columns: slice = ALL) -> Weight:
        """Rows and columns of the matrix [N, K] of `module` (a name without `.weight`), however it is stored.

        Numbers are a view of the mapped file, codes are made from mapped parts by this call. CheckpointError when it is
        absent, of another shape, or stored in a way that cannot be read.
        """
        parts = self._matrix_parts(module)
        stored = detect(parts, self._hints, shape)
        return read_part(stored, parts, lambda role: self.mapped(parts[role]), rows, columns)

    def expert_weight(
        self, module: str, expert: int, shape: tuple[int, int, int], rows: slice = ALL, columns: slice = ALL
    ) -> Weight:
        """One expert of a fused 3-D tensor of `shape` [E, N, K]; otherwise as `weight`."""
        count, n, k = shape
        parts = self._matrix_parts(module)
        one = one_expert(parts, count)
        stored = detect(one, self._hints, (n, k))
        return read_part(stored, one, lambda role: self.mapped(parts[role])[expert], rows, columns)

    def check(self, module: str, shape: tuple[int, ...]) -> None:
        """Reads no weights."""
        parts = self._matrix_parts(module)
        *experts, n, k = shape
        detect(one_expert(parts, experts[0]) if experts else parts, self._hints, (n, k))

    def format(self, module: str) -> QuantFormat:
        """How `module` is stored, from headers alone."""
        return self._surveyed(module).format

    def formats(self) -> StoredFormats:
        """Formats that experts and dense matrices are stored as, for the planner."""
        matrices = stored_formats((module, stored.format, n) for module, (stored, n) in self._survey.items())
        return replace(matrices, tables=stored_tables(self))

    def modules(self) -> Mapping[str, Parts]:
        """Every module (a name without `.weight`): the headers of its tensors by their role."""
        return self._modules

    def shape(self, module: str) -> tuple[int, int]:
        """[N, K] of the matrix of `module`, as its tensors say."""
        parts = self._matrix_parts(module)
        if "shape" in parts:  # packed words alone do not say how many bits a code has
            n, k = self.mapped(parts["shape"]).tolist()
            return n, k
        return self._surveyed(module).shape

    def _surveyed(self, module: str) -> StoredMatrix:
        if module not in self._survey:
            raise CheckpointError(f"{self.path} has no matrix {module}.weight")
        return self._survey[module][0]

    def _matrix_parts(self, module: str) -> dict[str, TensorPart]:
        if not self.has_matrix(module):
            raise CheckpointError(f"{self.path} has no tensor {module}.weight")
        return self._modules[module]
