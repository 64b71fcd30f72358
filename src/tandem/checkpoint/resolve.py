"""MODEL, as a user types it → a directory, or a GGUF file."""

from __future__ import annotations

import os
from pathlib import Path

from tandem.checkpoint.gguf_model import SUFFIX, is_gguf, split_files
from tandem.errors import CheckpointError, HubError
from tandem.flags.env import DEMO, cache_dir
from tandem.hub.files import gguf_variants
from tandem.hub.names import HubName, hub_name
from tandem.hub.snapshot import cache_root, find_snapshot
from tandem.spec.small_files import unreadable


def demo_dir() -> Path:
    """Where the demo model lives once it is built."""
    return cache_dir() / "demo"


def resolve_model(name_or_path: str | Path) -> Path:
    """ "demo" → its cache directory (built or not); an existing directory or GGUF file; a name of the hub → where the
    cache has it. Nothing is downloaded.

    A directory that holds one GGUF model and no config.json is that model.

    Raises CheckpointError saying what to do instead.
    """
    if str(name_or_path) == DEMO:
        return demo_dir()
    path = Path(name_or_path).expanduser()
    if not _is_utf8(str(path)):
        raise CheckpointError(
            f"{str(path)!r} is no name in UTF-8, which processes tell each other: rename it, or link it"
        )
    try:
        return _resolved(str(name_or_path), path)
    except OSError as error:  # what stands above it may not be looked into
        raise unreadable(path, error) from error


def _is_utf8(text: str) -> bool:
    """Python has lone surrogates for bytes of a name that are not."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _resolved(text: str, path: Path) -> Path:
    if path.is_dir():
        os.scandir(path).close()  # a glob of what may not be listed would find nothing
        return path if (path / "config.json").exists() else _only_gguf(path)
    if path.is_file():
        if is_gguf(path):
            return path
        raise CheckpointError(
            f"{path} is not GGUF: give a GGUF file, or the directory that holds config.json and *.safetensors"
        )
    name = hub_name(text)
    if name is not None:
        return _cached(name)
    raise CheckpointError(_neither(text, path))


def _cached(name: HubName) -> Path:
    snapshot = find_snapshot(name)
    if snapshot is None:
        raise HubError(
            f"{name} is no directory here, and not in {cache_root()}: `kt model pull {name}` fetches it"
        )
    if snapshot.model is None:
        raise HubError(
            f"{name} is in {cache_root()}, but lacks {_listed(snapshot.missing)}: `kt model pull {name}`"
        )
    return snapshot.model if snapshot.model.is_file() else snapshot.directory


def _listed(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _neither(text: str, path: Path) -> str:
    """Both readings of what was typed."""
    if text.startswith(("/", ".", "~")):
        return f"{path} does not exist: give a model directory, a GGUF file, or 'demo'"
    first = text.split("/")[0]
    if "/" in text and Path(first).is_dir():
        return (
            f"{path} does not exist, though {first} is a directory here; if the hub's model is meant, give "
            f"https://huggingface.co/{text}"
        )
    return (
        f"{text} does not exist here, and is no name of the hub either: give a model directory, a GGUF file, ORG/NAME "
        "(as Qwen/Qwen3-30B-A3B), or 'demo'"
    )


def _only_gguf(directory: Path) -> Path:
    """The one GGUF model in `directory`; `directory` itself when it has none."""
    models = gguf_variants(file.name for file in directory.glob(f"*{SUFFIX}"))
    firsts = [directory / files[0] for _, files in sorted(models.items())]
    if len(firsts) > 1:
        names = ", ".join(file.name for file in firsts[:4])
        raise CheckpointError(f"{directory} holds several models: give one of the files, for example {names}")
    return next(split_files(firsts[0])) if firsts else directory
