"""Code compiled for a wide instruction set must not leak into the baseline: see "the trap" in csrc/isa/inline.h.

Each unit of a tier defines one global symbol, its table; no weak symbols (inline functions that the linker could hand
to baseline code) and no initialisers (code that runs at load). Wide registers appear only where their flags are.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "csrc/tier"
BASELINE = {"scalar/vectors", "scalar/integers", "dense/scalar"} | {
    f"amx_standin/{part}" for part in ("vectors", "integers", "tiles_nibbles", "tiles_others")
}


def build_directory() -> Path | None:
    """The newest build tree with tier objects: `make ext` leaves one under build/."""
    found = sorted(ROOT.glob("build/**/tier/scalar/vectors.cc.o"), key=lambda p: p.stat().st_mtime)
    return found[-1].parents[2] if found else None


OBJECTS = build_directory()
needs_objects = pytest.mark.skipif(
    OBJECTS is None or not shutil.which("objdump") or not shutil.which("nm"),
    reason="no build tree with tier objects (run `make ext`), or no binutils",
)


def units() -> list[str]:
    """Of all tiers, built or not: "avx2/vectors"."""
    return sorted(str(p.relative_to(SOURCES).with_suffix("")) for p in SOURCES.glob("*/*.cc"))


def output_of(*command: str | Path) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def object_of(unit: str) -> Path:
    assert OBJECTS is not None
    path = OBJECTS / "tier" / f"{unit}.cc.o"
    if not path.exists():
        pytest.skip(f"tier {unit.split('/')[0]} was not built here: TANDEM_TIERS=all builds it")
    return path


@needs_objects
def test_the_build_has_nothing_else() -> None:
    """An object without a source would go unchecked; a build always has the scalar tier and all dense kernels."""
    assert OBJECTS is not None
    here = {str(p.relative_to(OBJECTS / "tier")).removesuffix(".cc.o") for p in OBJECTS.glob("tier/*/*.o")}
    assert here <= set(units())
    assert here >= {unit for unit in units() if unit.startswith(("scalar/", "dense/"))}


@needs_objects
@pytest.mark.parametrize("unit", units())
def test_one_global_symbol_and_no_weak_ones(unit: str) -> None:
    symbols = [line.split() for line in output_of("nm", "--defined-only", object_of(unit)).splitlines()]
    assert [s[-1] for s in symbols if s[-2] in "VvWwuB"] == []
    exported = [s[-1] for s in symbols if s[-2].isupper()]
    assert len(exported) == 1, exported


@needs_objects
@pytest.mark.parametrize("unit", units())
def test_nothing_runs_at_load(unit: str) -> None:
    sections = output_of("objdump", "-h", object_of(unit))
    assert not re.search(r"\.(init_array|ctors|init)\b", sections)


DATA = {"_ZN6tandem6kGridsE"}  # numbers, written at compile time (csrc/abi/grids.h): no instruction of another unit


@needs_objects
@pytest.mark.parametrize("unit", units())
def test_needs_nothing_but_libc(unit: str) -> None:
    """An undefined C++ symbol would be code of another unit, compiled with other flags."""
    undefined = {line.split()[-1] for line in output_of("nm", "-u", object_of(unit)).splitlines() if line}
    assert not [name for name in undefined - DATA if name.startswith("_Z")], undefined


@needs_objects
def test_wide_registers_only_in_tier_objects() -> None:
    assert OBJECTS is not None
    wide = re.compile(r"%[yz]mm|%tmm|%k[0-7]\b|\tv[a-z]")
    checked = 0
    for path in OBJECTS.rglob("*.cc.o"):
        if (
            path.parent.parent.name == "tier"
            and f"{path.parent.name}/{path.name.removesuffix('.cc.o')}" not in BASELINE
        ):
            continue
        hits = [line for line in output_of("objdump", "-d", path).splitlines() if wide.search(line)]
        assert not hits, (path.name, hits[:3])
        checked += 1
    assert checked > 10


@needs_objects
@pytest.mark.parametrize(
    ("unit", "register"),
    [
        ("avx2/vectors", "%ymm"),
        ("dense/avx2", "%ymm"),
        ("avx512/vectors", "%zmm"),
        ("avx512_bf16/vectors", "vdpbf16ps"),
        ("avx512_bf16/integers", "vpdpbusd"),
        ("amx/vectors", "vdpbf16ps"),
        ("amx/integers", "vpdpbusd"),
        ("amx/tiles_nibbles", "tdpbf16ps"),
        ("amx/tiles_others", "tdpbf16ps"),
    ],
)
def test_unit_uses_what_it_is_for(unit: str, register: str) -> None:
    assert register in output_of("objdump", "-d", object_of(unit))
