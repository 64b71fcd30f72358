"""Importing this makes `scripted_drafts` of benchmarks/ importable."""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

FOLDER = Path(__file__).parents[3] / "benchmarks" / "scripted_drafts"


def _load() -> None:
    """By its file: with all of benchmarks/ on the path its modules would hide folders of the same names here."""
    spec = spec_from_file_location(
        "scripted_drafts", FOLDER / "__init__.py", submodule_search_locations=[str(FOLDER)]
    )
    assert spec is not None and spec.loader is not None
    sys.modules["scripted_drafts"] = module = module_from_spec(spec)
    spec.loader.exec_module(module)


if "scripted_drafts" not in sys.modules:
    _load()
