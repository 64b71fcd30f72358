"""Packages installed beside it: the module of the same name, which is refused, and the SGLang that asks."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

from tandem.errors import ConfigError

ORIGINAL = "kt-kernel"
OURS = "tandem-kt-kernel"


def check_alone() -> None:
    """Raises ConfigError beside the original: both have the module `kt_kernel`, and its files lie over each other."""
    if version := _version(ORIGINAL):
        raise ConfigError(
            f"{ORIGINAL} {version} is installed, and has the module kt_kernel, too: "
            f"pip uninstall {ORIGINAL}, then pip install --force-reinstall --no-deps {OURS}"
        )


def known_faults(host_experts: int, scale: float, masks: bool) -> Iterator[str]:
    """Faults of an installed SGLang with such experts. host_experts: those of a layer that it computes itself;
    scale: the model's routed_scaling_factor; masks: it gives masks of experts, as the fork sglang-kt does."""
    name = "sglang-kt" if masks else "sglang"
    version = _version(name) or "of unknown version"
    if host_experts and scale != 1.0 and not masks:
        yield (
            f"{name} {version} multiplies what its own experts give with routed_scaling_factor ({scale:g}) once more "
            "than what these give: answers are wrong; take --kt-num-gpu-experts 0"
        )
    if not masks and _no_locations():
        yield (
            f"{name} {version} has no locations of experts yet, and asks for them after loading: if it stops with "
            "'NoneType' has no attribute 'physical_to_logical_map_cpu', give --init-expert-location trivial "
            "--ep-dispatch-algorithm static"
        )


def _no_locations() -> bool:
    module = sys.modules.get("sglang.srt.eplb.expert_location")
    ask = getattr(module, "get_global_expert_location_metadata", None)
    return ask is not None and ask() is None


def _version(name: str) -> str:
    """ "": it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
