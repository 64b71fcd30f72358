"""What a checkpoint lacks is said before loading: by headers alone, and exactly where loading would have said it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from gguf_files import write_gguf
from quantised_models import BLOCKS, CHOICES, save_quantised
from sessions import plan
from tandem.checkpoint import load_model_config, open_checkpoint, with_experts
from tandem.engine.start.loader import load_parts
from tandem.errors import CheckpointError
from tandem.flags.engine_config import EngineConfig
from tandem.kernels.reference import TorchOps
from tandem.models import build, check_headers
from tiny import VARIANTS, TinyModels, file_tensors

DAMAGED_TENSORS = 2  # of each variant, in each of two ways


def said(run: Callable[[], object]) -> str | None:
    """Its CheckpointError; None: it went through."""
    try:
        run()
    except CheckpointError as error:
        return str(error)
    return None


def both(path: Path) -> tuple[str | None, str | None]:
    """What the check says, and what loading says."""
    config, checkpoint = load_model_config(path), open_checkpoint(path)
    return (
        said(lambda: check_headers(config, plan(), checkpoint)),
        said(lambda: build(config, plan(), checkpoint, TorchOps())),
    )


def copied(source: Path, target: Path, tensors: dict[str, Tensor]) -> Path:
    target.mkdir()
    for file in source.glob("*.json"):
        if not file.name.endswith(".index.json"):
            (target / file.name).write_bytes(file.read_bytes())
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, target / "model.safetensors")
    return target


@pytest.mark.parametrize(
    "variant", [pytest.param(each, marks=[pytest.mark.full] if "-" in each else []) for each in VARIANTS]
)
def test_it_says_what_loading_says(tiny_models, tmp_path: Path, variant: str) -> None:
    source = tiny_models[variant]
    assert both(source) == (None, None)
    tensors, dice = file_tensors(source), random.Random(variant)
    noticed = 0
    for number, name in enumerate(dice.sample(sorted(tensors), DAMAGED_TENSORS)):
        less = {other: tensor for other, tensor in tensors.items() if other != name}
        checked, loaded = both(copied(source, tmp_path / f"less-{number}", less))
        assert checked == loaded
        longer = torch.cat([tensors[name]] * 2)
        checked, loaded = both(copied(source, tmp_path / f"longer-{number}", tensors | {name: longer}))
        assert checked == loaded
        noticed += checked is not None and name.rpartition(".")[0].split(".")[-1] in checked
    assert noticed  # a tensor that no text needs, as a draft layer's, may be of any shape


@pytest.fixture(scope="module")
def model_of_blocks(tmp_path_factory) -> Iterator[Path]:
    """A model whose sizes are multiples of a block."""
    family, changes = VARIANTS["glm4_moe"]
    VARIANTS["glm4_moe-blocks"] = (family, changes | BLOCKS)
    yield TinyModels(tmp_path_factory.mktemp("blocks"))["glm4_moe-blocks"]
    del VARIANTS["glm4_moe-blocks"]


@pytest.mark.parametrize("name", CHOICES)
def test_codes_are_checked_without_being_read(model_of_blocks: Path, tmp_path: Path, name: str) -> None:
    quantised, _ = save_quantised(model_of_blocks, tmp_path, CHOICES[name])
    config, checkpoint = load_model_config(quantised), open_checkpoint(quantised)
    check_headers(config, plan(), checkpoint)
    with pytest.raises(CheckpointError, match=r"config.json implies"):
        check_headers(replace(config, hidden=2 * config.hidden), plan(), checkpoint)


@pytest.mark.parametrize("kind", ["fused", "gguf", "experts elsewhere"])
def test_a_missing_layer_is_named(tiny_models, tmp_path: Path, kind: str) -> None:
    path = tiny_models.fused("qwen3_moe") if kind == "fused" else tiny_models["qwen3_moe"]
    if kind == "gguf":
        path = write_gguf(path, tmp_path / "whole.gguf")
    config, checkpoint = load_model_config(path), open_checkpoint(path)
    if kind == "experts elsewhere":
        checkpoint = with_experts(checkpoint, str(tiny_models.fused("qwen3_moe")), config)
    check_headers(config, plan(), checkpoint)
    count = len(config.layers)
    deeper = replace(config, layers=(*config.layers, config.layers[-1]))
    with pytest.raises(CheckpointError, match=rf"model\.layers\.{count}\."):
        check_headers(deeper, plan(), checkpoint)


def test_a_start_ends_before_the_first_layer(tiny_models, tmp_path: Path) -> None:
    """The last layer's last matrix has swapped sizes: it was found when all others were packed."""
    tensors = file_tensors(tiny_models["olmoe"])
    name = max(name for name in tensors if name.endswith("down_proj.weight"))
    path = copied(tiny_models["olmoe"], tmp_path / "swapped", tensors | {name: tensors[name].T})
    layers: list[str] = []
    config = EngineConfig(model=str(path), device="cpu")
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        load_parts(config, lambda what, done, total: layers.append(what))
    assert not layers


def test_no_table_of_positions_is_made(tiny_models, monkeypatch) -> None:
    """Of a model with a million positions they would take a gigabyte."""
    config, checkpoint = load_model_config(tiny_models["llama"]), open_checkpoint(tiny_models["llama"])
    sizes: list[int] = []
    real = torch.arange
    monkeypatch.setattr(
        torch, "arange", lambda *given, **named: sizes.append(given[0]) or real(*given, **named)
    )
    check_headers(config, replace(plan(), context_length=1 << 20), checkpoint)
    assert sizes
    assert max(sizes) < 1 << 12


def test_a_wrong_type_is_noticed(tiny_models, tmp_path: Path) -> None:
    tensors = file_tensors(tiny_models["olmoe"])
    name = "model.layers.0.input_layernorm.weight"
    path = copied(tiny_models["olmoe"], tmp_path / "typed", tensors | {name: tensors[name].to(torch.int32)})
    checked, loaded = both(path)
    assert checked == loaded
    assert checked is not None
    assert "is stored as I32" in checked
