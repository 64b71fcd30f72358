"""`ExpertsElsewhere`: routed experts out of one checkpoint, everything else out of another (`--kt-weight-path`).

The two must be the same model; they may be stored differently: experts converted to int4 or in a GGUF file, beside the
dense layers of the original directory.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from tandem.checkpoint.glance.kt_packed import FLAG, check_not_kt_packed
from tandem.checkpoint.parts import is_expert
from tandem.checkpoint.resolve import resolve_model
from tandem.checkpoint.source import Checkpoint, Lookup, load_model_config, open_checkpoint
from tandem.config import ModelConfig, StoredFormats
from tandem.errors import CheckpointError, ConfigError
from tandem.formats.codes import Weight
from tandem.formats.quant_format import QuantFormat


def with_experts(checkpoint: Checkpoint, wanted: str | None, model: ModelConfig) -> Checkpoint:
    """`checkpoint` with the routed experts of the directory or GGUF file `wanted`; None, or the same place: as it is.

    Raises CheckpointError or ConfigError naming the path when it cannot be read, has no experts, or is another model.
    """
    if wanted is None:
        return checkpoint
    path = resolve_model(wanted)
    if path.resolve() == checkpoint.path.resolve():
        return checkpoint
    check_not_kt_packed(path, checkpoint.path)
    experts = open_checkpoint(path)
    if not any(map(is_expert, experts.names())):
        raise CheckpointError(
            f"{FLAG} {path} holds no routed experts (no name has .experts. in it): give the directory of a model "
            "that has some, as it was downloaded or as `kt convert` wrote it, or a GGUF file"
        )
    if path.is_file() or (path / "config.json").is_file():
        _check_same(model, path)
    return ExpertsElsewhere(checkpoint, experts)


def _check_same(model: ModelConfig, path: Path) -> None:
    try:
        ours, theirs = _sizes(model), _sizes(load_model_config(path))
    except ConfigError as error:
        raise ConfigError(f"{FLAG} {path}: {error}") from error
    for what, size in ours.items():
        if size != theirs[what]:
            raise ConfigError(
                f"{FLAG} {path} is another model: its {what} is {theirs[what]}, but --model has {size}"
            )


def _sizes(model: ModelConfig) -> dict[str, object]:
    layers = model.moe_layers
    return {
        "hidden size": model.hidden,
        "number of layers": len(model.layers),
        "number of MoE layers": len(layers),
        "first MoE layer": layers[0] if layers else None,
        "number of experts": model.moe.router.num_experts,
        "expert width": model.moe.experts.width,
    }


class ExpertsElsewhere:
    """A `Checkpoint` of two. `path` is the dense one's."""

    def __init__(self, dense: Checkpoint, experts: Checkpoint) -> None:
        self._dense, self._experts = dense, experts

    @property
    def path(self) -> Path:
        return self._dense.path

    def path_of(self, module: str) -> Path:
        return self._of(module).path

    def names(self) -> tuple[str, ...]:
        dense = (name for name in self._dense.names() if not is_expert(name))
        return (*dense, *filter(is_expert, self._experts.names()))

    def __contains__(self, name: str) -> bool:
        return name in self._of(name)

    def has_matrix(self, module: str) -> bool:
        return self._of(module).has_matrix(module)

    def get(self, name: str, shape: tuple[int, ...] | None = None, *, whole: bool = False) -> Tensor:
        return self._of(name).get(name, shape, whole=whole)

    def lookup(self, name: str, shape: tuple[int, int]) -> Lookup:
        return self._of(name).lookup(name, shape)

    def weight(self, module: str, shape: tuple[int, int]) -> Weight:
        return self._of(module).weight(module, shape)

    def expert_weight(
        self, module: str, expert: int, shape: tuple[int, int, int], rows: slice = slice(None)
    ) -> Weight:
        return self._of(module).expert_weight(module, expert, shape, rows)

    def check(self, module: str, shape: tuple[int, ...]) -> None:
        self._of(module).check(module, shape)

    def format(self, module: str) -> QuantFormat:
        return self._of(module).format(module)

    def formats(self) -> StoredFormats:
        dense = self._dense.formats()
        return replace(dense, experts=self._experts.formats().experts)

    def expert_files(self) -> tuple[list[Path], bool]:
        return self._experts.expert_files()

    def nbytes(self, experts: bool | None = None) -> int:
        own = 0 if experts is True else self._dense.nbytes(experts=False)
        return own + (0 if experts is False else self._experts.nbytes(experts=True))

    def identity(self) -> str:
        """Experts in another place are other files."""
        both = (self._dense.identity(), self._experts.identity(), str(self._experts.path.resolve()))
        return hashlib.sha256(repr(both).encode()).hexdigest()

    def read_ahead(self, layer: int, experts: bool | None = None) -> None:
        if experts is not True:
            self._dense.read_ahead(layer, experts=False)
        if experts is not False:
            self._experts.read_ahead(layer, experts=True)

    def forget(self, layer: int, experts: bool | None = None) -> None:
        if experts is not True:
            self._dense.forget(layer)
        if experts is not False:
            self._experts.forget(layer)

    def release(self, experts: bool | None = None) -> None:
        if experts is not True:
            self._dense.release()
        if experts is not False:
            self._experts.release()

    def _of(self, name: str) -> Checkpoint:
        return self._experts if is_expert(name) else self._dense
