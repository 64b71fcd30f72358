"""Whether experts are used in the checkpoint's own pages, instead of being packed into memory of their own.

Packed ones are read faster (large pages, one stream), so they are the rule. A checkpoint that lies in memory itself
(/dev/shm, ramfs) is used where it is when there is no room for both; otherwise that has to be asked for.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from tandem.config.engine_config import EngineConfig
from tandem.config.model_config import ModelConfig
from tandem.config.stored import StoredFormats
from tandem.errors import ConfigError

MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs", "hugetlbfs")
ROW_UNIT = 32  # sizes of such experts are multiples of it
_MOUNTS = Path("/proc/self/mountinfo")


def stored_at(stored: StoredFormats, experts: Path) -> StoredFormats:
    """The same, of experts in the files of `experts`."""
    return replace(stored, in_memory=lies_in_memory(experts))


def lies_in_memory(model: Path) -> bool:
    """Whether every weight file of a directory (or the GGUF file) is in a file system without a disk."""
    files = [model] if model.is_file() else [*model.glob("*.safetensors"), *model.glob("*.gguf")]
    kinds = _file_systems()
    return bool(files) and all(kinds.get(file.stat().st_dev) in MEMORY_FILE_SYSTEMS for file in files)


def _file_systems() -> dict[int, str]:
    """By device number; empty where the system does not tell."""
    found = {}
    for line in _MOUNTS.read_text().splitlines() if _MOUNTS.exists() else ():
        mount, _, kind = line.partition(" - ")
        major, minor = mount.split()[2].split(":")
        found[os.makedev(int(major), int(minor))] = kind.split()[0]
    return found


def why_in_place(config: EngineConfig, model: ModelConfig, expert_format: str, stored: StoredFormats) -> str:
    """Raises ConfigError where experts cannot be used as they are."""
    if against := _what_is_against(config, model, expert_format, stored):
        raise ConfigError(f"--map-experts always: {against}; take auto")
    if config.map_experts == "always":
        return "--map-experts always"
    return "the checkpoint lies in memory already, and there is no room for a packed copy"


def _what_is_against(
    config: EngineConfig, model: ModelConfig, expert_format: str, stored: StoredFormats
) -> str:
    if not model.moe.layers:
        return "the model has no experts"
    if expert_format != "bf16" or stored.experts.name != "bf16":
        return f"only bf16 experts can be used as they are, not {stored.experts.name} as {expert_format}"
    if model.hidden % ROW_UNIT or model.moe.width % ROW_UNIT:
        return f"experts of {model.hidden} x {model.moe.width} would have to be padded"
    if config.kt_enable_dynamic_expert_update:
        return "experts that may move (--kt-enable-dynamic-expert-update) need memory of their own"
    if config.packed_cache is not None:
        return "--packed-cache keeps packed ones"
    return ""
