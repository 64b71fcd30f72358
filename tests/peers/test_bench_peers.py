"""benchmarks/peers: engines in turns, one table, and how a missing one is installed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks" / "peers"
WISH = (Path("m.gguf"), Path("m"), 256, 64, 2)
STAMP = {"machine": "here", "commit": "c", "command": "x", "date": "2026-11-29"}


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> tuple[ModuleType, ModuleType]:
    monkeypatch.syspath_prepend(str(FOLDER))
    import compare

    import peers

    return compare, peers


def test_engines_are_asked_in_turns(modules, monkeypatch: pytest.MonkeyPatch) -> None:
    compare, peers = modules
    asked = list[str]()

    def engine(name: str, rates: list[tuple[float, float]]):
        def measure(wish):
            asked.append(name)
            return peers.Rates("1", *rates.pop(0))

        return measure

    def missing(wish):
        raise peers.Missing("pip install it")

    monkeypatch.setitem(compare.PEERS, "kt", engine("kt", [(100.0, 10.0), (300.0, 30.0), (200.0, 20.0)]))
    monkeypatch.setitem(compare.PEERS, "llama.cpp", engine("llama.cpp", [(50.0, 8.0)] * 3))
    monkeypatch.setitem(compare.PEERS, "vllm", missing)
    found, why = compare.in_turns(["kt", "llama.cpp", "vllm"], peers.Wish(*WISH), 3)
    assert asked == ["kt", "llama.cpp"] * 3 and why == {"vllm": "pip install it"}
    ours, other = compare.rows(found, peers.Wish(*WISH), STAMP)
    assert (ours["prompt_tok_s"], ours["tok_s"], ours["ratio"]) == (200.0, 20.0, [1.0, 1.0])
    assert [other[name] for name in ("peer", "version", "ratio")] == ["llama.cpp", "1", [4.0, 2.5]]
    shown = compare.table([ours, other], why)
    assert "| llama.cpp | 1 | 50.0 | 8.0 | 4.00 ×, 2.50 × |" in shown and "vllm is missing: pip install it" in shown


def test_a_missing_engine_says_how_it_is_installed(modules, monkeypatch: pytest.MonkeyPatch) -> None:
    _, peers = modules
    monkeypatch.setattr(peers.shutil, "which", lambda _name: None)
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda _name: None)
    for name in set(peers.PEERS) - {"kt"}:
        with pytest.raises(peers.Missing, match="pip install"):
            peers.PEERS[name](peers.Wish(*WISH))


def test_llama_bench_is_read(modules, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its JSON has a row for the prompt and one for the answer."""
    _, peers = modules
    rows = [{"build_number": 7, "n_gen": 0, "avg_ts": 123.0}, {"build_number": 7, "n_gen": 64, "avg_ts": 9.5}]
    program = tmp_path / "llama-bench"
    program.write_text(f"#!{sys.executable}\nprint('''{json.dumps(rows)}''')\n")
    program.chmod(0o755)
    monkeypatch.setattr(peers.shutil, "which", lambda _name: str(program))
    assert peers.llama_cpp(peers.Wish(*WISH)) == peers.Rates("7", 123.0, 9.5)


def test_an_engine_that_fails_is_missing_with_its_last_words(modules, monkeypatch: pytest.MonkeyPatch) -> None:
    _, peers = modules
    monkeypatch.setattr(peers.sys, "executable", "/bin/false")
    with pytest.raises(peers.Missing, match="it ended with 1"):
        peers.kt(peers.Wish(*WISH))
