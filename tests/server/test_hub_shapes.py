"""`kt serve` on random checkpoints with the layers of real models, in the hub's own names, keys and formats.

Sizes are the models' own, but for the numbers of layers and experts, and the vocabulary.
"""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from server_harness import ServerProcess, running, spawn_real

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
TOKENS, LONGEST = 6, 2048

SCHEDULING = "--kt-num-gpu-experts 8 --kt-expert-placement-strategy uniform"
FLASH = """
  --kt-weight-path {model} --kt-method MXFP4 --kt-num-gpu-experts 10 --kt-cpuinfer 60 --kt-threadpool-count 2
  --kt-gpu-prefill-token-threshold 4096 --kt-enable-dynamic-expert-update --tensor-parallel-size 1
  --attention-backend flashinfer --mem-fraction-static 0.85 --chunked-prefill-size 2048 --max-prefill-tokens 2048
  --max-running-requests 2 --watchdog-timeout 1200 --disable-shared-experts-fusion --trust-remote-code
  --cuda-graph-bs 1 --cuda-graph-max-bs 1 --disable-radix-cache --skip-server-warmup
"""
FIRST = """
  --kt-cpuinfer 128 --kt-threadpool-count 4 --kt-num-gpu-experts 0 --kt-method AMXINT8 --attention-backend flashinfer
  --trust-remote-code --mem-fraction-static 0.98 --chunked-prefill-size 4096 --max-running-requests 1
  --enable-mixed-chunk --disable-shared-experts-fusion
"""
# name of the model: (model type that must be recognised, the tutorials' flags)
MODELS = {
    "qwen3-30b-a3b": ("qwen3_moe", SCHEDULING),
    "qwen3-next-80b": ("qwen3_next", SCHEDULING),
    "qwen3-next-80b-fp8": ("qwen3_next", SCHEDULING),
    "qwen3.5-35b-a3b": ("qwen3_5_moe", SCHEDULING),
    "gpt-oss-120b": ("gpt_oss", SCHEDULING),
    "deepseek-v4-flash": ("deepseek_v4", FLASH),
    "deepseek-v3": ("deepseek_v3", FIRST),
    "deepseek-v3.2": ("deepseek_v32", FIRST),
    "glm-5": ("glm_moe_dsa", FIRST),
    "glm-4.6": ("glm4_moe", FIRST),
    "glm-4.5-air-fp8": ("glm4_moe", SCHEDULING),
    "minimax-m2": ("minimax_m2", SCHEDULING),
    "kimi-k2.5": ("kimi_k25", FIRST),
    "hy3": ("hy_v3", SCHEDULING),
    "mimo-v2-flash": ("mimo_v2_flash", SCHEDULING),
    "gemma-4-26b-a4b": ("gemma4", SCHEDULING),
    "laguna-xs": ("laguna", SCHEDULING),
}


def written(name: str, path: Path) -> Path:
    command = [sys.executable, str(BENCHMARKS / "random_model.py"), name, str(path)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return path


@pytest.fixture(params=MODELS)
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, ServerProcess]]:
    model = written(request.param, tmp_path / "model")
    flags = shlex.split(MODELS[request.param][1].format(model=model))
    limits = "--context-length", str(LONGEST), "--max-total-tokens", str(LONGEST)
    try:
        with running(spawn_real(model, tmp_path / "log", *flags, *limits)) as found:
            yield request.param, found
    finally:
        shutil.rmtree(model)


def ask(server: ServerProcess, path: str, body: dict[str, object]) -> dict[str, object]:
    answer = httpx.post(server.url + path, json=body, timeout=300)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_real_layer_shape_answers(server: tuple[str, ServerProcess]) -> None:
    """Greedy text is the same twice; probabilities are numbers, of tokens that differ; no key of the hub is unknown."""
    name, process = server
    sampling = {"temperature": 0.0, "max_new_tokens": TOKENS, "ignore_eos": True}
    body = {"input_ids": list(range(60, 100)), "sampling_params": sampling, "return_logprob": True}
    first, second = (ask(process, "/generate", body) for _ in range(2))
    assert first["output_ids"] == second["output_ids"] and len(first["output_ids"]) == TOKENS
    chosen = [entry[0] for entry in first["meta_info"]["output_token_logprobs"]]
    assert len(chosen) == TOKENS and all(-12 < value <= 0 for value in chosen)
    chat = {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": TOKENS, "ignore_eos": True}
    assert (
        ask(process, "/v1/chat/completions", {"model": "m", **chat})["usage"]["completion_tokens"] == TOKENS
    )
    assert process.info()["model_type"] == MODELS[name][0]
    assert "is not understood" not in process.log.read_text(), json.dumps(name)
