"""Which files of a repository a model needs: configuration, tokenizer, and one set of weights."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from tandem.errors import HubError

INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
GGUF = ".gguf"
SMALL_BYTES = 64 << 20
_SMALL_ENDINGS = (".json", ".jinja", ".txt", ".model", ".tiktoken")
_OTHER_WEIGHTS = re.compile(r"(pytorch_model|tf_model|flax_model|consolidated|optimizer).*\.json")
_PART = re.compile(r"-(\d{5})-of-(\d{5})$")
_NO_MODEL = re.compile(r"(^|[-._])(mmproj|imatrix)([-._]|$)")  # in names of GGUF files beside a model


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """name: path within the repository. digest: SHA-256 of a large file, git's blob id of any other; it names the
    file's bytes in the cache."""

    name: str
    nbytes: int
    digest: str

    @property
    def is_sha256(self) -> bool:
        return len(self.digest) == 64


def small_files(files: Iterable[RemoteFile]) -> list[RemoteFile]:
    """Files to read before the weights: all that describe the model or its text. Python code is left out."""
    return [
        file
        for file in files
        if "/" not in file.name
        and file.name.endswith(_SMALL_ENDINGS)
        and file.nbytes <= SMALL_BYTES
        and not _OTHER_WEIGHTS.fullmatch(file.name)
    ]


def shards(names: Iterable[str], index: bytes | None) -> list[str]:
    """The safetensors files among `names`: those of the index (its text), or all of the root without one."""
    if index is None:
        return sorted(name for name in names if name.endswith(".safetensors") and "/" not in name)
    try:
        weight_map = json.loads(index)["weight_map"]
    except (ValueError, RecursionError, LookupError, TypeError):
        weight_map = None
    if not isinstance(weight_map, dict):
        raise HubError(f"{INDEX} has no 'weight_map' of tensor names to files: the repository is broken")
    return sorted(set(map(str, weight_map.values())))


def gguf_variants(names: Iterable[str]) -> dict[str, list[str]]:
    """Models among GGUF files: {the name without its part's number: its files in order}."""
    models: dict[str, list[str]] = defaultdict(list)
    for name in sorted(names):
        base = name.rsplit("/", 1)[-1].lower()
        if name.endswith(GGUF) and not _NO_MODEL.search(base):
            models[_PART.sub("", name.removesuffix(GGUF))].append(name)
    return dict(models)


T = TypeVar("T")


def variant_of(models: Mapping[str, Sequence[T]], variant: str) -> list[str]:
    """The models that `variant` may mean: one whose file it is, else those that end in it as a word, else those that
    have it as one. UD's mixtures are meant where they are named, or where there is no other."""
    stem = _PART.sub("", variant.removesuffix(GGUF))
    if stem in models:
        return [stem]
    word = re.compile(rf"(?:^|[-._/]){re.escape(variant)}(?:$|[-._/])", re.IGNORECASE)
    matches = [model for model in models if word.search(model.rsplit("/", 1)[-1])]
    last = [model for model in matches if model.lower().endswith(variant.lower())] or matches
    exact = [model for model in last if not re.search(rf"UD-{re.escape(variant)}", model, re.IGNORECASE)]
    return exact or last


def is_whole(files: Sequence[str]) -> bool:
    """Whether all parts of a GGUF model are among its files."""
    part = _PART.search(files[0].removesuffix(GGUF)) if files else None
    return bool(files) and (part is None or len(files) == int(part[2]))
