"""docs/licences.md names all that is in a wheel and all that it depends on; the wheel has the texts."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import distribution
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "licences.md").read_text(encoding="utf-8")
CELLS = set(re.split(r"[ ,|\n]+", "\n".join(re.findall(r"^\|.*", PAGE, re.M))))
VENDOR = ROOT / "src" / "tandem" / "server" / "page" / "static" / "vendor"
BUILT_IN = (ROOT / "LICENSE.third-party.txt").read_text(encoding="utf-8")


def test_every_dependency_is_named() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wishes = project["dependencies"] + project["optional-dependencies"]["gpu"]
    assert {re.split(r"[^\w-]", wish)[0] for wish in wishes} <= CELLS


def test_every_library_of_the_page_is_named() -> None:
    texts = (VENDOR / "LICENSES.txt").read_text(encoding="utf-8")
    libraries = re.findall(r"^={80}\n(\S+) \S+ \(", texts, re.M)
    assert len(libraries) >= 8 and set(libraries) <= CELLS


def test_the_extension_s_texts_are_those_of_what_it_is_built_with() -> None:
    files = distribution("nanobind").files or []
    (licence,) = (file for file in files if file.name == "LICENSE")
    assert licence.read_text().strip() in BUILT_IN
    (header,) = (file for file in files if file.name == "robin_map.h")
    notice = header.read_text().partition("*/")[0]
    assert re.findall(r"Copyright .*", notice)[0] in BUILT_IN
