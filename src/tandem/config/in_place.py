"""Whether experts are used in the checkpoint's own pages, instead of being packed into memory of their own.

What lies in memory already (/dev/shm, ramfs) would be there twice, and copying it takes longer than all other loading.
On a disk, pages that are short of room would be read again and again while tokens wait, so there it has to be asked for.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from tandem.config.engine_config import EngineConfig
from tandem.config.model_config import ModelConfig
from tandem.config.stored import StoredFormats
from tandem.config.threads import Threads
from tandem.errors import ConfigError

MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs", "hugetlbfs")
ROW_UNIT = 32  # sizes of such experts are multiples of it
_MOUNTS = Path("/proc/self/mountinfo")


def lies_in_memory(model: Path) -> bool:
    """Whether every weight file of a directory (or the GGUF file) is in a file system without a disk."""
    files = (
        [model] if model.is_file() else [f for f in model.iterdir() if f.suffix in (".safetensors", ".gguf")]
    )
    devices = {file.stat().st_dev for file in files}
    kinds = _file_systems()
    return bool(devices) and all(kinds.get(device) in MEMORY_FILE_SYSTEMS for device in devices)


def stored_at(stored: StoredFormats, experts: Path) -> StoredFormats:
    """The same, of experts in the files of `experts`."""
    return replace(stored, in_memory=lies_in_memory(experts))


def _file_systems() -> dict[int, str]:
    """By device number; empty where the system does not tell."""
    found = {}
    for line in _MOUNTS.read_text().splitlines() if _MOUNTS.exists() else ():
        mount, _, kind = line.partition(" - ")
        major, minor = mount.split()[2].split(":")
        found[os.makedev(int(major), int(minor))] = kind.split()[0]
    return found


def experts_in_place(
    config: EngineConfig, model: ModelConfig, expert_format: str, stored: StoredFormats, threads: Threads
) -> tuple[bool, str]:
    """And why. Raises ConfigError where --map-experts always cannot be met."""
    against = _what_is_against(config, model, expert_format, stored)
    if config.map_experts == "always" and against:
        raise ConfigError(f"--map-experts always: {against}; take auto")
    if config.map_experts != "auto" or against:
        return config.map_experts == "always", against or f"--map-experts {config.map_experts}"
    if not stored.in_memory:
        return False, "the checkpoint is not in memory"
    if len(set(threads.part_nodes)) > 1:
        return False, "packed experts are divided among the memory nodes"
    return True, "the checkpoint lies in memory already; --map-experts never packs a copy"


def _what_is_against(
    config: EngineConfig, model: ModelConfig, expert_format: str, stored: StoredFormats
) -> str:
    """ "": nothing."""
    width = model.moe.width
    if not model.moe.layers:
        return "the model has no experts"
    if expert_format != "bf16" or stored.experts.name != "bf16":
        return f"only bf16 experts can be used as they are, not {stored.experts.name} as {expert_format}"
    if model.hidden % ROW_UNIT or width % ROW_UNIT:
        return f"experts of {model.hidden} x {width} are padded, which takes a copy"
    if config.kt_enable_dynamic_expert_update:
        return "experts that may move (--kt-enable-dynamic-expert-update) need memory of their own"
    if config.packed_cache is not None:
        return "--packed-cache keeps packed ones"
    return ""
