"""Files of a mechanism are found by their names, so a type checker does not see who calls them: these tests do."""

from __future__ import annotations

import inspect
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

import tandem.mechanisms
from tandem.mechanisms import slices
from tandem.mechanisms.dense.shape import Dense

FOLDER = Path(tandem.mechanisms.__file__).parent
NAMES = sorted(path.name for path in FOLDER.iterdir() if (path / "__init__.py").exists())
OPERATOR = ["b", "index", "names", "shape"]
RESIDUAL = {"residual": ["b", "hyper", "name"], "ending": ["b", "hyper"], "summed_up": ["b", "hyper", "name"]}
CHOOSE = {"mean_index", "token_index"}  # which attention uses; they are no block of a layer
PLAIN_TORCH = {"ngrams"}  # its block calls torch by itself, on every machine


def parameters(name: str, part: str, function: str) -> list[str] | None:
    """The names of a function's parameters; None where the file or the function is missing."""
    if find_spec(f"tandem.mechanisms.{name}.{part}") is None:
        return None
    found = getattr(import_module(f"tandem.mechanisms.{name}.{part}"), function, None)
    return None if found is None else list(inspect.signature(found).parameters)


@pytest.mark.parametrize("name", [name for name in NAMES if (FOLDER / name / "block.py").exists()])
def test_a_block_has_what_builders_call(name: str) -> None:
    residual = {function: parameters(name, "block", function) for function in RESIDUAL}
    if any(residual.values()):
        assert residual == RESIDUAL
    else:
        assert parameters(name, "block", "operator") == (None if name in CHOOSE else OPERATOR)


@pytest.mark.parametrize("name", [name for name in NAMES if (FOLDER / name / "torch.py").exists()])
def test_kernels_of_each_machine_are_bound_alike(name: str) -> None:
    torch = parameters(name, "torch", "bound")
    if (FOLDER / name / "cpu.py").exists():  # elsewhere a CPU computes with torch's
        assert torch == parameters(name, "cpu", "bound")
    assert (torch is None and name in PLAIN_TORCH) or (torch is not None and torch[0] == "ops")


def test_a_folder_of_stale_caches_is_no_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone" / "__pycache__").mkdir(parents=True)
    package = import_module(slices.slice_of(Dense(3)))
    monkeypatch.setattr(package, "__path__", [str(tmp_path)])
    assert not slices.has_part(Dense(3), "gone")
