"""Models in the cache: listed, and removed from the disk."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tandem.errors import HubError
from tandem.hub.files import gguf_variants, is_whole, variant_of
from tandem.hub.names import HubName
from tandem.hub.snapshot import cache_root, find_snapshot, repo_dir

_PREFIX = "models--"


@dataclass(frozen=True, slots=True)
class StoredModel:
    """name: as `kt serve` takes it. nbytes: on the disk. whole: nothing is missing."""

    name: str
    nbytes: int
    whole: bool


def kept_models() -> Iterator[StoredModel]:
    """Every model of the cache; each quantisation of a repository of GGUF files by itself."""
    for folder in sorted(cache_root().glob(f"{_PREFIX}*")):
        repo = folder.name.removeprefix(_PREFIX).replace("--", "/", 1)
        quantised = list(_quantised(repo, folder))
        rest = disk_bytes(folder) - sum(entry.nbytes for entry in quantised)
        if not quantised:
            snapshot = find_snapshot(HubName(repo))
            yield StoredModel(repo, rest, snapshot is not None and snapshot.model is not None)
        yield from quantised


def _quantised(repo: str, folder: Path) -> Iterator[StoredModel]:
    for snapshot in sorted((folder / "snapshots").glob("*")):
        names = [path.relative_to(snapshot).as_posix() for path in snapshot.rglob("*.gguf")]
        for model, files in gguf_variants(names).items():
            nbytes = sum((snapshot / file).stat().st_size for file in files)
            yield StoredModel(f"{repo}:{model.rsplit('/', 1)[-1]}", nbytes, is_whole(files))


def disk_bytes(folder: Path) -> int:
    """Bytes of all files in `folder`, each once: a snapshot's files are links."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def remove(name: HubName) -> int:
    """The bytes that are free again. Raises HubError where there is nothing of that name."""
    folder = repo_dir(name.repo)
    if not folder.is_dir():
        raise HubError(f"{name.repo} is not in {cache_root()}; `kt model list` shows what is")
    before = disk_bytes(folder)
    if not name.variant:
        shutil.rmtree(folder)
        return before
    links = [link for snapshot in (folder / "snapshots").glob("*") for link in _links(snapshot, name.variant)]
    if not links:
        raise HubError(f"{name} is not in {cache_root()}; `kt model list` shows what is")
    for blob in {link.resolve() for link in links}:
        blob.unlink(missing_ok=True)
    for link in links:
        link.unlink(missing_ok=True)
    return before - disk_bytes(folder)


def _links(snapshot: Path, variant: str) -> list[Path]:
    names = [path.relative_to(snapshot).as_posix() for path in snapshot.rglob("*.gguf")]
    models = gguf_variants(names)
    return [snapshot / file for model in variant_of(models, variant) for file in models[model]]
