"""A file of scripts/ as a module, for the tests of what it does."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

SCRIPTS = Path(__file__).parents[2] / "scripts"


def script_module(name: str) -> ModuleType:
    """The search path stays as it was: scripts put their own folder first."""
    spec = importlib.util.spec_from_file_location(f"script_{name}", SCRIPTS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module, path = importlib.util.module_from_spec(spec), list(sys.path)
    sys.modules[spec.name] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    sys.path[:] = path
    return module
