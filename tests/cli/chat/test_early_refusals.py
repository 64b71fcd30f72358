"""Refusals whatever the model is: `kt serve` says them before it fetches a model, `kt plan` before a plan."""

from __future__ import annotations

import os
import shlex
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tandem.cli import serve
from tandem.cli.app import app
from tandem.errors import TandemError
from tandem.flags.engine_config import EngineConfig
from tandem.server.launch import check_start

CHAT_FLAGS = ["--tool-call-parser nosuch", "--reasoning-parser nosuch", "--chat-template /no/such/file"]


@pytest.fixture(autouse=True)
def nothing_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(_argv: list[str]) -> None:
        raise AssertionError("it fetches")

    monkeypatch.setattr(serve, "all_is_here", lambda _config: False)
    monkeypatch.setattr(serve, "prepare_in_a_child", fetch)
    monkeypatch.delenv("TANDEM_API_KEY", raising=False)


@pytest.fixture
def busy_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        yield sock.getsockname()[1]


def refusal(line: str) -> str:
    done = CliRunner().invoke(app, shlex.split(line))
    assert isinstance(done.exception, TandemError), done.exception
    return str(done.exception)


@pytest.mark.parametrize(
    "flags", [*CHAT_FLAGS, "--api-key-file /no/such/file", "--uds /no/such/folder/socket", "--host nosuch.invalid"]
)
def test_before_a_model_is_fetched(flags: str) -> None:
    assert flags.split()[1] in refusal(f"serve org/model {flags}")


def test_a_taken_port_before_a_model_is_fetched(busy_port: int) -> None:
    assert f"cannot listen on 127.0.0.1:{busy_port}" in refusal(f"serve org/model --port {busy_port}")


@pytest.mark.parametrize("line", ["plan org/model", "serve demo --plan-only"])
@pytest.mark.parametrize("flags", CHAT_FLAGS)
def test_before_a_plan(line: str, flags: str) -> None:
    assert flags.split()[1] in refusal(f"{line} {flags}")


def test_a_plan_by_a_config_has_no_template_here() -> None:
    line = "plan --config qwen3-30b-a3b --gpu none --ram 256 --isa avx2 --bandwidth 50"
    assert "nosuch" in refusal(f"{line} --tool-call-parser nosuch")
    assert CliRunner().invoke(app, shlex.split(f"{line} --chat-template /no/such/file")).exit_code == 0


def test_what_is_right_is_fetched(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, shlex.split(f"serve org/model --uds {tmp_path / 'socket'}"))
    assert isinstance(done.exception, AssertionError) and str(done.exception) == "it fetches"
    assert not list(tmp_path.iterdir())


def test_a_key_in_a_pipe_is_left_for_the_start(tmp_path: Path) -> None:
    """Nobody writes to this one yet: to read it would be to wait for ever."""
    os.mkfifo(tmp_path / "key")
    check_start(EngineConfig(model="org/model", api_key_file=str(tmp_path / "key"), port=0))


def test_a_key_that_will_be_typed_is_asked_for_once() -> None:
    typed, terminal = os.openpty()
    try:
        check_start(EngineConfig(model="org/model", api_key_file=os.ttyname(terminal), port=0))
    finally:
        os.close(typed)
        os.close(terminal)
