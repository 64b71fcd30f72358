"""scripts/check_wheels.py: two wheels, of which each Python takes one, with all licences."""

from __future__ import annotations

import re
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

from repo_scripts import script_module

script: ModuleType = script_module("check_wheels")
PLATFORM = "manylinux_2_35_x86_64"
INSIDE = [
    "tandem_moe-0.2.0.dist-info/licenses/LICENSE", "tandem_moe-0.2.0.dist-info/licenses/LICENSE.third-party.txt",
    "tandem_moe-0.2.0.dist-info/entry_points.txt", "tandem/server/page/static/index.html",
    "tandem/server/page/static/vendor/LICENSES.txt", "tandem/py.typed",
]  # fmt: skip
OLD, STABLE = (
    ("cp311-cp311", "tandem/_core.cpython-311-x86_64-linux-gnu.so"), ("cp312-abi3", "tandem/_core.abi3.so"),
)  # fmt: skip


def wheel(folder: Path, tags: str, *names: str) -> Path:
    path = folder / f"tandem_moe-0.2.0-{tags}-{PLATFORM}.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name in names:
            archive.writestr(name, "")
    return path


def test_two_wheels_are_for_every_python(tmp_path: Path) -> None:
    wheels = [wheel(tmp_path, tags, built, *INSIDE) for tags, built in (OLD, STABLE)]
    assert list(script.problems(wheels)) == []
    assert [script.fitting(wheels, (3, minor)) for minor in (10, 11, 12, 14)] == [
        [],
        wheels[:1],
        wheels[1:],
        wheels[1:],
    ]


@pytest.mark.parametrize(
    ("wheels", "says"),
    [
        ([(*OLD, *INSIDE)], ["Python 3.12: one", "Python 3.13: one", "Python 3.14: one"]),
        ([(*STABLE, *INSIDE)], ["Python 3.11: one"]),
        ([(*OLD, *INSIDE), (*STABLE, *INSIDE[1:])], ["it lacks licenses/LICENSE"]),
        ([(*OLD, *INSIDE), ("cp312-abi3", OLD[1], *INSIDE)], ["its extension is"]),
        ([(*OLD, *INSIDE), ("cp312-abi3", *INSIDE)], ["its extension is []"]),
        ([(*OLD, *INSIDE), (*STABLE, *INSIDE), ("cp313-cp313", OLD[1], *INSIDE)], ["Python 3.13: one"]),
    ],
)
def test_faults_of_a_release_are_seen(tmp_path: Path, wheels: list[tuple[str, ...]], says: list[str]) -> None:
    found = list(script.problems([wheel(tmp_path, *each) for each in wheels]))
    assert len(found) == len(says) and all(part in text for text, part in zip(found, says, strict=True)), (
        found
    )


def test_versions_are_one() -> None:
    """pyproject.toml, the package and the changelog's newest heading."""
    root = Path(__file__).parents[2]
    (declared,) = re.findall(r'^version = "(.*)"', (root / "pyproject.toml").read_text(), re.M)
    (package,) = re.findall(r'^__version__ = "(.*)"', (root / "src/tandem/__init__.py").read_text(), re.M)
    newest = re.findall(r"^## \[(.*?)\]", (root / "CHANGELOG.md").read_text(), re.M)[0]
    assert declared == package and newest in (declared, "Unreleased")
