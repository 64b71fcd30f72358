"""Where the API process and its engine meet."""

from __future__ import annotations

import os
import pwd
import socket
import stat
import tempfile
from pathlib import Path

import pytest
import zmq

from quiet_clock import PATIENCE
from tandem.errors import EngineError
from tandem.server import endpoint
from tandem.server.endpoint import private_endpoint


def folder_of(address: str) -> Path:
    return Path(address.removeprefix("ipc://")).parent


def test_the_folder_is_private_and_goes():
    with private_endpoint() as address:
        assert stat.S_IMODE(folder_of(address).stat().st_mode) == 0o700
    assert not folder_of(address).exists()


@pytest.mark.parametrize("length", [90, 200])
def test_a_long_temporary_folder_does_not_matter(length, monkeypatch, tmp_path):
    """As batch systems make them for each job."""
    long = tmp_path / ("x" * length)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with private_endpoint() as address, zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.bind(address)
        assert folder_of(address).parent != long


def test_where_no_folder_can_be_made_the_error_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    monkeypatch.setattr(endpoint, "_FALLBACKS", ("/dev/null/x",))
    with pytest.raises(EngineError, match="TMPDIR"), private_endpoint():
        pass


def test_two_that_have_met_leave_nothing_behind():
    with (
        zmq.Context() as context,
        context.socket(zmq.DEALER) as one,
        context.socket(zmq.DEALER) as other,
        private_endpoint() as address,
    ):
        one.bind(address)
        other.connect(address)
        other.send(b"here")
        assert one.poll(1000 * PATIENCE) and one.recv() == b"here"
        endpoint.forget(address)
        assert not folder_of(address).exists()
        one.send(b"still")
        assert other.poll(1000 * PATIENCE) and other.recv() == b"still"


def test_what_a_killed_server_left_is_removed_by_the_next(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    dead, alive, begins, other = (tmp_path / f"tandem-{name}" for name in ("dead", "alive", "begins", "other"))
    for folder in (dead, alive, begins, other):
        folder.mkdir()
    (other / "engine").write_text("somebody's file")
    with socket.socket(socket.AF_UNIX) as listening, socket.socket(socket.AF_UNIX) as beginning:
        leave(dead)
        listening.bind(str(alive / "engine"))
        listening.listen()
        os.utime(alive / "engine", (0, 0))
        beginning.bind(str(begins / "engine"))  # it will listen
        with private_endpoint():
            assert not dead.exists() and alive.exists() and begins.exists() and other.exists()


def leave(folder: Path) -> None:
    """As a server that was killed long ago."""
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(folder / "engine"))
    os.utime(folder / "engine", (0, 0))


def test_a_user_without_a_name_finds_its_own(monkeypatch, tmp_path):
    """As containers have them."""

    def unknown(uid):
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    dead = tmp_path / "tandem-dead"
    dead.mkdir()
    leave(dead)
    with private_endpoint():
        assert not dead.exists()
