"""2,000 GGUF headers and 2,000 directories of JSON that say absurd things: each is read, or refused with our error.

No traceback, no signal; none takes 10 seconds, or 1 GiB over what an empty process has.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import hostile_files
import pytest

from gguf_files import ARCHITECTURES, write_gguf
from tandem.architectures import FAMILIES
from tiny import VARIANTS

pytestmark = [pytest.mark.full, pytest.mark.timeout(1200)]

CASES = 2000
DIRECTORIES = [name for name, (kind, _) in VARIANTS.items() if name == kind and kind in FAMILIES]
GGUF = [name for name in DIRECTORIES if name in ARCHITECTURES]


def check(scratch: Path, models: list[Path]) -> None:
    script = [sys.executable, hostile_files.__file__, str(CASES), str(scratch), *map(str, models)]
    done = subprocess.run(script, capture_output=True, text=True)
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, f"died after {results[-1:]}: {done.stderr[-2000:]}"
    assert len(results) == CASES
    wrong = [each for each in results if each["outcome"] not in ("loaded", "refused")]
    assert not wrong, json.dumps(wrong, indent=1)
    outcomes = Counter(each["outcome"] for each in results)
    assert min(outcomes["loaded"], outcomes["refused"]) > CASES // 20, outcomes  # else nothing was tried


def test_directories_of_json(tiny_models, tmp_path: Path) -> None:
    check(tmp_path, [tiny_models[name] for name in DIRECTORIES])


def test_gguf_headers(tiny_models, tmp_path: Path) -> None:
    files = [write_gguf(tiny_models[name], tmp_path / f"{name}.gguf") for name in GGUF]
    check(tmp_path, files)
