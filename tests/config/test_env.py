"""Where files go: compiled kernels below HOME, unless that cannot be written; and where there is no HOME."""

from __future__ import annotations

import os
import pwd
import shutil
import tempfile
from pathlib import Path

import pytest

from tandem.flags import env


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


def test_a_user_without_home_and_name_has_a_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As containers have them, whose users are numbers."""

    def unknown(uid: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name in ("HOME", "TANDEM_CACHE_DIR", "XDG_CACHE_HOME", "TRITON_HOME", "TRITON_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(env.atexit, "register", lambda *_, **__: None)
    assert tmp_path in env.cache_dir().parents
    env.keep_kernels_where_possible()
    kernels = Path(os.environ.pop("TRITON_CACHE_DIR", "~"))  # where Triton would make a folder of that name
    assert kernels.is_dir() and kernels.parent == tmp_path
