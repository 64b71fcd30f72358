"""Names of the hub that a user types as MODEL: `ORG/NAME`, `ORG/NAME:Q4_K_M`, `ORG/NAME@REVISION`.

Whatever may be meant as a path is one: a typing error in a path must never ask the network.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_URLS = ("https://huggingface.co/", "https://hf.co/", "hf.co/", "hf://")
_NAME = re.compile(r"([\w][\w.-]*/[\w][\w.-]*)(?:@([\w][\w./-]*))?(?::([\w][\w./-]*))?")
_FILE_ENDINGS = (".gguf", ".safetensors", ".json", ".bin", ".pt")
DEFAULT_REVISION = "main"


@dataclass(frozen=True, slots=True)
class HubName:
    """repo: ORG/NAME. revision: a branch, tag or commit. variant: which GGUF quantisation; "": the safetensors."""

    repo: str
    revision: str = DEFAULT_REVISION
    variant: str = ""

    def __str__(self) -> str:
        revision = "" if self.revision == DEFAULT_REVISION else f"@{self.revision}"
        return f"{self.repo}{revision}" + (f":{self.variant}" if self.variant else "")


def hub_name(text: str) -> HubName | None:
    """None for a path. A page's address always means the hub; else `a/b` does where no directory `a` is here."""
    for url in _URLS:
        if text.startswith(url):
            return _parsed(text.removeprefix(url).rstrip("/"))
    if may_be_path(text) or Path(text.split("/")[0]).is_dir():
        return None
    return _parsed(text)


def may_be_path(text: str) -> bool:
    """Whether it is one here, or is written as one."""
    return text.startswith(("/", ".", "~")) or Path(text).exists()


def _parsed(text: str) -> HubName | None:
    match = _NAME.fullmatch(text)
    if match is None or match[1].lower().endswith(_FILE_ENDINGS):
        return None
    return HubName(match[1], match[2] or DEFAULT_REVISION, match[3] or "")


def shown_name(model: str) -> str:
    """Default name under which a model is served: the hub's name, or the directory's or file's."""
    name = hub_name(model)
    return Path(model).name or model if name is None else str(name)
