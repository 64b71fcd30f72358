"""scripts/build_progress.py: what a build says while pip is silent."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from repo_scripts import script_module

progress = script_module("build_progress")
OBJECTS = "".join(f"build obj/{n}.cc.o: CXX {n}.cc\n" for n in range(4))
PLAN = f"rule CXX\n  command = c++\n{OBJECTS}build lib.so: LINK\n"


def planned(folder: Path, compiled: int) -> Path:
    (folder / "cp" / "obj").mkdir(parents=True)
    (folder / "cp" / "build.ninja").write_text(PLAN)
    for n in range(compiled):
        (folder / "cp" / "obj" / f"{n}.cc.o").touch()
    return folder


def test_objects_are_counted(tmp_path: Path) -> None:
    assert progress.compiled(tmp_path / "nothing", 0.0) == (0, 0)
    folder = planned(tmp_path, 3)
    os.utime(folder / "cp" / "obj" / "0.cc.o", (1.0, 1.0))  # of an earlier build
    assert progress.compiled(folder, -1.0) == (3, 4) and progress.compiled(folder, 5.0) == (2, 4)


def test_a_plan_that_goes_away_ends_no_build(tmp_path: Path) -> None:
    """CMake may write it anew just then. Here it cannot be read."""
    (tmp_path / "gone" / "build.ninja").mkdir(parents=True)
    assert progress.compiled(tmp_path, 0.0) == (0, 0)


def test_a_build_says_how_far_it_is_and_ends_as_its_command_does(tmp_path: Path, capfd, monkeypatch) -> None:
    monkeypatch.setattr(progress, "LOOK_SECONDS", 0.02)
    folder = planned(tmp_path, 0)
    work = (
        "import pathlib, time\n"
        f"for n in range(4): (pathlib.Path({str(folder)!r}) / f'cp/obj/{{n}}.cc.o').touch(); time.sleep(0.05)\n"
        "raise SystemExit(3)"
    )
    assert progress.watch([sys.executable, "-c", work], folder, live=False) == 3
    lines = capfd.readouterr().out.splitlines()
    assert lines[-1] == "  compiled 4 of 4 files" and len(lines) == len(set(lines)) <= 4
