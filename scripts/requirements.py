"""Prints the requirements of one of pyproject.toml's extras, one a line, for `pip install -r /dev/stdin`."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

if __name__ == "__main__":
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
    print("\n".join(project["optional-dependencies"][sys.argv[1]]))
