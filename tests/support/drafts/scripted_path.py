"""Importing this makes `scripted_drafts` of benchmarks/ importable."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))
