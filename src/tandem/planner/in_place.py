"""Experts in place: used in the checkpoint's own pages, instead of being packed into memory of their own.

Packed ones are read faster (large pages, one stream), so they are the rule. A checkpoint that lies in memory itself
(/dev/shm, ramfs) is used where it is when there is no room for both; otherwise that has to be asked for.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tandem.flags.engine_config import EngineConfig
from tandem.spec.model_config import ModelConfig
from tandem.spec.stored import StoredFormats

MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs")
ROW_UNIT = 32  # sizes of such experts are multiples of it
_MOUNTS = Path("/proc/self/mountinfo")


def stored_in(stored: StoredFormats, files: Sequence[Path], aligned: bool) -> StoredFormats:
    """The same, of experts in these files."""
    return replace(stored, in_memory=lie_in_memory(files), aligned=aligned)


def lie_in_memory(files: Sequence[Path]) -> bool:
    """Whether all of them are in a file system without a disk."""
    kinds = _file_systems()
    return bool(files) and all(kinds.get(file.stat().st_dev) in MEMORY_FILE_SYSTEMS for file in files)


def _file_systems() -> dict[int, str]:
    """By device number; empty where the system does not tell."""
    kinds = {}
    for line in _MOUNTS.read_text().splitlines() if _MOUNTS.exists() else ():
        mount, _, kind = line.partition(" - ")
        major, minor = mount.split()[2].split(":")
        kinds[os.makedev(int(major), int(minor))] = kind.split()[0]
    return kinds


def against_in_place(
    config: EngineConfig, model: ModelConfig, expert_format: str, stored: StoredFormats
) -> str:
    """Reason that experts cannot be used where they are, and the way out; "": they can."""
    if not model.moe_layers:
        return "the model has no experts; take auto"
    if stored.experts.name != "bf16":
        return f"the checkpoint's experts are {stored.experts.name}, and only bf16 can be used as it is; take auto"
    if expert_format != "bf16":
        flag = "--dtype" if config.kt_method is None else "--kt-method"
        return f"{flag} makes the experts {expert_format}; leave one of the two flags out"
    if model.expert_channels % ROW_UNIT or model.moe.experts.width % ROW_UNIT:
        return f"experts of {model.expert_channels} x {model.moe.experts.width} would have to be padded; take auto"
    if model.shard.ranks > 1:
        return "ranks hold parts of experts; take auto"
    if model.moe.experts.copied:
        return "the checkpoint has their numbers in another order than kernels read; take auto"
    if not stored.aligned:
        return "the file has experts at odd places, of which views would be copies; take auto"
    if config.kt_enable_dynamic_expert_update:
        return "experts that may move need memory of their own; leave --kt-enable-dynamic-expert-update or this out"
    if config.packed_cache is not None:
        return "--packed-cache keeps packed ones; leave one of the two out"
    return ""
