"""Programs that measure servers, against the demo model: every request is answered, and what they count is right."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from server_harness import ServerProcess

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]

BOOK = "http://a.book.that.nobody.fetches/book.txt"
SENTENCES = ["The river runs past the old mill.", "Nobody knows who built it.", "In winter the wheel stands still."]


def run(module: str, arguments: list[str], home: Path) -> str:
    """What the program says. It must end well, without a network."""
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed: `make test-all` leaves it out where it needs other versions")
    command = [sys.executable, "-m", module, *arguments]
    environment = os.environ | {"HOME": str(home), "HF_HUB_OFFLINE": "1", "NO_COLOR": "1"}
    done = subprocess.run(command, cwd=home, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def put_book(home: Path) -> None:
    """Where llama-benchy keeps a book that it has downloaded."""
    folder = home / ".cache" / "llama-benchy"
    folder.mkdir(parents=True)
    (folder / f"{hashlib.md5(BOOK.encode()).hexdigest()}.txt").write_text(" ".join(SENTENCES * 200))


def test_llama_benchy(demo_server: ServerProcess, demo_dir: Path, tmp_path: Path) -> None:
    put_book(tmp_path)
    said = run("llama_benchy", [
        "--base-url", f"{demo_server.url}/v1", "--model", "demo", "--tokenizer", str(demo_dir), "--book-url", BOOK,
        "--pp", "64", "--tg", "8", "--exact-tg", "--depth", "0", "32", "--runs", "2", "--concurrency", "1", "2",
        "--enable-prefix-caching", "--exit-on-first-fail", "--skip-coherence", "--format", "json", "--save-result",
        "result.json",
    ], tmp_path)  # fmt: skip
    rows = json.loads((tmp_path / "result.json").read_text())["benchmarks"]
    assert {(row["context_size"], row["concurrency"]) for row in rows} == {(0, 1), (0, 2), (32, 1), (32, 2)}, said
    for row in rows:
        assert row["tg_throughput"]["mean"] > 0


def test_guidellm(demo_server: ServerProcess, demo_dir: Path, tmp_path: Path) -> None:
    for route, profile in (
        ("/v1/completions", "kind=synchronous"), ("/v1/chat/completions", "kind=concurrent,streams=3"),
    ):  # fmt: skip
        report = tmp_path / "report.json"
        run("guidellm", [
            "run", "--backend", f"kind=openai_http,target={demo_server.url},model=demo,request_format={route}",
            "--profile", profile, "--constraint", "kind=max_requests,count=6", "--tokenizer",
            json.dumps({"kind": "hf_auto", "model": str(demo_dir)}), "--data",
            "kind=synthetic_text,prompt_tokens=24,output_tokens=8", "--output", f"kind=json,path={report}",
            "--disable-console",
        ], tmp_path)  # fmt: skip
        check_report(json.loads(report.read_text()), 6)


def check_report(report: dict[str, Any], requests: int) -> None:
    """All were answered, with as many tokens as were asked for."""
    (benchmark,) = report["benchmarks"]
    assert benchmark["requests"]["errored"] == benchmark["requests"]["incomplete"] == []
    answered = benchmark["requests"]["successful"]
    assert len(answered) == requests
    assert [each["output_tokens"] for each in answered] == [8] * requests
