"""Every line that people paste from a page is run here, on stand-ins; what cannot be is listed with its reason.

A model named on a page is a tiny one of its family, from a hub on loopback or in a folder. `kt serve` is run until its
engine has answered; tests/docs/test_model_pages.py runs the lines of docs/models/ on the machines that they are for.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import typer.main
from huggingface_hub import constants
from typer.testing import CliRunner

import tandem
from block_draft_models import block_drafted
from gguf_files import Kind, matrices_as, write_gguf
from hub_server import FakeHub, serving
from page_lines import NOT_RUN, PAGES, ROOT, RUN, Line, lines_of, spans_of
from quantised_models import experts_only, save_quantised
from quiet_clock import PATIENCE
from server_harness import listening_server
from tandem import LLM, SamplingParams
from tandem.bench import probes
from tandem.cli import prepare
from tandem.cli.app import app
from tandem.cli.serve import possible_config
from tandem.errors import TandemError
from tandem.flags.engine_config import FLAGS, EngineConfig
from tandem.planner.forecast.speeds import Speeds
from tandem.server import engine_process
from tiny import save_tiny

LINES = {page: lines_of(page) for page in PAGES}
MODEL_PAGES = ROOT / "docs" / "models"
SIZES: dict[str, object] = {"hidden_size": 128, "moe_intermediate_size": 64, "intermediate_size": 96}
LONG: dict[str, object] = {"max_position_embeddings": 40960}
HUB_NAMES = ("Qwen/Qwen3-30B-A3B", "ORG/NAME")
GGUF = "Qwen3-30B-A3B-Q4_K_M.gguf"
ADDRESS = re.compile(r"^(http://)?(localhost|127\.0\.0\.1):30000")
BACKEND = """
from pathlib import Path

def prepare_metadata_for_build_wheel(folder, settings=None):
    name = "tandem_moe-0.dist-info"
    (Path(folder) / name).mkdir()
    (Path(folder) / name / "METADATA").write_text(Path("METADATA").read_text())
    return name
"""


def lines(*programs: str) -> list[Any]:
    """A parameter for each page that has lines of these programs which are run."""
    pages = (page for page in PAGES if page.parent != MODEL_PAGES)
    chosen = {
        page: [line for line in LINES[page] if line.program in programs and not line.not_run]
        for page in pages
    }
    return [pytest.param(some, id=page.relative_to(ROOT).as_posix()) for page, some in chosen.items() if some]


def test_lines_are_read_and_no_reason_is_left_over() -> None:
    every = [line for some in LINES.values() for line in some]
    assert {line.program for line in every} >= {*RUN, "docker"} and len(every) > 90
    assert {line.not_run for line in every} - {""} == set(NOT_RUN)
    assert [
        line.text for line in every if line.program in ("kt", "pip", "make", "curl") and line.not_run
        if line.not_run != "kt serve --models"
    ] == []


# --- kt -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Stand-ins by the names that pages use."""
    folder = tmp_path_factory.mktemp("models")
    save_tiny("qwen3_moe", folder / "qwen", **SIZES, **LONG, head_dim=32)
    save_tiny("deepseek_v3", folder / "deepseek", **SIZES, **LONG)
    save_tiny("deepseek_v4", folder / "v4")
    int8, _ = save_quantised(folder / "deepseek", folder / "int8", experts_only("int8 per channel"))
    return {
        "MODEL": folder / "qwen",
        "/models/Qwen3-30B-A3B": folder / "qwen",
        "~/models/NAME": folder / "qwen",
        "/models/DeepSeek-V3": folder / "deepseek",
        "/models/DeepSeek-V3-INT8": int8,
        "DS": folder / "deepseek",
        "with a draft": block_drafted(folder / "v4", folder / "drafted").path,
        GGUF: write_gguf(folder / "qwen", folder / GGUF, matrices_as(Kind.Q8_0)),
    }


@pytest.fixture(scope="module")
def hub(models: dict[str, Path]) -> Iterator[FakeHub]:
    with serving(FakeHub()) as fake:
        for name in HUB_NAMES:
            fake.add(name, models["MODEL"])
        yield fake


@pytest.fixture
def place(
    hub: FakeHub, models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], str]:
    """A home of its own, in which every model of the pages is. It turns a word of a page into what is there."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    monkeypatch.setattr(
        probes, "cpu_speeds", lambda *_: Speeds().having("measured", dram_gbps=50.0, cpu_flops=1e12)
    )
    monkeypatch.setattr(
        engine_process, "pin_main_thread", lambda _cpu: None
    )  # this process has other tests to run
    return lambda word: os.path.expanduser(str(models.get(word, word)))


DONE: set[tuple[str, ...]] = set()  # lines that several pages have


@pytest.mark.parametrize("some", lines("kt", "python"))
def test_kt(
    some: list[Line], place: Callable[[str], str], models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    for line in some:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", "HF_HUB_OFFLINE" in line.settings)
        words = [word for word in line.words[1:] if word != "…"]
        if words[:2] == ["-m", "tandem.launch_server"]:
            words = ["serve", *words[2:]]
        if {"NEXTN", "DSPARK"} & set(words):
            words = [str(models["with a draft"]) if word == "MODEL" else word for word in words]
        assert line.program == "kt" or words[0] == "serve", line
        words = [place(word) for word in words]
        if tuple(words) not in DONE:
            run_kt(line, words)
            DONE.add(tuple(words))


def run_kt(line: Line, words: list[str]) -> None:
    """As a shell runs it: to its end. A server: until its engine has answered."""
    if words[0] == "serve" and not line.shown and "--plan-only" not in words:
        return served(words[1:])
    done = CliRunner().invoke(app, words)
    refused = isinstance(done.exception, TandemError)
    said = f"error: {done.exception}" if refused else done.stdout
    assert said.splitlines()[: len(line.shown)] == line.shown, line.text
    assert done.exit_code == refused and refused == line.refused, f"{line.text}\n{said}\n{done.stderr}"


def served(argv: list[str]) -> None:
    prepare.main(argv)
    loaded = engine_process.load_engine(possible_config([*argv, "--device", "cpu"]))
    try:
        sampling = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
        [answer] = LLM.from_engine(loaded.engine).generate([[5, 6, 7]], sampling, progress=False)
        assert len(answer.token_ids) == 3
    finally:
        loaded.engine.close()


# --- pip, make, curl ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tandem's name and extras, with a build that compiles nothing."""
    folder = tmp_path_factory.mktemp("project")
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = "".join(f"Provides-Extra: {extra}\n" for extra in declared["optional-dependencies"])
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {declared['name']}\nVersion: 0\n{extras}")
    (folder / "build.py").write_text(BACKEND)
    build = '[build-system]\nrequires = []\nbuild-backend = "build"\nbackend-path = ["."]\n'
    (folder / "pyproject.toml").write_text(build)
    return folder


@pytest.mark.parametrize("some", lines("pip"))
def test_pip(some: list[Line], project: Path) -> None:
    """pip itself, which resolves and installs nothing. It only warns of an extra that is not there."""
    for line in some:
        command = [sys.executable, "-m", "pip", *line.words[1:], "--dry-run", "--no-deps", "--no-index"]
        done = subprocess.run(command, cwd=project, capture_output=True, text=True)
        assert done.returncode == 0 and "does not provide" not in done.stderr, f"{line.text}\n{done.stderr}"


@pytest.mark.parametrize("some", lines("make"))
def test_make(some: list[Line]) -> None:
    """What it would do, and no more."""
    for line in some:
        done = subprocess.run(["make", "-n", *line.words[1:]], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0 and done.stdout.strip(), f"{line.text}\n{done.stderr}"


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
@pytest.mark.parametrize("some", lines("curl"))
def test_curl(
    some: list[Line], models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """curl itself, against the server's own routes around an engine with experts."""
    monkeypatch.setattr(engine_process, "pin_main_thread", lambda _cpu: None)
    flags = {"device": "cpu", "context_length": 512, "expert_distribution_recorder_dir": str(tmp_path)}
    loaded = engine_process.load_engine(EngineConfig(model=str(models["MODEL"]), **flags))

    async def scenario() -> None:
        async with listening_server(loaded, tool_call_parser="hermes") as server:
            for line in some:
                here = str(server.client.base_url).rstrip("/")
                words = [ADDRESS.sub(here, word) for word in line.words[1:]]
                said = await printed("curl", "-sS", "-w", "\n%{http_code}", *words)
                assert said.endswith("\n200"), f"{line.text}\n{said}"

    asyncio.run(asyncio.wait_for(scenario(), PATIENCE))


async def printed(*command: str) -> str:
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    out, _ = await process.communicate()
    return out.decode()


# --- Python, and what stands in sentences ---------------------------------------------------------------------------

PYTHON = {page: re.findall(r"```python\n(.*?)```", page.read_text(), re.S) for page in PAGES}


@pytest.mark.parametrize("page", [pytest.param(page, id=page.name) for page in PAGES if PYTHON[page]])
def test_python(page: Path, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """A page's examples, one after the other, with a stand-in for the demo model."""
    real = LLM(str(models["MODEL"]), device="cpu", max_total_tokens=256)
    monkeypatch.setattr(tandem, "LLM", lambda model: {"demo": real}[model])
    names: dict[str, object] = {}
    for example in PYTHON[page]:
        exec(example, names)


KT = typer.main.get_command(app)
SERVE_FLAGS = {spelling for each in FLAGS for spelling in each.spellings} | {
    "--plan-only",
    "--help",
    "--help-all",
}


OURS = [
    page for page in PAGES if page.name != "coming-from.md"
]  # which has those of others: tests/cli/test_readme.py


@pytest.mark.parametrize("page", [pytest.param(page, id=page.relative_to(ROOT).as_posix()) for page in OURS])
def test_commands_in_sentences_exist(page: Path) -> None:
    """`kt …` and its flags."""
    for span in (span for span in spans_of(page) if re.match(r"kt [a-z]", span)):
        command, words = KT, span.split()[1:]
        while words and words[0] in getattr(command, "commands", {}):
            command = command.commands[words.pop(0)]
        assert not getattr(command, "commands", None) or not words, span
        known = {spelling for each in command.params for spelling in each.opts} | {"--help"}
        flags = {word.partition("=")[0] for word in words if word.startswith("--")}
        assert flags <= known | (SERVE_FLAGS if command.name in ("serve", "plan") else set()), span
