"""Programs that write other programs' tensors: their names in `quantization_config` do not stand in the way."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

import stored_formats as formats
from quantised_models import experts_only, save_quantised
from sessions import Session, ours
from tandem.checkpoint import open_checkpoint
from tandem.checkpoint.quant_hints import AUTO_ROUND, METHODS
from tandem.errors import CheckpointError
from tandem.formats.codes import WeightCodes
from tandem.formats.reference import decoded
from tiny import VARIANTS, save_tiny

N, K = 128, 256
MODULE = "model.layers.3.mlp.experts.7.gate_proj"
WEIGHT = torch.randn(N, K, generator=torch.Generator().manual_seed(3)) * 0.1


def read(path, tensors, config, module=MODULE):
    save_file({module + k: v.contiguous().clone() for k, v in tensors.items()}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps({"quantization_config": config}))
    weight = open_checkpoint(path).weight(module, (N, K))
    return decoded(weight) if isinstance(weight, WeightCodes) else weight.float()


def auto_round(packing: str | None, symmetric: bool, method: str = "auto-round") -> dict[str, object]:
    config = {
        "quant_method": method,
        "bits": 4,
        "group_size": 32,
        "sym": symmetric,
        "data_type": "int",
        "iters": 200,
    }
    return config | ({} if packing is None else {"packing_format": packing})


@pytest.mark.parametrize("method", AUTO_ROUND)
@pytest.mark.parametrize("packing", ["auto_round:auto_gptq", "auto_gptq"])
def test_auto_round_writes_gptqs_tensors(tmp_path, method, packing):
    """Zero points less 1, as in GPTQ's first version."""
    made = formats.gptq(WEIGHT, symmetric=False)
    assert torch.equal(read(tmp_path, made.tensors, auto_round(packing, False, method)), made.expected)


def test_auto_round_writes_awqs_tensors(tmp_path):
    made = formats.awq(WEIGHT)
    assert torch.equal(read(tmp_path, made.tensors, auto_round("auto_round:auto_awq", False)), made.expected)


@pytest.mark.parametrize("packing", [None, "auto_round:gptqmodel"])
@pytest.mark.parametrize("version", [1, 2])
def test_symmetric_files_tell_their_version_themselves(tmp_path, packing, version):
    made = formats.gptq(WEIGHT, version=version)
    assert torch.equal(read(tmp_path, made.tensors, auto_round(packing, True)), made.expected)


def test_zero_points_of_an_unknown_version_are_refused(tmp_path):
    made = formats.gptq(WEIGHT, symmetric=False)
    with pytest.raises(CheckpointError, match="may be stored less 1 or not"):
        read(tmp_path, made.tensors, auto_round("auto_round:gptqmodel", False))


def test_a_model_of_auto_round_is_that_of_its_numbers(tmp_path, monkeypatch):
    """With routers of their own precision, which `extra_config` has."""
    family, sizes = VARIANTS["qwen3_moe"]
    monkeypatch.setitem(VARIANTS, "words", (family, sizes | {"hidden_size": 64, "moe_intermediate_size": 32}))
    save_tiny("words", tmp_path / "source")
    quantised, plain = save_quantised(tmp_path / "source", tmp_path, experts_only("gptq"))
    config = json.loads((quantised / "config.json").read_text())
    config["quantization_config"] = auto_round("auto_round:auto_gptq", True) | {
        "extra_config": {"model.layers.0.mlp.gate": {"bits": 16}}
    }
    (quantised / "config.json").write_text(json.dumps(config))
    assert all(torch.equal(a, b) for a, b in zip(ours(Session(quantised)), ours(Session(plain)), strict=True))


QUARK = {"quant_method": "quark", "quant_mode": "eager_mode", "export": {"pack_method": "reorder"}}


def inverse_to_scale(made: formats.Made) -> dict[str, torch.Tensor]:
    return {k.removesuffix("_inv"): v for k, v in made.tensors.items()}


@pytest.mark.parametrize(
    "name", ["fp8 per tensor", "fp8 per channel", "int8 per channel", "fp8 blocks", "mxfp4 packed"]
)
def test_quark_writes_known_tensors(tmp_path, name):
    made = formats.MAKERS[name](WEIGHT)
    tensors = {k.replace("weight_packed", "weight"): v for k, v in inverse_to_scale(made).items()}
    assert torch.equal(read(tmp_path, tensors, QUARK), made.expected)


def test_quarks_rotations_are_refused(tmp_path):
    made = formats.MAKERS["fp8 per channel"](WEIGHT)
    with pytest.raises(CheckpointError, match="algo_config 'rotation' cannot be read"):
        read(tmp_path, made.tensors, QUARK | {"algo_config": [{"name": "rotation"}]})


@pytest.mark.parametrize("size", [128, 64])
def test_scales_of_blocks_may_have_dimensions_of_one(tmp_path, size):
    """ModelOpt's FP8_PB_WO: [rows, 1, columns, 1]."""
    made = formats.fp8_blocks(WEIGHT, size)
    tensors = {
        ".weight": made.tensors[".weight"],
        ".weight_scale": made.tensors[".weight_scale_inv"][:, None, :, None],
    }
    config = {"quant_algo": "FP8_PB_WO", "weight_block_size": [size, size]}
    assert torch.equal(read(tmp_path, tensors, config), made.expected)


def test_so_may_those_of_experts_in_one_tensor(tmp_path):
    made, module = (
        [formats.fp8_blocks(WEIGHT * f) for f in (1.0, 2.0)],
        "model.layers.3.mlp.experts.gate_up_proj",
    )
    scales = torch.stack([one.tensors[".weight_scale_inv"][:, None, :, None] for one in made])
    tensors = {
        module: torch.stack([one.tensors[".weight"] for one in made]),
        f"{module}_weight_scale": scales,
    }
    tensors = {k.replace("_weight_scale", "_scale"): v for k, v in tensors.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_algo": "FP8_PB_WO"}}))
    for i, one in enumerate(made):
        assert torch.equal(
            decoded(open_checkpoint(tmp_path).expert_weight(module, i, (2, N, K))), one.expected
        )


@pytest.mark.parametrize("method", ["bitsandbytes", "hqq", "torchao", "aqlm"])
def test_others_are_refused_with_what_can_be_read(tmp_path, method):
    made = formats.MAKERS["fp8 per channel"](WEIGHT)
    with pytest.raises(
        CheckpointError, match=f"quant_method '{method}' cannot be read.*{METHODS[0]}.*{AUTO_ROUND[0]}"
    ):
        read(tmp_path, made.tensors, {"quant_method": method})
