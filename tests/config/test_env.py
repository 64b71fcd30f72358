"""Where compiled kernels go: below HOME, unless that cannot be written."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tandem.config import env


@pytest.mark.parametrize("writable", [True, False])
@pytest.mark.parametrize("chosen", ["", "chosen"])
def test_kernels_are_kept_where_it_is_possible(
    writable: bool, chosen: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Path] = []

    def access(path: Path, mode: int) -> bool:  # root may write everywhere
        asked.append(path)
        return writable

    given = str(tmp_path / chosen) if chosen else ""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("TRITON_HOME", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", given)
    monkeypatch.setattr(env.os, "access", access)
    monkeypatch.setattr(env.atexit, "register", lambda *_, **__: None)
    env.keep_kernels_where_possible()
    assert asked == [tmp_path]  # the nearest that is there
    now = os.environ["TRITON_CACHE_DIR"]
    assert (now == given) == writable
    if not writable:
        assert Path(now).is_dir() and not list(Path(now).iterdir())
        shutil.rmtree(now)
