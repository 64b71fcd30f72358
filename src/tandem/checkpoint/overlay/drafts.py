"""`DraftOverlay`: a draft layer out of one directory, everything else out of another
(`--speculative-draft-model-path`).

The directory has a `config.json` of the model's family, which says how the layer is made. Its tensors have the names
that they have in a checkpoint with a draft layer. What else it has is never read: it may be a whole other checkpoint.
The demo model's own one is part of this package.
"""

from __future__ import annotations

from dataclasses import astuple, replace
from importlib.resources import files
from pathlib import Path

from tandem.architectures import family_of
from tandem.architectures.names import BLOCK_NAMES
from tandem.checkpoint.overlay.two import TwoCheckpoints
from tandem.checkpoint.resolve import demo_dir, resolve_model
from tandem.checkpoint.source import Checkpoint, load_model_config, open_checkpoint
from tandem.errors import ConfigError
from tandem.flags.engine_config import EngineConfig
from tandem.planner.choices.speculation import DRAFT_ALGORITHMS
from tandem.spec.model_config import ModelConfig
from tandem.spec.stored import StoredFormats

FLAG = "--speculative-draft-model-path"
FIELDS = ("speculative_draft_model_path",)
DEMO_DRAFT = Path(str(files("tandem"))) / "data" / "demo" / "draft"


def draft_directory(config: EngineConfig) -> Path | None:
    """Where the draft layer is, if it is not the checkpoint's own, and one is asked for. Raises CheckpointError."""
    if config.speculative_algorithm not in DRAFT_ALGORITHMS:
        return None
    if config.speculative_draft_model_path is not None:
        return resolve_model(config.speculative_draft_model_path)
    demo = Path(config.model).expanduser() in (Path("demo"), demo_dir())
    return DEMO_DRAFT if demo and DEMO_DRAFT.is_dir() else None


def with_draft_config(model: ModelConfig, config: EngineConfig) -> ModelConfig:
    """With the draft layer that `config` names. Raises ConfigError where it is another model's, or there is none."""
    path = draft_directory(config)
    if path is None:
        return model
    theirs = load_model_config(path)
    for size_name, ours, other in (
        ("hidden size", model.hidden, theirs.hidden),
        ("vocabulary", model.vocab, theirs.vocab),
        ("number of layers", len(model.layers), len(theirs.layers)),
        ("family", model.model_type, theirs.model_type),
    ):
        if ours != other:
            raise ConfigError(
                f"{FLAG} {path} is of another model: its {size_name} is {other}, not {ours}", fields=FIELDS
            )
    if theirs.drafts is None:
        raise ConfigError(
            f"{FLAG} {path}: its config.json has no draft layer; num_nextn_predict_layers must be 1",
            fields=FIELDS,
        )
    return replace(model, drafts=theirs.drafts)


def with_draft_layer(checkpoint: Checkpoint, config: EngineConfig) -> Checkpoint:
    """`checkpoint` with the draft layer of the directory that `config` names instead of its own."""
    path = draft_directory(config)
    if path is None:
        return checkpoint
    model = load_model_config(path)
    number = len(model.layers)
    return DraftOverlay(checkpoint, open_checkpoint(path), _beginnings(model), number)


def _beginnings(model: ModelConfig) -> tuple[str, ...]:
    """Beginnings of the names of a draft's tensors."""
    block, number = None if model.drafts is None else model.drafts.block, len(model.layers)
    if block is not None:
        return tuple(BLOCK_NAMES.at(number) for number in range(block.layers))
    return tuple(filter(None, astuple(family_of(model.model_type).drafts.behind(number))))


class DraftOverlay(TwoCheckpoints):
    """A model's checkpoint with the draft layer of another. Formats, for the planner, are the model's."""

    def __init__(self, model: Checkpoint, drafts: Checkpoint, beginnings: tuple[str, ...], number: int) -> None:
        """beginnings: of the layer's names. number: the layer's, as `read_ahead` counts them."""
        super().__init__(model, drafts)
        self._beginnings, self._number = beginnings, number
        self._nothing_else = all(map(self._is_other, drafts.names()))

    def _is_other(self, name: str) -> bool:
        return name.startswith(self._beginnings)

    def formats(self) -> StoredFormats:
        return self._first.formats()

    def expert_files(self) -> tuple[list[Path], bool]:
        ours, theirs = self._first.expert_files(), self._other.expert_files()
        return [*ours[0], *theirs[0]], ours[1] and theirs[1]

    def nbytes(self, experts: bool | None = None) -> int:
        return self._first.nbytes(experts) + (self._other.nbytes(experts) if self._nothing_else else 0)

    def read_ahead(self, layer: int, experts: bool | None = None) -> None:
        self._with(layer).read_ahead(layer, experts)

    def forget(self, layer: int, experts: bool | None = None) -> None:
        self._with(layer).forget(layer, experts)

    def release(self, experts: bool | None = None) -> None:
        self._first.release(experts)
        self._other.release(experts)

    def _with(self, layer: int) -> Checkpoint:
        return self._other if layer >= self._number else self._first
