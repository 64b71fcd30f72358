"""`kt serve` on random checkpoints with the layers of real models, in the hub's own names, keys and formats.

Sizes are the models' own, but for the numbers of layers and experts, and the vocabulary.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from server_harness import ServerProcess, plain, running, spawn_real

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
MODELS = {
    "qwen3-30b-a3b": SCHEDULING,
    "qwen3-next-80b": SCHEDULING,
    "qwen3-next-80b-fp8": SCHEDULING,
    "qwen3.5-35b-a3b": SCHEDULING,
    "gpt-oss-120b": SCHEDULING,
    "deepseek-v4-flash": FLASH,
    "deepseek-v3": FIRST,
    "deepseek-v3.2": FIRST,
    "glm-5": FIRST,
    "glm-4.6": FIRST,
    "glm-4.5-air-fp8": SCHEDULING,
    "minimax-m2": SCHEDULING,
    "kimi-k2.5": FIRST,
    "hy3": SCHEDULING,
    "mimo-v2-flash": SCHEDULING,
    "gemma-4-26b-a4b": SCHEDULING,
    "laguna-xs": SCHEDULING,
}


def written(name: str, path: Path) -> Path:
    command = [sys.executable, str(BENCHMARKS / "random_model.py"), name, str(path)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return path


@pytest.fixture(params=MODELS)
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ServerProcess]:
    model = written(request.param, tmp_path / "model")
    flags = shlex.split(MODELS[request.param].format(model=model))
    limits = "--context-length", str(LONGEST), "--max-total-tokens", str(LONGEST)
    try:
        with running(spawn_real(model, tmp_path / "log", *flags, *limits)) as found:
            yield found
    finally:
        shutil.rmtree(model)


def ask(server: ServerProcess, path: str, body: dict[str, object]) -> dict[str, object]:
    answer = plain.post(server.url + path, json=body, timeout=300)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_real_layer_shape_answers(server: ServerProcess) -> None:
    """Greedy text is the same twice; probabilities are numbers, of tokens that differ; no key of the hub is unknown."""
    sampling = {"temperature": 0.0, "max_new_tokens": TOKENS, "ignore_eos": True}
    body = {"input_ids": list(range(60, 100)), "sampling_params": sampling, "return_logprob": True}
    first, second = (ask(server, "/generate", body) for _ in range(2))
    assert first["output_ids"] == second["output_ids"] and len(first["output_ids"]) == TOKENS
    chosen = [entry[0] for entry in first["meta_info"]["output_token_logprobs"]]
    assert len(chosen) == TOKENS and all(-12 < value <= 0 for value in chosen)
    chat = {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": TOKENS, "ignore_eos": True}
    assert ask(server, "/v1/chat/completions", {"model": "m", **chat})["usage"]["completion_tokens"] == TOKENS
    assert "is not understood" not in server.log.read_text()
