"""Prints the requirements in pyproject.toml, one a line, for `pip install -r /dev/stdin`.

`requirements.py` prints the package's own, `requirements.py EXTRA` those of one extra.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path


def requirements(extra: str | None) -> list[str]:
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
    return project["dependencies"] if extra is None else project["optional-dependencies"][extra]


if __name__ == "__main__":
    print("\n".join(requirements(sys.argv[1] if len(sys.argv) > 1 else None)))
