"""Code compiled for a wide instruction set must not leak into the baseline: see "the trap" in csrc/isa/inline.h.

Each tier object defines one global symbol, its table; no weak symbols (inline functions that the linker could hand to
baseline code) and no initialisers (code that runs at load). Wide registers appear only where their flags are.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BASELINE = {"scalar", "amx_standin", "dense_scalar"}


def build_directory() -> Path | None:
    """The newest build tree with tier objects: `make ext` leaves one under build/."""
    found = sorted(ROOT.glob("build/**/tier/avx2.cc.o"), key=lambda p: p.stat().st_mtime)
    return found[-1].parent.parent if found else None


OBJECTS = build_directory()
needs_objects = pytest.mark.skipif(
    OBJECTS is None or not shutil.which("objdump") or not shutil.which("nm"),
    reason="no build tree with tier objects (run `make ext`), or no binutils",
)


def tiers() -> list[str]:
    return sorted(p.stem for p in (ROOT / "csrc/tier").glob("*.cc"))


def output_of(*command: str | Path) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def object_of(tier: str) -> Path:
    assert OBJECTS is not None
    return OBJECTS / "tier" / f"{tier}.cc.o"


@needs_objects
@pytest.mark.parametrize("tier", tiers())
def test_one_global_symbol_and_no_weak_ones(tier: str) -> None:
    symbols = [line.split() for line in output_of("nm", "--defined-only", object_of(tier)).splitlines()]
    assert [s[-1] for s in symbols if s[-2] in "VvWwuB"] == []
    exported = [s[-1] for s in symbols if s[-2].isupper()]
    assert len(exported) == 1, exported


@needs_objects
@pytest.mark.parametrize("tier", tiers())
def test_nothing_runs_at_load(tier: str) -> None:
    sections = output_of("objdump", "-h", object_of(tier))
    assert not re.search(r"\.(init_array|ctors|init)\b", sections)


@needs_objects
@pytest.mark.parametrize("tier", tiers())
def test_needs_nothing_but_libc(tier: str) -> None:
    """An undefined C++ symbol would be code of another unit, compiled with other flags."""
    undefined = {line.split()[-1] for line in output_of("nm", "-u", object_of(tier)).splitlines() if line}
    assert not [name for name in undefined if name.startswith("_Z")], undefined


@needs_objects
def test_wide_registers_only_in_tier_objects() -> None:
    assert OBJECTS is not None
    wide = re.compile(r"%[yz]mm|%tmm|%k[0-7]\b|\tv[a-z]")
    checked = 0
    for path in OBJECTS.rglob("*.cc.o"):
        if path.parent.name == "tier" and path.name.removesuffix(".cc.o") not in BASELINE:
            continue
        hits = [line for line in output_of("objdump", "-d", path).splitlines() if wide.search(line)]
        assert not hits, (path.name, hits[:3])
        checked += 1
    assert checked > 10


@needs_objects
@pytest.mark.parametrize(
    ("tier", "register"),
    [("avx2", "%ymm"), ("avx512", "%zmm"), ("avx512_bf16", "vdpbf16ps"), ("amx", "tdpbf16ps")],
)
def test_tier_uses_what_it_is_for(tier: str, register: str) -> None:
    assert register in output_of("objdump", "-d", object_of(tier))
