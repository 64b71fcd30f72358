"""`_core.pyi` says what the extension is: same names, same parameters, same types. `make stub` writes it anew."""

from __future__ import annotations

import ast
from pathlib import Path

from nanobind.stubgen import StubGen

from tandem import _core

STUB = Path(__file__).parents[2] / "src" / "tandem" / "_core.pyi"


def signatures(text: str) -> dict[str, str]:
    """Class.function → its parameters and result, without layout and docstrings."""
    found: dict[str, str] = {}

    def walk(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef):
                found[prefix + node.name] = "class"
                walk(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, ast.FunctionDef):
                result = ast.unparse(node.returns) if node.returns else ""
                found[prefix + node.name] = f"({ast.unparse(node.args)}) -> {result}"

    walk(ast.parse(text).body, "")
    return found


def test_the_stub_is_the_extension() -> None:
    generator = StubGen(_core)
    generator.put(_core)
    real = signatures(generator.get())
    assert len(real) > 10
    assert signatures(STUB.read_text()) == real
