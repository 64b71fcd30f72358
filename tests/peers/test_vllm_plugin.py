"""benchmarks/peers/vllm_plugin.py: how decoding is counted, and that an engine that ends costs its own rows alone."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks" / "peers"


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    import vllm_plugin

    return vllm_plugin


@pytest.fixture
def run(plugin: ModuleType, tmp_path: Path):
    asked = argparse.Namespace(seconds=600.0, layers=2, turns=1, out=tmp_path / "rows", logs=tmp_path)
    return plugin.Run(asked, "model")


def engines(monkeypatch: pytest.MonkeyPatch, plugin: ModuleType, folder: Path, text: str) -> None:
    """Processes run this program in place of real engines."""
    (folder / "vllm_engines.py").write_text(f"import json, sys\nname = json.loads(sys.argv[2])['name']\n{text}")
    monkeypatch.setattr(plugin, "__file__", str(folder / "vllm_plugin.py"))


SAYS = "print('log line'); print('ANSWER', json.dumps({'ready': 1.0}), flush=True)\n"


def rows(run) -> list[dict[str, object]]:
    return [json.loads(line) for line in run.asked.out.read_text().splitlines()]


def test_prompts_and_warm_steps_are_not_counted(plugin: ModuleType) -> None:
    import vllm_engines

    steps = iter([[("a", 0)], [("a", 1)], [("a", 1), ("b", 1)], *[[("a", 1), ("b", 1)]] * 100])
    vllm_engines.tokens_per_second(lambda: next(steps), 2, 10)
    assert len(list(steps)) == 100 - vllm_engines.WARM - 10


def test_an_engine_that_ends_is_a_row(plugin: ModuleType, run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = f"if name == 'bad': raise RuntimeError('no such library')\n{SAYS}sys.stdin.read()"
    engines(monkeypatch, plugin, tmp_path, text)
    with run.engines("bench", {"bad": ("vllm", {"name": "bad"}), "good": ("kt", {"name": "good"})}) as ready:
        assert list(ready) == ["good"]
    (row,) = rows(run)
    assert row["engine"] == "bad"
    assert "RuntimeError: no such library" in str(row["error"])


def test_turns_go_on_without_a_lost_engine(
    plugin: ModuleType, run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = "for line in sys.stdin:\n    if name == 'bad': sys.exit('lost')\n"
    asked += "    print('ANSWER', json.dumps({'tok_s': 2.0}), flush=True)\n"
    engines(monkeypatch, plugin, tmp_path, SAYS + asked)
    with run.engines("bench", {name: ("kt", {"name": name}) for name in ("bad", "good")}) as ready:
        questions = {(name, 1): (name, {"batch": 1}) for name in ready}
        samples = plugin.in_turns(run, ready, questions, 3)
    assert [each["tok_s"] for each in samples["good", 1]] == [2.0] * 3
    assert len(samples["bad", 1]) == 1
    assert "bad ended" in samples["bad", 1][0]["error"]


def test_ratios_are_of_one_turn(plugin: ModuleType) -> None:
    samples = {
        "ours": [{"tok_s": 10.0}, {"tok_s": 30.0}, {"tok_s": 50.0}],
        "theirs": [{"tok_s": 10.0}, {"tok_s": 20.0}, {"tok_s": 100.0}],
    }
    columns = plugin.compared(samples, "ours", "theirs")
    assert columns["ratio"] == 1.0
    assert columns["spread"] == [0.5, 1.5]
    assert columns["tok_s"] == 30.0
    assert columns["tok_s_kt"] == 20.0


def test_an_error_stands_in_the_row(plugin: ModuleType) -> None:
    columns = plugin.compared({"ours": [{"error": "gone"}], "theirs": [{"tok_s": 1.0}]}, "ours", "theirs")
    assert columns["ratio"] is None
    assert columns["error"] == "gone"


