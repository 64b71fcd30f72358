"""Processes that Tandem starts import nothing of the current directory: it may be a model that somebody fetched."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

import tandem
from tandem.cli.serve import prepare_in_a_child
from tandem.engine.grammar.process import Cancellation, CompilerProcess
from tandem.engine.grammar.vocabulary import Vocabulary
from tandem.engine.protocol import Grammar
from tandem.flags.engine_config import EngineConfig
from tandem.server.engine_client import EngineClient
from tandem.server.metrics import ServerMetrics
from tandem.server.prompts.template_process import TemplateProcess
from tandem.server.supervisor import EngineSupervisor
from tandem.text.chat_template import ChatTemplate
from tandem.text.token_table import TokenTable

SOURCE = Path(tandem.__file__).parent
IMPORTED = ("json", "msgspec", "ctypes", "zmq")  # each of the children imports some of them


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current directory. A file of it that is imported leaves a mark beside itself."""
    for name in IMPORTED:
        (tmp_path / f"{name}.py").write_text("open(__file__ + '.ran', 'w').close()\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(SOURCE.parent))
    yield tmp_path
    assert not list(tmp_path.glob("*.ran"))


def test_the_files_would_be_imported(planted: Path) -> None:
    """Else the tests below could not fail."""
    subprocess.run([sys.executable, "-m", "tandem", "version"], capture_output=True, check=False)
    marks = list(planted.glob("*.ran"))
    assert marks
    for mark in marks:
        mark.unlink()


def test_what_prepares_a_model(
    planted: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path_factory.mktemp("hub")))
    with pytest.raises(typer.Exit) as left:
        prepare_in_a_child(["org/not-here"])
    assert left.value.exit_code == 1


def test_the_engine(planted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With another parent than it is told it ends, once it has imported everything."""
    boss = EngineSupervisor(EngineConfig(model="m"), EngineClient(ServerMetrics()), lambda ready: None, "m:f")

    async def ended() -> int:
        with monkeypatch.context() as told:
            told.setattr(os, "getpid", lambda: 1)
            child = await boss._spawn("ipc:///nobody")
        return await child.wait()

    assert asyncio.run(ended()) == 0


def test_templates(planted: Path) -> None:
    process = TemplateProcess(ChatTemplate("{{ messages[0].content }}"))
    try:
        assert asyncio.run(process.render([{"role": "user", "content": "x"}])) == "x"
    finally:
        process.close()


def test_grammars(planted: Path) -> None:
    tokens = (*(bytes([i]) for i in range(256)), b"<eos>")
    vocabulary = Vocabulary.of(TokenTable(tokens, {256: "<eos>"}), len(tokens), (256,))
    process = CompilerProcess(vocabulary, os.sched_getaffinity(0))
    try:
        assert process.compiled(Grammar("regex", "[0-9]{3}"), Cancellation())
    finally:
        process.close()


def test_no_module_is_started_without_p() -> None:
    started = re.compile(r"sys\.executable, *\"-[^P]")
    assert not [file.name for file in SOURCE.rglob("*.py") if started.search(file.read_text(encoding="utf-8"))]
