"""How much code a step of the engine runs through: a reader has to open each of these files."""

from __future__ import annotations

import pytest

from fake_model import request
from replayed_graphs import replayed_engine
from repo_scripts import script_module
from tandem.engine.engine import Engine
from tandem.flags.engine_config import EngineConfig
from tandem.kernels.unread_rows import unread_rows

MOST = {"prefill": (35, 16), "decode": (31, 13)}
"""Files of the package in all, and of engine/ and server/, on a CPU. They may only become fewer."""


@pytest.fixture(autouse=True)
def nothing_unread(monkeypatch) -> None:
    """Rows that other tests of this process could not read are looked at in every step."""
    monkeypatch.setattr(unread_rows, "first_by_slot", {})


@pytest.fixture(scope="module")
def walks(tiny_models):
    unread_rows.first_by_slot.clear()
    engine = Engine(EngineConfig.from_keywords(str(tiny_models["qwen3_moe"]), max_total_tokens=256, device="cpu"))
    return dict(script_module("step_walk").steps(engine, list(range(1, 40))))


@pytest.mark.parametrize("step", MOST)
def test_a_step_runs_through_few_files(walks, step: str) -> None:
    walk = walks[step]
    assert (len(walk.files), len(walk.of_engine)) == MOST[step], sorted(walk.files)


def test_the_story_begins_with_the_step(walks) -> None:
    first = {"engine/engine.py", "engine/scheduler.py", "engine/step/step.py", "models/model.py"}
    assert first <= walks["decode"].files
    assert walks["decode"].row("decode")["lines"] > walks["decode"].row("decode")["engine_lines"] > 0


MOST_ON_GPU = {"prefill": 21, "decode": 15, "decode beside a prefill": 19}
"""Of engine/, in a GPU's runner whose graphs a CPU runs again."""


def test_a_gpus_step_runs_through_few_files_of_the_engine(monkeypatch) -> None:
    script = script_module("step_walk")
    engine, _ = replayed_engine(monkeypatch, num_pages=200)
    files = {name: len(walk.of_engine) for name, walk in script.steps(engine, list(range(2, 18)))}
    for name, prompt in (("a", [2, 3, 4]), ("b", [5, 7, 11, 13] * 4)):
        engine.add(request(name, prompt, max_tokens=60, ignore_eos=True))
        engine.step()
    engine.step()  # which takes a page
    with script.walked() as walk:
        engine.step()
    assert engine._scheduler.in_flight
    files["decode beside a prefill"] = len(walk().of_engine)
    assert files == MOST_ON_GPU
