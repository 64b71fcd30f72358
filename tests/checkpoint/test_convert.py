"""`kt convert`: what it writes is read by compressed-tensors' own package, and is the best that the format can say."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig
from compressed_tensors.utils import match_name
from typer.testing import CliRunner

from convert_models import (
    EXPERTS,
    HIDDEN,
    WIDTH,
    dense_modules,
    expert_modules,
    plain_tensors,
    save,
    save_fp8,
    save_fused,
    save_int4,
    save_plain,
)
from tandem.checkpoint import open_checkpoint
from tandem.cli.app import app
from tandem.convert import METHODS, Conversion, convert
from tandem.errors import CheckpointError, ConfigError
from tandem.formats.codes import WeightCodes
from tandem.formats.reference import decoded, dequantised
from tandem.kernels.cpu import PackedMatrix, WorkerPool, Workspace
from tiny import file_tensors


def config_of(path):
    return json.loads((path / "config.json").read_text())["quantization_config"]


def scheme_of(config, module):
    """The scheme that a reader of the configuration finds for a module; None where it is not quantised."""
    if any(match_name(module, target) for target in config.ignore):
        return None
    for scheme in config.config_groups.values():
        if any(target == "Linear" or match_name(module, target) for target in scheme.targets):
            return scheme
    return None


def by_compressed_tensors(path, tensors, module):
    """The weights of `module` as the format's own package decodes them, in float32."""
    scheme = scheme_of(QuantizationConfig.model_validate(config_of(path)), module)
    parts = {
        name.removeprefix(f"{module}."): t for name, t in tensors.items() if name.startswith(f"{module}.")
    }
    if parts["weight_scale"].dtype != torch.uint8:
        parts["weight_scale"] = parts[
            "weight_scale"
        ].float()  # it computes in the scales' type; bf16 would round
    return BaseCompressor.get_value_from_registry(scheme.format).decompress(parts, scheme)["weight"]


def ours(path, module):
    weight = open_checkpoint(path).weight(module, shape_of(module))
    return decoded(weight) if isinstance(weight, WeightCodes) else weight.float()


def shape_of(module):
    return (HIDDEN, WIDTH) if module.endswith("down_proj") else (WIDTH, HIDDEN)


@pytest.mark.parametrize(
    "saved, method",
    [(save_plain, method) for method in METHODS]
    + [(save_fp8, method) for method in METHODS if method != "FP8"]
    + [(save_fused, "INT4"), (save_fused, "FP8")],
)
def test_the_formats_own_package_and_ours_read_the_same_weights(method, saved, tmp_path):
    convert(Conversion(saved(tmp_path / "in"), tmp_path / "out", method))
    tensors, original = file_tensors(tmp_path / "out"), plain_tensors()
    for module in expert_modules():
        theirs = by_compressed_tensors(tmp_path / "out", tensors, module)
        assert torch.equal(theirs.float(), ours(tmp_path / "out", module))
        weight = original[f"{module}.weight"].float()
        error = ((theirs - weight).norm() / weight.norm()).item()
        # half a step of a group's largest weight is the most that one weight can be off; their mean is far below
        assert error < {"INT4": 0.2, "INT8": 0.04, "MXFP4": 0.2, "FP8": 0.06}[method], error


@pytest.mark.parametrize(
    "method, fmt, group", [("INT4", "int4", 32), ("INT4", "int4", 128), ("INT8", "int8", 64)]
)
def test_the_error_is_smaller_than_that_of_plain_rounding(method, fmt, group, tmp_path):
    convert(Conversion(save_plain(tmp_path / "in"), tmp_path / "out", method, group))
    for module in expert_modules():
        weight = plain_tensors()[f"{module}.weight"].float()
        searched = (ours(tmp_path / "out", module) - weight).square().sum()
        assert searched < 0.95 * (dequantised(weight, fmt, group) - weight).square().sum()


@pytest.mark.parametrize("method, fmt", [("INT4", "int4"), ("INT8", "int8")])
def test_rounding_while_loading_gives_the_same_weights(method, fmt, tmp_path):
    convert(Conversion(save_plain(tmp_path / "in"), tmp_path / "out", method, 32))
    workspace = Workspace(WorkerPool([-1, -1]), "scalar")
    for module in expert_modules():
        loaded = PackedMatrix(workspace, plain_tensors()[f"{module}.weight"], fmt=fmt).dequantised()
        assert torch.equal(loaded, ours(tmp_path / "out", module)), module


def test_everything_else_is_copied_bit_by_bit(tmp_path):
    source = save_fp8(tmp_path / "in")
    convert(Conversion(source, tmp_path / "out"))
    before, after = file_tensors(source), file_tensors(tmp_path / "out")
    kept = {name: tensor for name, tensor in before.items() if ".experts." not in name}
    for name, tensor in kept.items():
        copied = after[name.replace("weight_scale_inv", "weight_scale")]
        assert copied.dtype == tensor.dtype
        assert torch.equal(copied.view(torch.uint8), tensor.view(torch.uint8)), name
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    assert not (tmp_path / "out" / "model.bin").exists()
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(after)


def test_kept_fp8_layers_have_a_group_of_their_own(tmp_path):
    convert(Conversion(save_fp8(tmp_path / "in"), tmp_path / "out"))
    config = QuantizationConfig.model_validate(config_of(tmp_path / "out"))
    assert config.format == "mixed-precision"
    for module in dense_modules():
        scheme = scheme_of(config, module)
        assert scheme.format == "float-quantized" and scheme.weights.block_structure == [128, 128]
        theirs = by_compressed_tensors(tmp_path / "out", file_tensors(tmp_path / "out"), module)
        assert torch.equal(theirs, ours(tmp_path / "out", module))
    for module in ("lm_head", "model.layers.1.mlp.gate"):
        assert scheme_of(config, module) is None


def test_dense_layers_on_request(tmp_path):
    convert(Conversion(save_plain(tmp_path / "in"), tmp_path / "out", dense=True))
    config, tensors = (
        QuantizationConfig.model_validate(config_of(tmp_path / "out")),
        file_tensors(tmp_path / "out"),
    )
    for module in [*dense_modules(), *expert_modules()]:
        assert f"{module}.weight_packed" in tensors and scheme_of(config, module).weights.num_bits == 4
    for module in (
        "lm_head",
        "model.embed_tokens",
        "model.layers.0.mlp.gate",
        "model.layers.0.input_layernorm",
    ):
        assert f"{module}.weight" in tensors
    assert scheme_of(config, "lm_head") is None and scheme_of(config, "model.layers.0.mlp.gate") is None


def test_one_file_for_each_layer(tmp_path):
    source = save_plain(tmp_path / "in")
    convert(Conversion(source, tmp_path / "layers", merge=False))
    names = sorted(file.name for file in (tmp_path / "layers").glob("*.safetensors"))
    assert names == [
        "layer-00000.safetensors",
        "layer-00001.safetensors",
        "layer-00002.safetensors",
        "outer.safetensors",
    ]
    convert(Conversion(source, tmp_path / "sized", shard_bytes=200_000))
    sized = sorted((tmp_path / "sized").glob("*.safetensors"))
    assert len(sized) > 2 and all(file.stat().st_size < 220_000 for file in sized)
    layers, merged = file_tensors(tmp_path / "layers"), file_tensors(tmp_path / "sized")
    assert layers.keys() == merged.keys() and all(torch.equal(layers[name], merged[name]) for name in layers)


def test_the_number_of_workers_changes_nothing(tmp_path):
    wish = Conversion(save_fp8(tmp_path / "in"), tmp_path / "one", workers=1)
    convert(wish)
    convert(replace(wish, out=tmp_path / "five", workers=5))
    (one,), (five,) = ((tmp_path / name).glob("*.safetensors") for name in ("one", "five"))
    assert one.read_bytes() == five.read_bytes()


@pytest.mark.parametrize(
    "saved, wish, message",
    [
        (save_int4, {}, r"is stored as int4 g32 already.*Serve it as it is"),
        (save_fp8, {"method": "FP8"}, "is stored as fp8 128x128 already"),
        (save_fp8, {"input_type": "bf16"}, "is stored as fp8, not as --input-type bf16: say fp8, or auto"),
        (save_plain, {"input_type": "int5"}, "--input-type 'int5' does not exist; these do: auto, bf16"),
        (save_plain, {"method": "INT3"}, "--method 'INT3' does not exist; these do: INT4, INT8, MXFP4, FP8"),
        (save_plain, {"group": 48}, "--group 48 does not exist; these do: 32, 64, 128"),
    ],
)  # fmt: skip
def test_wishes_that_cannot_be_met_say_what_to_change(saved, wish, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        convert(Conversion(saved(tmp_path / "in"), tmp_path / "out", **wish))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("saved, method", [(save_int4, "INT8"), (save_int4, "FP8"), (save_fp8, "MXFP4")])
def test_other_quantised_inputs_are_decoded_first(saved, method, tmp_path):
    source = saved(tmp_path / "in")
    convert(Conversion(source, tmp_path / "out", method))
    for module in expert_modules():
        before, after = (
            ours(source, module),
            ours(tmp_path / "out", module),
        )
        assert (after - before).norm() / before.norm() < {"INT8": 0.04, "FP8": 0.06, "MXFP4": 0.2}[method]


def test_a_model_without_experts_is_refused(tmp_path):
    tensors = {name: tensor for name, tensor in plain_tensors().items() if ".experts." not in name}
    with pytest.raises(ConfigError, match="has no routed experts"):
        convert(Conversion(save(tmp_path / "in", tensors), tmp_path / "out"))


def test_columns_that_are_no_multiple_of_the_group_are_named(tmp_path):
    tensors = plain_tensors()
    name = "model.layers.1.mlp.experts.0.down_proj"
    tensors[f"{name}.weight"] = tensors[f"{name}.weight"][:, :96]
    source = save(tmp_path / "in", tensors)
    with pytest.raises(
        ConfigError, match=rf"{name} has 96 input columns, no multiple of 64: take --group 32"
    ):
        convert(Conversion(source, tmp_path / "out", group=64))


@pytest.mark.parametrize("workers", [1, 4])
def test_a_weight_that_is_no_number_is_named_and_leaves_no_half_file(workers, tmp_path):
    tensors = plain_tensors()
    name = f"model.layers.2.mlp.experts.{EXPERTS - 1}.up_proj.weight"
    tensors[name] = tensors[name].index_fill(1, torch.tensor(9), float("nan"))
    source = save(tmp_path / "in", tensors)
    with pytest.raises(
        CheckpointError, match=r"safetensors: .*layers\.2.*up_proj holds weights that are not finite"
    ):
        convert(Conversion(source, tmp_path / "out", workers=workers))
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["conversion.json"]


def kt_convert(*words: object):
    return CliRunner().invoke(app, ["convert", *map(str, words)])


def test_the_tutorials_spellings_are_taken(tmp_path):
    source = save_plain(tmp_path / "in")
    flags = "--input-type bf16 --cpuinfer-threads 64 --threadpool-count 4 --no-merge-safetensor".split()
    done = kt_convert("--input-path", source, "--output", tmp_path / "a", "--quant-method", "int4", *flags)
    assert done.exit_code == 0, done.output
    assert "--threadpool-count changes nothing" in done.stderr
    for method in ("AMXINT4", "INT4"):
        done = kt_convert(source, tmp_path / method, "--method", method, "--no-merge-safetensor")
        assert done.exit_code == 0, done.output
    ours, theirs = (file_tensors(tmp_path / name) for name in ("INT4", "a"))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours | theirs)
    assert config_of(tmp_path / "AMXINT4") == config_of(tmp_path / "INT4")


def test_what_cannot_be_served_is_converted_with_a_word(tmp_path):
    source = save_plain(tmp_path / "in")
    served = {
        "model_type": "qwen3_moe", "hidden_size": HIDDEN, "num_hidden_layers": 3, "vocab_size": 40,
        "rms_norm_eps": 1e-6, "num_attention_heads": 4, "num_experts": EXPERTS, "num_experts_per_tok": 2,
        "moe_intermediate_size": WIDTH, "intermediate_size": WIDTH, "max_position_embeddings": 64, "rope_theta": 1e4,
    }  # fmt: skip
    for model_type in ("qwen3_moe", "next_year"):
        (source / "config.json").write_text(json.dumps(served | {"model_type": model_type}))
        done = kt_convert(source, tmp_path / model_type)
        assert done.exit_code == 0, done.output
        assert ("cannot be served by Tandem" in done.stderr) == (model_type == "next_year")


def test_model_and_out_are_given_once(tmp_path):
    for words in ([], [tmp_path], [tmp_path, tmp_path / "a", "--output", tmp_path / "b"]):
        assert isinstance(kt_convert(*words).exception, ConfigError)
