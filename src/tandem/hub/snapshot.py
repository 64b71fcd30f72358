"""Files of a model in the cache: `models--ORG--NAME/{blobs,refs,snapshots}`, as huggingface_hub keeps them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from tandem.errors import HubError
from tandem.hub.files import CONFIG, INDEX, gguf_variants, is_whole, shards, variant_of
from tandem.hub.names import HubName

_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One revision's files. model: the directory, or the (first) GGUF file; None: something is missing."""

    directory: Path
    model: Path | None
    missing: tuple[str, ...] = ()


def cache_root() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def is_offline() -> bool:
    """Whether HF_HUB_OFFLINE forbids to ask."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def repo_dir(repo: str) -> Path:
    return cache_root() / ("models--" + repo.replace("/", "--"))


def find_snapshot(name: HubName) -> Snapshot | None:
    """Without asking anybody; None where nothing of this revision is here. Raises HubError where a quantisation has to
    be named."""
    repo = repo_dir(name.repo)
    reference = repo / "refs" / name.revision
    commit = name.revision if _COMMIT.fullmatch(name.revision) else ""
    if not commit and reference.is_file():
        commit = reference.read_text().strip()
    directory = repo / "snapshots" / commit
    if not commit or not directory.is_dir():
        return None
    return read_snapshot(directory, name)


def read_snapshot(directory: Path, name: HubName) -> Snapshot:
    names = [path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()]
    if name.variant:
        return _gguf(directory, names, name)
    if CONFIG not in names:
        return _only_gguf(directory, names, name)
    index = (directory / INDEX).read_bytes() if INDEX in names else None
    shard_names = shards(names, index)
    missing = tuple(shard for shard in shard_names if shard not in names) if shard_names else ("*.safetensors",)
    return Snapshot(directory, None if missing else directory, missing)


def _gguf(directory: Path, names: list[str], name: HubName) -> Snapshot:
    models = gguf_variants(names)
    matches = variant_of(models, name.variant)
    if len(matches) > 1:
        raise HubError(f"{name} may be any of {', '.join(matches)}; give more of the file's name")
    files = models[matches[0]] if matches else []
    model = directory / files[0] if is_whole(files) else None
    return Snapshot(directory, model, () if model else (f"*{name.variant}*.gguf",))


def _only_gguf(directory: Path, names: list[str], name: HubName) -> Snapshot:
    """A repository of GGUF files alone of which one model was fetched."""
    whole = {model: files for model, files in gguf_variants(names).items() if is_whole(files)}
    if len(whole) > 1:
        raise HubError(f"{name.repo} is here as {', '.join(whole)}; say which: {name.repo}:Q4_K_M")
    model = directory / next(iter(whole.values()))[0] if whole else None
    return Snapshot(directory, model, () if model else (CONFIG,))
