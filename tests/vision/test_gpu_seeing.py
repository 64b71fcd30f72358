"""Prompts with images on a GPU: features, log-probabilities of what is behind images, and what a second turn costs."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from fake_model import run, token_ids
from gpu import needs_cuda
from seeing_requests import ONE, TWO, request
from tandem.engine.engine import Engine
from tandem.engine.vision.pace import DeviceWatch
from tandem.flags.engine_config import EngineConfig
from tiny_seeing import FAMILIES, IMAGE, Prompt, image, oracle, patches, prompt, reference, save_seeing, text
from walking import encoded, pixels_of

pytestmark = [pytest.mark.gpu, needs_cuda]
LONG = prompt(text(9), image(48, 64, 5), text(20, 4), image(24, 40, 6), text(15, 3))  # 48 and 15 pieces


@pytest.fixture(scope="module", params=FAMILIES)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("seeing") / request.param
    save_seeing(request.param, made)
    return made


def engine_of(path: Path, device: str, **flags: object) -> Engine:
    usual = {"dtype": "bfloat16", "page_size": 16, "max_total_tokens": 1024, "kt_cpuinfer": 2}
    return Engine(EngineConfig.from_keywords(str(path), device=device, **(usual | flags)))


def scores(engine: Engine, asked: Prompt) -> torch.Tensor:
    """Log-probabilities of a prompt's tokens, but for pieces of images and the first."""
    outputs = run(engine, request("a", asked, prompt_logprobs=0, max_tokens=2))["a", 0]
    found = next(each.prompt_logprobs for each in outputs if each.prompt_logprobs)
    return torch.tensor([each.logprob for each in found if each.logprob is not None])


def exact(path: Path, asked: Prompt) -> torch.Tensor:
    logits = reference(path, asked).log_softmax(-1)
    return torch.tensor([float(logits[i - 1, t]) for i, t in enumerate(asked.ids) if i and t != IMAGE])


def rms(a: torch.Tensor, b: torch.Tensor) -> float:
    return math.sqrt(float((a - b).pow(2).mean()))


@pytest.mark.parametrize("chunk", [None, 16])
def test_tokens_behind_images_are_as_likely_as_on_the_cpu(path: Path, chunk: int | None) -> None:
    """Twice the CPU's own rounding error: rounding points differ, and now and then a router chooses others."""
    wanted = exact(path, LONG)
    cpu, gpu = engine_of(path, "cpu"), engine_of(path, "cuda", chunked_prefill_size=chunk)
    allowed = 2 * rms(scores(cpu, LONG), wanted)
    found = rms(scores(gpu, LONG), wanted)
    print(f"{path.name} chunk={chunk}: {found:.3e} of {allowed:.3e}")
    assert found < allowed
    cpu.close()
    gpu.close()


def test_features_are_as_close_as_transformers_own(path: Path) -> None:
    engine, source = engine_of(path, "cuda"), image(48, 64, 5)
    tower = engine._runner._model.tower
    with torch.inference_mode():
        grid = torch.tensor([[1, 12, 16]])
        wanted = oracle(path).model.visual(patches(source), grid_thw=grid).pooler_output
        got = encoded(tower.encode(pixels_of(source)))[:, 0].float().cpu()
    assert rms(got, wanted) < 2**-5 * float(wanted.pow(2).mean().sqrt())
    engine.close()


def test_graphs_and_kernels_answer_alike_behind_an_image(path: Path) -> None:
    """And a second turn reads no image again."""
    graphs, kernels = engine_of(path, "cuda"), engine_of(path, "cuda", disable_cuda_graph=True)
    for name, asked in (("one", ONE), ("two", TWO)):
        found = [token_ids(run(engine, request(name, asked, max_tokens=8))[name, 0]) for engine in (graphs, kernels)]
        assert found[0][:2] == found[1][:2]  # later ones may differ where two are about as likely
    seen = graphs.stats().images
    run(graphs, request("again", LONG))
    again = graphs.stats().images
    found = run(graphs, request("more", prompt(list(LONG.ids[:9]), image(48, 64, 5), text(4, 4))))
    assert again == seen + 2 and graphs.stats().images == again
    if path.name == "qwen3_vl_moe":  # the other goes on at snapshots alone
        assert found["more", 0][-1].cached_tokens >= 48
    graphs.close()
    kernels.close()


def test_pieces_are_measured_by_events() -> None:
    """In their order, and none before it has ended."""
    watch, x = DeviceWatch(), torch.randn(2048, 2048, device="cuda")
    watch.begin()
    for _ in range(3):
        for _ in range(8):
            x = (x @ x).clamp(-1, 1)
        watch.mark()
    measured = watch.measured()
    watch.wait(0)
    measured += watch.measured()
    assert len(measured) == 3 and all(each > 0 for each in measured) and watch.pending() == 0


def test_others_answer_the_same_while_an_image_is_read(path: Path) -> None:
    """Its pieces lie between their graphs, and the tower's seconds are those of the GPU."""
    plain = request("plain", prompt(text(14, 9)), max_tokens=40)
    alone, beside = engine_of(path, "cuda"), engine_of(path, "cuda")
    wanted = token_ids(run(alone, plain)["plain", 0])
    found = run(beside, plain, request("image", LONG))
    assert token_ids(found["plain", 0])[:2] == wanted[:2]
    stats = beside.stats()
    assert stats.images == 2 and 0 < stats.image_seconds < 60
    alone.close()
    beside.close()
