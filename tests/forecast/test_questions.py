"""The lines that docs/plans.md tells people to paste: each is planned on a machine of the sizes and started on a tiny
model of the same family."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from repo_scripts import script_module
from tandem import LLM, SamplingParams
from tandem.bench.architectures import named_keys
from tandem.engine.start.planning import planned
from tandem.flags.engine_config import EngineConfig
from tandem.machine.gpus import parse_nvidia_smi
from tandem.planner.forecast.machine_spec import wished_machine
from tandem.server import engine_process

script: ModuleType = script_module("plan_table")
TINY = {
    "openai/gpt-oss-120b": "gpt_oss", "zai-org/GLM-4.5-Air-FP8": "glm4_moe", "deepseek-ai/DeepSeek-V3": "deepseek_v3",
    "Qwen/Qwen3-Next-80B-A3B-Instruct": "qwen3_next", "Qwen/Qwen3.5-35B-A3B": "qwen3_5_moe_text",
}  # fmt: skip
SMI_NAMES = {"4090": "NVIDIA GeForce RTX 4090", "5090": "NVIDIA GeForce RTX 5090", "3090": "NVIDIA GeForce RTX 3090",
             "4070": "NVIDIA GeForce RTX 4070"}  # fmt: skip


def test_every_question_has_its_line_in_the_page() -> None:
    page = script.PAGE.read_text().splitlines()
    assert len(script.QUESTIONS) >= 8 and all(script.question_line(name) in page for name in script.QUESTIONS)


@pytest.mark.parametrize("name", script.QUESTIONS)
def test_a_line_is_planned_as_the_page_says(name: str, tmp_path: Path) -> None:
    """From config.json alone, on a machine whose GPUs are named as nvidia-smi names them."""
    wish, hub_name, architecture, _ = script.QUESTIONS[name]
    (tmp_path / "config.json").write_text(json.dumps(named_keys(architecture, None)))
    line = script.command(name).replace(f"kt serve {hub_name}", str(tmp_path))
    host = wished_machine(wish, script.ANYTHING)
    gpus = parse_nvidia_smi("\n".join(
        f"{gpu.number}, GPU-{gpu.number}, {SMI_NAMES.get(gpu.name, gpu.name)}, {gpu.memory_bytes >> 20}, "
        f"{gpu.free_bytes >> 20}, 4, 16, {gpu.capability[0]}.{gpu.capability[1]}"
        for gpu in host.gpus if gpu.capability is not None
    ))  # fmt: skip
    assert len(gpus) == len(host.gpus)
    plan = planned(EngineConfig.from_args(shlex.split(line)), replace(host, gpus=gpus)).plan
    said = script.question_of(name).plan()
    assert (plan.gpu is None) == (said.gpu is None) == (not host.gpus)
    assert plan.context_length >= 16000 and plan.max_running_requests == said.max_running_requests
    assert abs(plan.context_length - said.context_length) <= 64  # free memory in whole MiB
    assert all(ledger.left_bytes > -(1 << 20) for ledger in plan.ledgers)


@pytest.mark.parametrize("name", script.QUESTIONS)
def test_a_line_starts_on_a_tiny_model_of_the_family(
    name: str, tiny_models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On this machine's CPU, by the engine that a server starts."""
    monkeypatch.setattr(engine_process, "pin_main_thread", lambda cpu: None)  # this process has other tests to run
    _, hub_name, _, _ = script.QUESTIONS[name]
    line = script.command(name).replace(f"kt serve {hub_name}", str(tiny_models[TINY[hub_name]]))
    loaded = engine_process.load_engine(EngineConfig.from_args([*shlex.split(line), "--device", "cpu"]))
    try:
        params = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
        [answer] = LLM.from_engine(loaded.engine).generate([[5, 6, 7]], params)
        assert len(answer.token_ids) == 3
    finally:
        loaded.engine.close()
