"""A repository before its weights are fetched: which files are needed, and what they say of the model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tandem.errors import HubError
from tandem.hub.files import INDEX, RemoteFile, gguf_variants, is_whole, shards, variant_of
from tandem.hub.remote import Hub, RemoteModel

HEADER_BYTES = (4 << 20, 64 << 20)  # of a GGUF file: most headers, and the longest that is read


def wants_gguf(model: RemoteModel) -> bool:
    """Whether a GGUF file is meant: one was named, or there is nothing else."""
    return bool(model.name.variant) or not shards((file.name for file in model.files), None)


def safetensors_files(model: RemoteModel, directory: Path) -> list[RemoteFile]:
    """The weights that the index in `directory` names. Raises HubError where the repository lacks one."""
    names = {file.name: file for file in model.files}
    index = directory / INDEX
    shard_names = shards(names, index.read_bytes() if INDEX in names else None)
    if absent := [name for name in shard_names if name not in names]:
        raise HubError(f"{model.name} lacks {absent[0]}, which its {INDEX} lists: the repository is broken")
    return [names[name] for name in shard_names]


def gguf_files(model: RemoteModel) -> list[RemoteFile]:
    """The files of the quantisation that was named, or of the only one. Raises HubError with the choices."""
    names = {file.name: file for file in model.files}
    return [names[name] for name in _gguf_names(model)]


def _gguf_names(model: RemoteModel) -> list[str]:
    name, sizes = model.name, {file.name: file.nbytes for file in model.files}
    models = gguf_variants(sizes)
    if not models:
        kinds = sorted({file.rsplit(".", 1)[-1] for file in sizes if sizes[file] > 1 << 20})
        raise HubError(
            f"{name.repo} holds neither *.safetensors nor *.gguf ({', '.join(kinds) or 'no large file'}): such weights "
            "are not read"
        )
    matches = variant_of(models, name.variant) if name.variant else list(models)
    if len(matches) != 1:
        choices = ", ".join(f"{stem} ({_gigabytes(models[stem], sizes)})" for stem in sorted(matches or models))
        problem = (
            "several"
            if not name.variant
            else f"no {name.variant}"
            if not matches
            else f"several {name.variant}"
        )
        raise HubError(f"{name.repo} has {problem}; say which: {name.repo}:Q4_K_M. It has {choices}")
    files = models[matches[0]]
    if not is_whole(files):
        raise HubError(f"{name} lacks some of its files; it has {', '.join(files)}: the repository is broken")
    return files


def _gigabytes(files: Sequence[str], sizes: dict[str, int]) -> str:
    return f"{sum(sizes[file] for file in files) / 1e9:.1f} GB"


def write_headers(
    hub: Hub, model: RemoteModel, files: Sequence[RemoteFile], folder: Path, nbytes: int
) -> Path:
    """Files of the right size and names that hold only their first `nbytes`, the rest being holes: enough for what a
    GGUF file says of its model. Returns the first."""
    for file in files:
        target = folder / file.name.rsplit("/", 1)[-1]
        target.write_bytes(hub.read(model, file, min(nbytes, file.nbytes)))
        with target.open("r+b") as stream:
            stream.truncate(file.nbytes)
    return folder / files[0].name.rsplit("/", 1)[-1]
