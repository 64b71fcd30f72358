"""The commit-msg hook: what it refuses, and that git asks it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from repo_scripts import SCRIPTS, script_module

script = script_module("commit_subject")


@pytest.mark.parametrize(
    "message",
    [
        "[kernels] int4 dot_rows, 1.4× at 8 rows", f"[a] {'x' * 68}", f"[a] b\n\n{'x' * 200}", f"Merge {'x' * 90}",
        f'Revert "[kernels] {"x" * 70}"', "# a comment of git's\n[docs] one idea a sentence", "",
    ],
)  # fmt: skip
def test_good_subjects(message: str) -> None:
    assert script.fault(message) is None


@pytest.mark.parametrize(
    ("message", "reason"),
    [(f"[a] {'x' * 69}", "has 73 characters"), ("Fix it", "its area"), ("[a]no space", "its area")],
)
def test_bad_subjects(message: str, reason: str) -> None:
    assert reason in script.fault(message)


def test_git_asks_the_hook(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    shutil.copy(SCRIPTS / "commit_subject.py", tmp_path / ".git" / "hooks" / "commit-msg")

    def commit(subject: str) -> subprocess.CompletedProcess[str]:
        author = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        command = ["git", "-C", str(tmp_path), *author, "commit", "-q", "--allow-empty", "-m", subject]
        return subprocess.run(command, capture_output=True, text=True)

    refused = commit(f"[a] {'x' * 80}")
    assert refused.returncode != 0 and "84 characters" in refused.stderr
    assert commit("[a] b").returncode == 0
