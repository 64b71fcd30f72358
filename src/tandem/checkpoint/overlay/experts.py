"""`ExpertOverlay`: routed experts out of one checkpoint, everything else out of another (`--kt-weight-path`).

The two must be the same model; they may be stored differently: experts converted to int4 or in a GGUF file, beside the
dense layers of the original directory.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tandem.checkpoint.metadata.kt_packed import FLAG, check_not_kt_packed
from tandem.checkpoint.overlay.two import TwoCheckpoints
from tandem.checkpoint.parts import is_expert
from tandem.checkpoint.resolve import resolve_model
from tandem.checkpoint.source import Checkpoint, load_model_config, open_checkpoint
from tandem.errors import CheckpointError, ConfigError
from tandem.spec.model_config import ModelConfig
from tandem.spec.stored import StoredFormats


def with_experts(checkpoint: Checkpoint, source: str | None, model: ModelConfig) -> Checkpoint:
    """`checkpoint` with the routed experts of the directory or GGUF file `source`; None, or the same place: as it is.

    Raises CheckpointError or ConfigError naming the path when it cannot be read, has no experts, or is another model.
    """
    if source is None:
        return checkpoint
    path = resolve_model(source)
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
    return ExpertOverlay(checkpoint, experts)


def _check_same(model: ModelConfig, path: Path) -> None:
    try:
        ours, theirs = _sizes(model), _sizes(load_model_config(path))
    except ConfigError as error:
        raise ConfigError(f"{FLAG} {path}: {error}") from error
    for size_name, size in ours.items():
        if size != theirs[size_name]:
            raise ConfigError(
                f"{FLAG} {path} is another model: its {size_name} is {theirs[size_name]}, but --model has {size}"
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
        "channels that experts read": model.expert_channels,
    }


class ExpertOverlay(TwoCheckpoints):
    """`path` is the dense one's."""

    def _is_other(self, name: str) -> bool:
        return is_expert(name)

    def formats(self) -> StoredFormats:
        dense = self._first.formats()
        return replace(dense, experts=self._other.formats().experts)

    def expert_files(self) -> tuple[list[Path], bool]:
        return self._other.expert_files()

    def nbytes(self, experts: bool | None = None) -> int:
        own = 0 if experts is True else self._first.nbytes(experts=False)
        return own + (0 if experts is False else self._other.nbytes(experts=True))

    def read_ahead(self, layer: int, experts: bool | None = None) -> None:
        if experts is not True:
            self._first.read_ahead(layer, experts=False)
        if experts is not False:
            self._other.read_ahead(layer, experts=True)

    def forget(self, layer: int, experts: bool | None = None) -> None:
        if experts is not True:
            self._first.forget(layer)
        if experts is not False:
            self._other.forget(layer)

    def release(self, experts: bool | None = None) -> None:
        if experts is not True:
            self._first.release()
        if experts is not False:
            self._other.release()
