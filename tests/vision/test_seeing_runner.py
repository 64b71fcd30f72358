"""Images in a GPU's runner whose graphs a CPU runs again: what is replayed, what is not, and where one is read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fake_model import run, token_ids
from plans import gpu_plan
from replayed_graphs import NotedHandoff, NotedStart, without_gpu
from seeing_requests import ONE, PLAIN, PROMPTS, check, request
from tandem.engine.engine import Engine
from tandem.engine.protocol import SamplingSettings
from tandem.engine.sequence import Chunk, Sequence, show
from tandem.engine.start.loader import load_parts
from tandem.flags.engine_config import EngineConfig
from tiny_seeing import save_seeing


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("seeing") / "qwen3_vl_moe"
    save_seeing("qwen3_vl_moe", made)
    return made


def replayed(patch: pytest.MonkeyPatch, path: Path) -> tuple[Engine, list[str]]:
    calls: list[str] = []
    config = EngineConfig.from_keywords(
        str(path), dtype="float32", kt_cpuinfer=2, page_size=4, max_total_tokens=400, device="cpu"
    )
    parts = load_parts(config)
    without_gpu(patch, calls)
    gpu = gpu_plan(graph_sizes=(1, 2, 4))
    plan = replace(parts.plan, gpu=gpu, max_step_tokens=64)
    hooks = NotedStart(calls, True, False)
    engine = Engine.from_parts(replace(parts, plan=plan, handoff=NotedHandoff(calls), begin_step=hooks))
    engine._scheduler.pace.slice_seconds = lambda share=0.0: 0.0
    return engine, calls


def test_answers_behind_images_are_replayed(monkeypatch, path) -> None:
    engine, calls = replayed(monkeypatch, path)
    outputs = run(engine, *(request(name, asked) for name, asked in PROMPTS.items()))
    for name, asked in PROMPTS.items():
        assert outputs[name, 0][-1].finish_reason == "length", outputs[name, 0][-1]
        check(path, asked, token_ids(outputs[name, 0]))
    assert any(call.startswith("replay") for call in calls) and engine.stats().images == 2
    engine.close()


def test_an_image_is_read_between_graphs_on_their_stream(monkeypatch, path) -> None:
    engine, calls = replayed(monkeypatch, path)
    engine.add(request("plain", PLAIN, max_tokens=60))
    while not engine.step():
        pass
    engine.add(request("one", ONE))
    engine.step()
    calls.clear()
    engine.step()
    assert "replay 1" in calls and engine._encoder.under_way
    assert not any(call.startswith("aside") for call in calls)
    found = run(engine)
    check(path, ONE, token_ids(found["one", 0]))
    engine.close()


def test_a_pass_with_pieces_waits_for_what_put_them_together(monkeypatch, path) -> None:
    """That was done on the stream of steps, for which other passes do not wait."""
    engine, calls = replayed(monkeypatch, path)
    for asked, wanted in ((ONE, "aside after"), (PLAIN, "aside")):
        sequence = Sequence(
            "a", 0, list(asked.ids), SamplingSettings(), arrival=0, max_len=64, page_size=4, seed=0
        )
        show([sequence], asked.images, engine.model_config.vision)
        if sequence.images is not None:
            sequence.images.features[0] = torch.zeros(10, 3, 72)
        sequence.add_pages(list(range(16)))
        calls.clear()
        task = engine._runner.pause([Chunk(sequence, 12, 0)])
        assert calls[calls.index("hold") - 1] == wanted
        task.drop()
    engine.close()
