"""gpt-oss as it lies on the hub: experts in MXFP4 blocks, transposed numbers, biases; and through the engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from gguf_files import Kind, write_gguf
from sessions import Session, generated, ours, reference, rms, worst
from tandem import _core
from tandem.architectures.load import config_from_dict, load_config
from tandem.checkpoint import Checkpoint, open_checkpoint
from tandem.convert import Conversion, convert
from tandem.errors import ConfigError
from tandem.formats.codes import WeightCodes
from tandem.formats.cut import numbers
from tandem.formats.reference import stored
from tandem.kernels.cpu_ops import CpuOps
from tandem.kernels.reference import TorchOps
from tandem.quality.text import Windows
from tiny import file_tensors

OPS = ["torch", *_core.supported_tiers()]


def ops_of(name: str) -> CpuOps | TorchOps:
    return TorchOps() if name == "torch" else CpuOps(_core.WorkerPool([-1, -1]), name)


def as_blocks(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """[E, K, N] as Transformers holds it -> the file's blocks [E, N, K / 32, 16], scales, and what they stand for."""
    codes = [stored(each.T.contiguous(), "mxfp4") for each in weight]
    assert all(isinstance(each, WeightCodes) for each in codes)
    blocks = torch.stack([each.codes.view(each.rows, -1, 16) for each in codes])
    scales = torch.stack([each.scales.view(torch.uint8) for each in codes])
    held = torch.stack([numbers(each).T for each in codes])
    return {"_blocks": blocks, "_scales": scales}, held.contiguous()


def saved(path: Path, tensors: dict[str, Tensor], source: Path, **changes: object) -> Path:
    path.mkdir()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    for file in source.glob("*.json"):
        (path / file.name).write_bytes(file.read_bytes())
    config = json.loads((source / "config.json").read_text()) | changes
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.fixture(scope="module")
def both(tiny_models, tmp_path_factory) -> tuple[Path, Path]:
    """(the hub's own format, the numbers that it stands for)."""
    source, target = tiny_models["gpt_oss-blocks"], tmp_path_factory.mktemp("gpt_oss")
    packed: dict[str, Tensor] = {}
    plain: dict[str, Tensor] = {}
    for name, tensor in file_tensors(source).items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            made, plain[name] = as_blocks(tensor)
            packed |= {name + ending: part for ending, part in made.items()}
        else:
            packed[name] = plain[name] = tensor
    quantised = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    return (
        saved(target / "blocks", packed, source, quantization_config=quantised),
        saved(target / "plain", plain, source),
    )


@pytest.mark.parametrize("name", OPS)
def test_blocks_are_computed_as_they_are_stored(both: tuple[Path, Path], name: str) -> None:
    """Of CPU kernels that round activations to bfloat16 the tolerance is that of such a rounding, 2^-8, at each of the
    6 products of 3 layers, which add up as independent ones do."""
    blocks, plain = both
    got = ours(Session(blocks, ops=ops_of(name), expert_format="stored"))
    assert worst(got, reference(plain)) < (1e-4 if name == "torch" else 6**0.5 * 2.0**-8)


def test_the_plan_keeps_the_blocks(both: tuple[Path, Path]) -> None:
    formats = open_checkpoint(both[0]).formats()
    assert formats.experts.name == "mxfp4" and not formats.experts.unread_by_gpu
    assert open_checkpoint(both[1]).formats().experts.name == "f32"


def test_experts_out_of_a_packed_cache_have_their_biases(tiny_models, tmp_path: Path) -> None:
    """The cache holds panels; biases come from the checkpoint at every start."""
    path, calls = tiny_models["gpt_oss"], [[[1, 2, 3, 4, 5, 6, 7, 8, 9]]]
    plain, _, _ = generated(path, calls, max_total_tokens=128)
    for _ in range(2):
        assert generated(path, calls, max_total_tokens=128, packed_cache=str(tmp_path))[0] == plain
    assert list(tmp_path.rglob("*.packed"))


def test_unknown_layer_types_are_refused(tiny_models) -> None:
    config = json.loads((tiny_models["gpt_oss"] / "config.json").read_text())
    with pytest.raises(ConfigError, match="layer type 'chunked_attention' is not supported"):
        config_from_dict(config | {"layer_types": ["chunked_attention"] * 3})
    with pytest.raises(ConfigError, match="limit of a swiglu_oai activation is 0.0"):
        config_from_dict(config | {"swiglu_limit": 0.0})


@pytest.mark.parametrize("kind", [Kind.F32, Kind.MXFP4])
def test_gguf_files_give_what_their_numbers_give(tiny_models, tmp_path: Path, kind: Kind) -> None:
    """ggml's blocks as they are: what Transformers computes from the numbers that the file holds."""
    source = tiny_models["gpt_oss-blocks"]

    def choose(name: str, _: object) -> Kind:
        return kind if name.endswith("exps.weight") else Kind.F32

    file = write_gguf(source, tmp_path / "x.gguf", choose)
    tensors, held = file_tensors(source), open_checkpoint(file)
    for name in tensors if kind == Kind.MXFP4 else ():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            tensors[name] = _held(held, name, tensors[name].shape)
    plain = saved(tmp_path / "plain", tensors, source)
    session = Session(file, expert_format="stored")
    assert worst(ours(session), reference(plain)) < 1e-4
    assert session.config.moe == load_config(source).moe
    assert held.formats().experts.unread_by_gpu == ""


def _held(checkpoint: Checkpoint, name: str, shape: torch.Size) -> Tensor:
    """Numbers of all experts, [E, K, N] as Transformers has them."""
    count, depth, rows = shape
    layer, fused = name.rpartition("experts.")[0] + "experts.", "gate_up" in name
    matrices = ("gate_proj", "up_proj") if fused else ("down_proj",)
    each = (rows // len(matrices), depth)
    made = torch.empty(shape)
    for expert in range(count):
        for i, matrix in enumerate(matrices):
            weight = numbers(checkpoint.weight(f"{layer}{expert}.{matrix}", each))
            made[expert, :, i :: len(matrices)] = weight.T
    return made


@pytest.mark.parametrize("calibrated", [False, True])
def test_converted_experts_are_those_that_were_rounded(tiny_models, tmp_path: Path, calibrated: bool) -> None:
    """Transposed and interleaved numbers become one matrix per expert; biases and sinks are copied. What is served then
    is as close as rounding to int8 leaves it: 1/254 of a group's largest, at both products of three layers."""
    source = tiny_models["gpt_oss-blocks"]
    text = Windows((tuple(range(40)), tuple(range(60, 100)))) if calibrated else None
    convert(Conversion(source, tmp_path / "int8", "INT8", 32, calibrate=text))
    exact = ours(Session(source))
    got = ours(Session(tmp_path / "int8", expert_format="stored"))
    assert rms(got, exact) < 0.03 * rms(exact, [torch.zeros_like(each) for each in exact])
    tensors = file_tensors(tmp_path / "int8")
    assert "model.layers.0.mlp.experts.5.gate_proj.weight_scale" in tensors
    assert torch.equal(
        tensors["model.layers.2.self_attn.sinks"], file_tensors(source)["model.layers.2.self_attn.sinks"]
    )
