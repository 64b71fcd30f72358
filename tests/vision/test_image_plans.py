"""Plans: lines and memory of images; files of a checkpoint that say how they are read."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from plans import machine, with_gpu
from seeing_requests import ONE
from tandem.architectures.load import config_from_dict, load_config
from tandem.checkpoint import load_model_config
from tandem.engine.vision.spans import check_images
from tandem.errors import RequestError
from tandem.flags.engine_config import EngineConfig
from tandem.planner.choices.images import TEXT_ONLY, seeing, why_blind
from tandem.planner.resolve import resolve
from tandem.planner.vision_costs import (
    FEATURE_BYTES,
    feature_bytes,
    image_flops,
    image_seconds,
    pixel_bytes,
    tower_params,
)
from tandem.spec.vision import Processor, Tower
from tiny import file_tensors
from tiny_seeing import PROCESSOR, SEEING, save_seeing

QWEN3_VL = Tower(
    depth=27, hidden=1152, heads=16, width=4304, side=48, out=2048, placeholder=151655, start=151652, end=151653,
    axes=(0,) * 64, deep=(8, 16, 24),
)  # fmt: skip


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("seeing")
    for variant in SEEING:
        save_seeing(variant, directory / variant)
    return {variant: directory / variant for variant in SEEING}


@pytest.mark.parametrize("variant", SEEING)
def test_weights_are_counted_as_they_are_stored(paths, variant: str) -> None:
    tensors = {name: each for name, each in file_tensors(paths[variant]).items() if "visual" in name}
    positions = tensors.pop("model.visual.pos_embed.weight")
    tower = load_model_config(paths[variant]).tower
    assert tower_params(tower) == sum(each.numel() for each in tensors.values())
    assert positions.numel() == tower.side**2 * tower.hidden


def test_operations_of_a_megapixel() -> None:
    """Of the published tower: 4096 patches, 1024 tokens."""
    linear, attention = image_flops(QWEN3_VL)
    assert linear == pytest.approx(3.6e12, rel=0.05) and attention == 4 * 4096**2 * 1152 * 27
    assert image_seconds(QWEN3_VL, "amx", 16, "") == pytest.approx(2.4, abs=0.3)
    assert image_seconds(QWEN3_VL, "amx", 16, "NVIDIA H200") == pytest.approx(0.0115, abs=0.002)
    assert feature_bytes(QWEN3_VL, "bfloat16") == 16384


def planned(path: Path, **flags: object):
    config = EngineConfig.from_keywords(str(path), device="cpu", **flags)
    return resolve(config, load_model_config(path), machine())


def test_a_plan_names_the_tower_and_its_memory(paths) -> None:
    plan, without = planned(paths["qwen3_vl_moe"]), planned(paths["qwen3_vl_moe"], disable_vision=True)
    said = {each.name: each for each in plan.decisions}["images"]
    assert said.value == "1024 tokens each at most" and "for a megapixel" in said.reason and plan.image_tokens == 1024
    entries = {entry.name: entry.nbytes for entry in plan.ledgers[0].entries}
    assert entries["vision tower"] > 0 and entries["image features"] == FEATURE_BYTES and entries["image scratch"] > 0
    assert entries["images of requests"] == plan.image_pixel_bytes == pixel_bytes(machine().available_memory)
    assert plan.blind == "" and without.blind == "--disable-vision was given" and without.image_tokens == 0
    named = {entry.name for entry in without.ledgers[0].entries}
    assert not {"vision tower", "image features", "images of requests"} & named
    workspace = [entries["workspace"], {e.name: e.nbytes for e in without.ledgers[0].entries}["workspace"]]
    assert workspace[0] == workspace[1]
    assert planned(paths["qwen3_vl_moe"], image_max_tokens=300).image_tokens == 300


@pytest.mark.parametrize("gib, mib", [(4, 256), (16, 512), (64, 2048), (1024, 2048)])
def test_pixels_of_requests_have_a_share_of_memory(gib: int, mib: int) -> None:
    assert pixel_bytes(gib << 30) == mib << 20


SEVERAL = {
    "tensor_parallel_size": "ranks read no images yet; leave --tp out",
    "pipeline_parallel_size": "stages read no images yet; leave --pipeline-parallel-size out",
}  # fmt: skip


@pytest.mark.parametrize("flag", SEVERAL)
def test_ranks_refuse_images_by_name(paths, flag: str) -> None:
    """Text is served; a request with an image is told which flag stands in the way."""
    config = EngineConfig.from_keywords(str(paths["qwen3_vl_moe"]), device="cpu", **{flag: 2})
    model = load_model_config(paths["qwen3_vl_moe"])
    why = why_blind(config, model)
    assert why == SEVERAL[flag] and seeing(config, model).vision is None
    with pytest.raises(RequestError, match=f"images are not read: {why}"):
        check_images(ONE.images, list(ONE.ids), None, why)


def test_a_plan_of_text_says_nothing_of_images(tiny_models) -> None:
    plan = planned(tiny_models["qwen3_moe"])
    assert plan.blind == TEXT_ONLY and "images" not in {each.name for each in plan.decisions}


def test_what_files_say_of_pixels(paths, tmp_path) -> None:
    assert load_model_config(paths["qwen3_vl_moe"]).tower.processor == PROCESSOR
    config = json.loads((paths["qwen3_vl_moe"] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load_config(tmp_path).tower.processor == Processor(patch=4)
    nested = {"image_processor": {"min_pixels": 1024, "max_pixels": 4096, "image_mean": [0.1, 0.2, 0.3]}}
    (tmp_path / "processor_config.json").write_text(json.dumps(nested))
    found = load_config(tmp_path).tower.processor
    assert (found.min_pixels, found.max_pixels, found.mean) == (1024, 4096, (0.1, 0.2, 0.3))


WRONG = {
    "patch_size": 14, "do_rescale": False, "resample": 2, "rescale_factor": 1.0, "image_std": [0.5, 0.0, 0.5],
    "image_mean": "grey", "size": {"shortest_edge": 100, "longest_edge": 50},
}  # fmt: skip


@pytest.mark.parametrize("key", WRONG)
def test_pixels_that_are_not_made_so_are_refused_by_name(paths, tmp_path, key: str) -> None:
    (tmp_path / "config.json").write_text((paths["qwen3_5_moe"] / "config.json").read_text())
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({key: WRONG[key]}))
    model = load_config(tmp_path)
    assert model.tower is None and model.blind.startswith("preprocessor_config.json") and key in model.blind
    assert any(said.endswith(model.blind) for said in planned(tmp_path).notices)


TOWERS = {
    "hidden_act": "relu", "num_position_embeddings": 35, "deepstack_visual_indexes": [5], "out_hidden_size": 71,
    "num_heads": 5, "in_channels": 1,
}  # fmt: skip


@pytest.mark.parametrize("key", TOWERS)
def test_towers_that_are_not_computed_are_refused_by_name(paths, key: str) -> None:
    config = json.loads((paths["qwen3_vl_moe"] / "config.json").read_text())
    config["vision_config"][key] = TOWERS[key]
    model = config_from_dict(config)
    assert model.tower is None and model.blind.startswith("config.json: vision_config")


def test_parts_of_a_position_alternate_as_long_as_they_have_pairs(paths) -> None:
    config = json.loads((paths["qwen3_vl_moe"] / "config.json").read_text())
    config["text_config"]["rope_parameters"]["mrope_section"] = [6, 4, 2]
    assert config_from_dict(config).tower.axes == (0, 1, 2, 0, 1, 2, 0, 1, 0, 0, 1, 0)
    config["text_config"]["rope_parameters"]["mrope_section"] = [12]
    assert "mrope_section" in config_from_dict(config).blind


def test_a_cap_bounds_both_limits() -> None:
    assert QWEN3_VL.capped(256).processor.max_pixels == 256 * 32**2
    small = replace(QWEN3_VL, processor=replace(QWEN3_VL.processor, min_pixels=1 << 20)).capped(16).processor
    assert small.min_pixels == small.max_pixels == 16 * 32**2


def test_beside_a_gpu_pixels_are_the_server_s(paths) -> None:
    """The tower is the GPU's; both ledgers lose theirs without images."""
    config = EngineConfig.from_keywords(str(paths["qwen3_vl_moe"]))
    model = load_model_config(paths["qwen3_vl_moe"])
    plan = resolve(config, model, with_gpu())
    places = [{entry.name: entry.nbytes for entry in ledger.entries} for ledger in plan.ledgers]
    gpu, ram = sorted(places, key=lambda names: "vision tower" not in names)
    assert "images of requests" not in gpu and "vision tower" not in ram
    assert ram["images of requests"] == plan.image_pixel_bytes > 0
    blind = resolve(replace(config, disable_vision=True), model, with_gpu())
    assert blind.image_pixel_bytes == 0
    assert not any(entry.name == "images of requests" for ledger in blind.ledgers for entry in ledger.entries)
