"""Logits of prompts with images against Transformers, on tiny random models: whole, cut anywhere, decoded behind."""

from __future__ import annotations

import copy
import json
from functools import cache
from pathlib import Path

import pytest
import torch

from tandem import _core
from tandem.kernels.cpu_ops import CpuOps
from tandem.kernels.ops import Ops
from tandem.kernels.reference import TorchOps
from tiny import file_tensors
from tiny_seeing import SEEING, image, oracle, patches, prompt, reference, save_omni, save_seeing, text
from walking import Walk, encoded, pixels_of

WIDE, TALL, LEAST = image(16, 40), image(32, 8, 1), image(8, 8, 2)  # 10, 4 and 1 tokens
ONE = prompt(text(5), WIDE, text(4, 2))
TWO = prompt(text(3), TALL, text(1), WIDE, text(6, 2))
ENDS = prompt(WIDE, text(7), TALL)  # begins and ends with an image
NEAR = prompt(text(2), LEAST, text(1), TALL, text(1, 5), LEAST, text(2))  # Transformers takes touching ones for one
PROMPTS = {"one": ONE, "two": TWO, "ends": ENDS, "near": NEAR, "text": prompt(text(9))}
LONGEST = max(part.rows for part in ONE.images) + 3
MORE = tuple(text(3, 7))
WAYS = ("torch", *_core.supported_tiers())


def operations(way: str) -> Ops:
    return TorchOps() if way == "torch" else CpuOps(_core.WorkerPool([-1, -1]), way)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("seeing")


@pytest.fixture(scope="module")
def walk(directory: Path):
    @cache
    def made(variant: str, way: str) -> tuple[Path, Walk]:
        path = directory / variant
        if not path.exists():
            save_seeing(variant, path)
        return path, Walk(path, operations(way))

    return made


def difference(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got - wanted).abs().max() / wanted.abs().max())


def cases() -> list[object]:
    """Every prompt whole and cut in threes by the best tier; the rest of the product is full."""
    return [
        pytest.param(variant, way, name, marks=() if way == WAYS[-1] or name == "two" else pytest.mark.full)
        for variant in SEEING
        for way in WAYS
        for name in PROMPTS
    ]


@pytest.mark.parametrize(("variant", "way", "name"), cases())
def test_logits_equal_transformers(walk, variant: str, way: str, name: str) -> None:
    path, one = walk(variant, way)
    wanted = reference(path, PROMPTS[name], MORE)
    for size in (64, 3):
        assert difference(one.logits(PROMPTS[name], size, MORE), wanted) < 1e-4, size


def test_a_qwen3_omni_sees(walk, tmp_path: Path) -> None:
    path, _ = walk("qwen3_vl_moe", WAYS[-1])
    save_omni(path, tmp_path / "omni")
    wanted = reference(path, TWO, MORE)
    assert difference(Walk(tmp_path / "omni", operations(WAYS[-1])).logits(TWO, 5, MORE), wanted) < 1e-4


@pytest.mark.parametrize("variant", SEEING)
@pytest.mark.parametrize("size", range(1, LONGEST + 1))
def test_chunks_may_cut_an_image_anywhere(walk, variant: str, size: int) -> None:
    path, one = walk(variant, WAYS[-1])
    assert difference(one.logits(ONE, size, MORE), reference(path, ONE, MORE)) < 1e-4


@pytest.mark.parametrize("variant", SEEING)
def test_turns_and_features_matter(walk, variant: str) -> None:
    """What the others compare would show it if either were ignored."""
    path, one = walk(variant, WAYS[-1])
    wanted = reference(path, ONE)
    one.begin(ONE)
    images = one.sequence.images
    images.features[0] = images.features[0].flip(0)
    assert difference(one.step(len(ONE.ids)), wanted) > 1e-2
    one.begin(ONE)
    places = one.sequence.images.rows._places
    places[:] = torch.arange(len(ONE.ids))[:, None].numpy()
    assert difference(one.step(len(ONE.ids)), wanted) > 1e-2


@pytest.mark.parametrize("variant", SEEING)
def test_bfloat16_is_as_close_to_float32_as_transformers_bfloat16_is(walk, variant: str) -> None:
    """Features; half as much again, since rounding points differ. Behind a router a rounding may choose others."""
    path, one = walk(variant, WAYS[-1])
    source, own = image(40, 56, 5), Walk(path, operations(WAYS[-1]), "bfloat16")
    exact, got = (encoded(each.tower.encode(pixels_of(source))).float()[:, 0] for each in (one, own))
    rounded = copy.deepcopy(oracle(path).model.visual).bfloat16()
    with torch.inference_mode():
        theirs = rounded(patches(source).bfloat16(), grid_thw=torch.tensor([[1, 10, 14]])).pooler_output.float()
    assert (got - exact).pow(2).mean().sqrt() < 1.5 * (theirs - exact).pow(2).mean().sqrt()


@pytest.mark.parametrize("size", [(8, 8), (8, 48), (56, 8), (40, 24), (72, 80)], ids=str)
@pytest.mark.parametrize("variant", SEEING)
def test_features_equal_transformers(walk, variant: str, size: tuple[int, int]) -> None:
    path, one = walk(variant, WAYS[-1])
    source = image(*size, seed=4)
    grid = one.tower.tower.processor.grid(*size)
    with torch.inference_mode():
        theirs = oracle(path).model.visual(patches(source), grid_thw=torch.tensor([grid]))
    levels = [theirs.pooler_output, *(getattr(theirs, "deepstack_features", None) or [])]
    assert difference(encoded(one.tower.encode(pixels_of(source))), torch.stack(list(levels), 1)) < 1e-4


def test_features_of_a_qwen3_omni_equal_transformers(tmp_path: Path) -> None:
    """Its own tower, whose modules have other names."""
    from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import (
        Qwen3OmniMoeVisionEncoderConfig,
    )
    from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeVisionEncoder

    save_seeing("qwen3_vl_moe", tmp_path / "vl")
    save_omni(tmp_path / "vl", tmp_path / "omni")
    keys = json.loads((tmp_path / "omni" / "config.json").read_text())["thinker_config"]["vision_config"]
    keys.pop("model_type")
    theirs = Qwen3OmniMoeVisionEncoder._from_config(Qwen3OmniMoeVisionEncoderConfig(**keys)).eval()
    own = {n.removeprefix("thinker.visual."): t for n, t in file_tensors(tmp_path / "omni").items() if ".visual." in n}
    theirs.load_state_dict(own)
    source = image(40, 56, 5)
    with torch.inference_mode():
        wanted = theirs(patches(source), grid_thw=torch.tensor([[1, 10, 14]]))
    got = encoded(Walk(tmp_path / "omni", TorchOps()).tower.encode(pixels_of(source)))
    assert difference(got, torch.stack([wanted.pooler_output, *wanted.deepstack_features], 1)) < 1e-4
