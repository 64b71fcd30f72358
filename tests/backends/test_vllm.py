"""A real vLLM with Tandem's experts, on the CPU: greedy tokens are those of vLLM's own experts.

`make test-vllm` has an environment with vLLM; in others these tests are skipped. Engines run in processes of their own,
which find the plug-in by its entry point.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed: make test-vllm", allow_module_level=True)

import torch
import transformers
from transformers import AutoModelForCausalLM

from hosts import vllm_tokens
from tandem.backends.vllm import plugin
from tiny import save_tiny

RUNNER = Path(vllm_tokens.__file__)
ATTENTION = {"hidden_size": 64, "head_dim": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_moe": ATTENTION,
    "gpt_oss": ATTENTION,
    "deepseek_v3": {
        "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 512,
        "qk_nope_head_dim": 32, "qk_rope_head_dim": 64, "v_head_dim": 32, "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
    },
    "qwen3_next": {
        **ATTENTION, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
    },
}  # fmt: skip
"""Sizes that vLLM's kernels for CPUs take."""
OURS = {"additional_config": {"tandem": {}}}
SECONDS = 600
SCORE_TOLERANCE = 0.25  # logits are below 16 here: bfloat16 is 2 ** -4 apart there, and three layers round in turn


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vllm")
    for name, more in MODELS.items():
        save_tiny(name, folder / name, **more)
    return folder


def results(*wishes: dict[str, Any], **environment: str) -> list[dict[str, Any]]:
    """What engines give that are started one after the other in one process."""
    env = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", **environment}
    command = [sys.executable, str(RUNNER), json.dumps(wishes)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=SECONDS)
    said = (line.partition("RESULT ") for line in done.stdout.splitlines())
    lines = [json.loads(result) for before, mark, result in said if mark and not before]
    assert len(lines) == len(wishes), done.stderr[-3000:]
    return lines


def engine(path: Path, dtype: str = "float32", eager: bool = True, **more: Any) -> dict[str, Any]:
    return {"model": str(path), "dtype": dtype, "enforce_eager": eager, "seed": 0, **more}


@pytest.mark.timeout(SECONDS)
@pytest.mark.parametrize(("name", "eager"), [("qwen3_moe", True), ("qwen3_moe", False), ("deepseek_v3", True)])
def test_tokens_are_vllms_own(models: Path, name: str, eager: bool) -> None:
    """Without torch.compile, and with it. Compiled, vLLM-cpu 0.32's own DeepSeek differs from itself: its latent
    attention gives no numbers."""
    theirs, ours = results(engine(models / name, eager=eager), engine(models / name, eager=eager, **OURS))
    assert "tokens" in theirs, theirs
    assert ours == theirs


@pytest.mark.timeout(SECONDS)
def test_a_model_of_states(models: Path) -> None:
    """vLLM computes delta nets on the CPU in bfloat16 alone. There one rounding changes a greedy token, and which rows
    share a batch changes roundings. So the prompts' own tokens are scored; made-up experts differ by 2 and more."""
    path = models / "qwen3_next"
    theirs, ours = results(*(engine(path, "bfloat16", score=True, **more) for more in ({}, OURS)))
    assert "scores" in theirs, theirs
    for got, wanted in zip(ours["scores"], theirs["scores"], strict=True):
        assert len(got) > 3
        assert max(abs(a - b) for a, b in zip(got, wanted, strict=True)) < SCORE_TOLERANCE


@pytest.mark.timeout(SECONDS)
def test_a_model_whose_experts_vllm_lacks(models: Path) -> None:
    """On the CPU it has none for gpt-oss: Transformers says what is right."""
    eager, compiled = results(*(engine(models / "gpt_oss", eager=eager, **OURS) for eager in (True, False)))
    assert "tokens" in eager, eager
    model = AutoModelForCausalLM.from_pretrained(models / "gpt_oss", dtype=torch.float32)
    assert eager["tokens"] == [greedy(model, prompt) for prompt in vllm_tokens.prompts()]
    assert compiled == eager


def greedy(model: transformers.PreTrainedModel, prompt: list[int]) -> list[int]:
    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(vllm_tokens.NEW_TOKENS):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.timeout(SECONDS)
def test_ranks_have_parts_of_every_expert(models: Path) -> None:
    bound = {"VLLM_CPU_OMP_THREADS_BIND": "|".join(map(str, sorted(os.sched_getaffinity(0))[:2]))}
    if "|" not in bound["VLLM_CPU_OMP_THREADS_BIND"]:
        pytest.skip("two ranks need two CPUs")
    (theirs,) = results(engine(models / "qwen3_moe"))
    (ours,) = results(engine(models / "qwen3_moe", tensor_parallel_size=2, **OURS), **bound)
    assert ours == theirs


@pytest.mark.timeout(SECONDS)
def test_a_killed_worker_ends_the_engine(models: Path) -> None:
    (ours,) = results(engine(models / "qwen3_moe", kill=True, **OURS))
    assert ours["error"] == "EngineDeadError", ours


@pytest.mark.timeout(SECONDS)
def test_what_cannot_be_is_said_before_an_engine_starts(models: Path) -> None:
    path = models / "qwen3_moe"
    wrong = {"additional_config": {"tandem": {"kt_metod": "INT4"}}}
    parallel = engine(path, enable_expert_parallel=True, **OURS)
    asked, divided = results(engine(path, **wrong), parallel)
    assert "no option 'kt_metod'; did you mean kt_method?" in asked["said"]
    assert "leave --enable-expert-parallel out" in divided["said"]


def test_this_version_can_be_joined() -> None:
    assert plugin.seam_differs() == ""


def test_versions_that_differ_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm
    from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    monkeypatch.setattr(vllm, "__version__", "0.99.0")
    monkeypatch.setattr(FusedMoEMethodBase, "apply", lambda self, layer, x: x)
    assert plugin.seam_differs().startswith("--additional-config '{\"tandem\": ...}': vLLM 0.99.0 cannot be joined")
    monkeypatch.undo()
    with monkeypatch.context() as changed:
        changed.delattr(RoutedExperts, "_get_quant_method")
        assert "cannot be joined" in plugin.seam_differs()
    with monkeypatch.context() as changed:
        changed.setattr(importlib.util, "find_spec", lambda _name: None)
        assert "on a CPU 0.32 and newer" in plugin.seam_differs()
