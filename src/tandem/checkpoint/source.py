"""`Checkpoint`: named tensors, however they are stored; and the documents that come with them.

A Hugging Face directory has JSON files beside its weights; a GGUF file has the same facts inside.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from tandem.architectures.load import config_from_dict, load_config
from tandem.checkpoint import checkpoint as safetensors
from tandem.checkpoint.gguf_checkpoint import GGUFCheckpoint
from tandem.checkpoint.gguf_config import config_json, generation_json
from tandem.checkpoint.gguf_model import is_gguf, open_gguf
from tandem.checkpoint.metadata.kt_packed import check_not_kt_packed
from tandem.checkpoint.tables.readers import ignored
from tandem.errors import CheckpointError, ConfigError
from tandem.formats.codes import Weight
from tandem.formats.quant_format import QuantFormat
from tandem.spec.json_keys import read_json
from tandem.spec.model_config import ModelConfig
from tandem.spec.shard import ALL
from tandem.spec.stored import StoredFormats

Lookup = Callable[[Tensor], Tensor]
"""Ids, int64 [T] → rows [T, K], in the stored dtype, or float32 where codes are stored."""


class Checkpoint(Protocol):
    """Tensors by Hugging Face name, mapped, not read. Views stay valid as long as they are referenced."""

    @property
    def path(self) -> Path: ...

    def path_of(self, module: str) -> Path:
        """Which directory or file has this module, or should have it."""
        ...

    def names(self) -> tuple[str, ...]: ...

    def __contains__(self, name: str) -> bool: ...

    def has_matrix(self, module: str) -> bool:
        """Whether `weight(module)` (or `expert_weight`) would find something, however it is stored."""
        ...

    def get(self, name: str, shape: tuple[int, ...] | None = None, *, whole: bool = False) -> Tensor:
        """A view of the file, or GGUF's blocks as float32. whole: of whole numbers, int32 or int64. CheckpointError
        when absent, not of `shape`, or of another type."""
        ...

    def lookup(self, name: str, shape: tuple[int, int]) -> Lookup:
        """The rows of a matrix [N, K] by their numbers, for embeddings: only rows asked for are read, every time."""
        ...

    def table(
        self, module: str, shape: tuple[int, int], where: str = "map", progress: Callable[[int], None] = ignored
    ) -> Lookup:
        """The rows of a table [N, K] that is too large to be a matrix (`tables/`). where: as `--tables`; progress: is
        told of bytes that are read into memory. What is returned raises CheckpointError where a row cannot be read."""
        ...

    def weight(self, module: str, shape: tuple[int, int], rows: slice = ALL, columns: slice = ALL) -> Weight:
        """Rows and columns of the matrix [N, K] of `module` (a name without `.weight`), however it is stored.

        Numbers are a view of the mapped file, codes are made from mapped parts by this call. CheckpointError when it is
        absent, of another shape, or stored in a way that cannot be read.
        """
        ...

    def expert_weight(
        self, module: str, expert: int, shape: tuple[int, int, int], rows: slice = ALL, columns: slice = ALL
    ) -> Weight:
        """One expert of a fused 3-D tensor of `shape` [E, N, K]; otherwise as `weight`."""
        ...

    def check(self, module: str, shape: tuple[int, ...]) -> None:
        """From headers alone: raises what `weight`, or for three sizes `expert_weight`, would raise of them."""
        ...

    def format(self, module: str) -> QuantFormat:
        """How `module` is stored, from headers alone."""
        ...

    def formats(self) -> StoredFormats:
        """Formats that experts and dense matrices are stored as, for the planner."""
        ...

    def expert_files(self) -> tuple[list[Path], bool]:
        """Files that hold routed experts, and whether those of bfloat16 can be views: none is at an odd place."""
        ...

    def nbytes(self, experts: bool | None = None) -> int:
        """Bytes of all tensors, of routed experts only (True), or of everything else (False)."""
        ...

    def identity(self) -> str:
        """Changes whenever a file does. The weights are not read."""
        ...

    def read_ahead(self, layer: int, experts: bool | None = None) -> None:
        """Asks for the bytes of every tensor of this layer, `experts` as in `nbytes`. Returns at once."""
        ...

    def forget(self, layer: int, experts: bool | None = None) -> None:
        """Lets go of the layer's pages, so that they stop counting as this process's memory. Views stay valid."""
        ...

    def release(self, experts: bool | None = None) -> None:
        """`forget` for all that was read; waits until it is done."""
        ...


def open_checkpoint(path: str | Path) -> Checkpoint:
    """A directory of `*.safetensors`, or a GGUF file (the first of several, or any of them).

    Opening reads only headers. Raises CheckpointError naming the file (and tensor) for whatever is missing, truncated
    or unknown, ConfigError for what KTransformers' converter packed.
    """
    path = Path(path)
    check_not_kt_packed(path)
    return GGUFCheckpoint(open_gguf(path)) if is_gguf(path) else safetensors.open_checkpoint(path)


def load_model_config(path: Path) -> ModelConfig:
    """The architecture, from config.json or from a GGUF file's metadata. Raises as `load_config`."""
    if not is_gguf(path):
        _check_not_an_adapter(path)
        return load_config(path)
    model = open_gguf(path)
    try:
        return config_from_dict(config_json(model), generation_json(model))
    except ConfigError as error:
        raise ConfigError(f"{path}, its metadata read as a config.json: {error}") from error


def _check_not_an_adapter(directory: Path) -> None:
    """Raises CheckpointError for a folder of LoRA matrices without a model."""
    file = directory / "adapter_config.json"
    if file.is_file() and not (directory / "config.json").exists():
        base = read_json(file).get("base_model_name_or_path")
        note = f" of {base}" if isinstance(base, str) and base else ""
        raise CheckpointError(
            f"{directory} is an adapter (LoRA){note}, and no model: adapters are not served. Merge it into its model "
            "with peft's merge_and_unload(), save that with save_pretrained(), and serve the result"
        )


def read_generation(path: Path) -> dict[str, Any]:
    """generation_config.json, or what a GGUF file says of it; {} without."""
    if is_gguf(path):
        return generation_json(open_gguf(path))
    file = path / "generation_config.json"
    return read_json(file) if file.is_file() else {}
