"""A family of known parts, with windows, biases and a router score of its own, takes three files of `src/`.

It is added to a copy of `src/`. Files that differ are counted, and a process that sees the copy runs a tiny model.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

from tandem import _core

ROOT = Path(__file__).parents[2]
SUPPORT = ROOT / "tests" / "support"
ADDED = SUPPORT / "added_family"

# file: what stands there today, what takes its place
EDITS = {
    "tandem/architectures/__init__.py": (
        ("    qwen2_moe,\n", "    quilted,\n    qwen2_moe,\n"),
        (" qwen2_moe.FAMILY,", " quilted.FAMILY, qwen2_moe.FAMILY,"),
    ),
    "tandem/mechanisms/router/scores.py": (
        ('    "sigmoid": ', '    "softsign": Score(lambda x: 0.5 + 0.5 * x / (1 + x.abs())),\n    "sigmoid": '),
    ),
}


def copied(source: Path) -> None:
    """`src/`, and the extension that this process uses."""
    shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    extension = Path(_core.__file__)
    (source / "tandem" / extension.name).symlink_to(extension)


def add_family(source: Path) -> None:
    shutil.copy(ADDED / "quilted.py", source / "tandem" / "architectures")
    for file, edits in EDITS.items():
        text = (source / file).read_text()
        for old, new in edits:
            assert text.count(old) == 1, f"{file} has {old!r} {text.count(old)} times"
            text = text.replace(old, new)
        (source / file).write_text(text)


def hashes(source: Path) -> set[tuple[str, str]]:
    files = (each for each in source.rglob("*") if each.is_file())
    return {(each.relative_to(source).as_posix(), sha256(each.read_bytes()).hexdigest()) for each in files}


def differences(source: Path, directory: Path) -> dict[str, float]:
    """To the reference, relative to its largest logit, by what computed."""
    paths = [str(each) for each in (source, SUPPORT, SUPPORT / "foreign", ADDED)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, str(ADDED / "run_quilted.py"), str(directory)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_a_family_of_known_parts_takes_three_files(tmp_path: Path) -> None:
    source = tmp_path / "src"
    copied(source)
    before = hashes(source)
    add_family(source)
    changed = {file for file, _ in hashes(source) ^ before}
    assert changed == {"tandem/architectures/quilted.py", *EDITS} and len(changed) <= 3
    found = differences(source, tmp_path)
    assert set(found) == {"torch", "cpu"}
    assert max(found.values()) < 1e-5, found
