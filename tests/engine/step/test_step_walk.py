"""How much code a step of the engine runs through: a reader has to open each of these files."""

from __future__ import annotations

import pytest

from repo_scripts import script_module
from tandem.config import EngineConfig
from tandem.engine.engine import Engine

MOST = {"prefill": (36, 19), "decode": (33, 17)}
"""Files of the package in all, and of engine/ and server/, on a CPU. They may only become fewer."""


@pytest.fixture(scope="module")
def walks(tiny_models):
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
