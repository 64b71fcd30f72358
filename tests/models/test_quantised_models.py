"""Quantised checkpoints end to end: logits equal Transformers' on the numbers that the codes stand for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from quantised_models import (
    BLOCKS,
    CHOICES,
    MACHINE,
    experts_only,
    mixed,
    save_deepseek_names,
    save_quantised,
)
from sessions import Session, median, ours, prompts, reference, worst
from tandem import _core
from tandem.architectures.load import load_config
from tandem.checkpoint import open_checkpoint
from tandem.flags.engine_config import EngineConfig
from tandem.kernels.cpu_ops import CpuOps
from tandem.kernels.reference import TorchOps
from tandem.models.builder import _packed_parts
from tandem.models.linear import SideBySide
from tandem.planner.plan import Plan
from tandem.planner.resolve import resolve
from tiny import VARIANTS, TinyModels


@pytest.fixture(scope="module", params=["torch", _core.supported_tiers()[-1]])
def ops(request):
    """Plain torch, and the C++ core in the widest tier that this machine runs."""
    return TorchOps() if request.param == "torch" else CpuOps(_core.WorkerPool([-1, -1]), request.param)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """GLM: shared experts, a dense layer, a router that is chosen by group."""
    family, changes = VARIANTS["glm4_moe"]
    VARIANTS["glm4_moe-blocks"] = (family, changes | BLOCKS)
    yield TinyModels(tmp_path_factory.mktemp("plain"))["glm4_moe-blocks"]
    del VARIANTS["glm4_moe-blocks"]


@pytest.fixture(scope="module")
def saved(model, tmp_path_factory):
    made = {}

    def get(name: str):
        if name not in made:
            made[name] = save_quantised(model, tmp_path_factory.mktemp("one"), CHOICES[name])
        return made[name]

    return get


@pytest.mark.parametrize("name", CHOICES)
def test_decoded_in_float32(saved, name):
    quantised, plain = saved(name)
    assert worst(ours(Session(quantised)), reference(plain)) < 1e-4


def planned(path) -> Plan:
    """What the planner chooses for this checkpoint: codes stay codes."""
    stored = open_checkpoint(path).formats()
    return resolve(EngineConfig(model=str(path)), load_config(path), MACHINE, stored)


TORCH = ("experts int4", "fp8 + int4")  # plain torch is slow, and the same code for all


@pytest.mark.parametrize(
    ("ops", "name"),
    [("torch", name) for name in TORCH] + [(_core.supported_tiers()[-1], name) for name in CHOICES],
    indirect=["ops"],
)
def test_computed_from_codes_in_bfloat16(saved, ops, name):
    """As close to float32 as Transformers is in bfloat16. Medians: where a router's near tie falls the other way, a
    whole row differs, in theirs as in ours."""
    quantised, plain = saved(name)
    exact = reference(plain)
    theirs = median(reference(plain, torch.bfloat16), exact)
    chosen = planned(quantised)
    session = Session(quantised, "bfloat16", chosen.fuse_shared_experts, ops, dense_codes=chosen.dense_codes,
                      expert_format=chosen.expert_format)  # fmt: skip
    assert chosen.expert_format == "stored" and chosen.dense_codes == name.startswith(("all", "fp8"))
    assert median(ours(session), exact) < 1.5 * theirs


def test_mixed_formats_need_no_configuration(model, tmp_path):
    """fp8 dense layers + int4 experts, with and without `linear_fp8_config`, and with no configuration at all."""
    with_key = save_quantised(model, tmp_path / "a", mixed)[0]
    without = save_quantised(model, tmp_path / "b", mixed, with_config=False)[0]
    assert "linear_fp8_config" in (with_key / "config.json").read_text()
    assert "quantization_config" not in (without / "config.json").read_text()
    for a, b in zip(ours(Session(with_key)), ours(Session(without)), strict=True):
        assert torch.equal(a, b)


def edit_quantization(path: Path, change: Callable[[dict[str, object]], None]) -> None:
    config = json.loads((path / "config.json").read_text())
    change(config["quantization_config"])
    (path / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("said", ["both", "int4 alone", "nothing"])
def test_fp8_dense_layers_and_int4_experts_in_every_spelling(model, tmp_path, ops, said):
    """`linear_fp8_config` there or not: codes stay codes, and the model is that of the numbers they stand for."""
    quantised, plain = save_quantised(model, tmp_path, mixed, with_config=said != "nothing")
    if said == "int4 alone":
        edit_quantization(quantised, lambda config: config.pop("linear_fp8_config"))
    stored = open_checkpoint(quantised).formats()
    assert stored.experts.name == "int4 g32" and stored.dense.name.split(" + ")[0] == "fp8 128x128"
    assert worst(ours(Session(quantised)), reference(plain)) < 1e-4
    exact, theirs = reference(plain), reference(plain, torch.bfloat16)
    chosen = planned(quantised)
    assert chosen.expert_format == "stored" and chosen.dense_codes
    session = Session(
        quantised, "bfloat16", chosen.fuse_shared_experts, ops, dense_codes=True, expert_format="stored"
    )
    assert median(ours(session), exact) < 1.5 * median(theirs, exact)


def test_a_configuration_of_fp8_that_no_weight_has_changes_nothing(model, tmp_path, ops):
    """`linear_fp8_config` in config.json, but the dense weights are bf16: they are computed as what they are."""
    quantised, plain = save_quantised(model, tmp_path, experts_only("int4 packed g32"))
    fp8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    as_planned = (planned(quantised).fuse_shared_experts, ops)
    without = ours(Session(quantised, "bfloat16", *as_planned, expert_format="stored"))
    edit_quantization(quantised, lambda config: config.update(linear_fp8_config=fp8))
    chosen = planned(quantised)
    assert chosen.expert_format == "stored" and not chosen.dense_codes
    assert worst(ours(Session(quantised)), reference(plain)) < 1e-4
    for a, b in zip(
        ours(Session(quantised, "bfloat16", *as_planned, expert_format="stored")), without, strict=True
    ):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", ["all fp8", "experts mxfp4", "fp8 + int4"])
def test_deepseek_inference_names(saved, tmp_path, name):
    quantised, _ = saved(name)
    renamed = save_deepseek_names(quantised, tmp_path / "renamed")
    assert "layers.1.ffn.experts.0.w1.weight" in str(sorted(open_checkpoint(renamed)._shards.names()))
    for a, b in zip(ours(Session(quantised)), ours(Session(renamed)), strict=True):
        assert torch.equal(a, b)


def test_formats_that_cannot_be_stacked_are_computed_side_by_side(model, tmp_path, ops):
    """q, k and v in three formats. One row at a time goes another way than several do (and may be recorded)."""
    formats = {"q_proj": "fp8 blocks", "k_proj": "int8 per channel", "v_proj": None}
    quantised, plain = save_quantised(model, tmp_path, lambda module: formats.get(module.rpartition(".")[2]))
    session = Session(quantised, "bfloat16", ops=ops, dense_codes=True)
    parts = session.model.layers[0].blocks[0].operator.qkv
    assert isinstance(parts, SideBySide) and len(parts.parts) == 3
    prompt = prompts()[2]
    together = session.step([(0, prompt)])[0]
    single = torch.cat([session.step([(1, [token])])[0] for token in prompt])
    assert isinstance(ops, TorchOps) or session.model._recorded[1] is not None
    exact, theirs = reference(plain)[2:], reference(plain, torch.bfloat16)[2:]
    assert median([together], exact) < 1.5 * median(theirs, exact)
    assert median([single], exact) < 1.5 * median(theirs, exact)


def test_neighbours_of_one_format_are_one_matrix(model, tmp_path):
    """Of q and k in codes and v in numbers there are two products, not three; and so there are from a packed cache."""
    quantised, _ = save_quantised(
        model, tmp_path, lambda module: None if module.endswith("v_proj") else "int8 per channel"
    )
    session = Session(quantised, "bfloat16", dense_codes=True)
    qkv = session.model.layers[0].blocks[0].operator.qkv
    assert isinstance(qkv, SideBySide)
    sizes = [part.out_features for part in qkv.parts]
    assert len(sizes) == 2 and sizes[0] > sizes[1]
    kept = {"q+k": qkv.parts[0], "v": qkv.parts[1]}
    assert _packed_parts(kept.get, ["q", "k", "v"]) == list(qkv.parts)
    assert _packed_parts({"q": qkv, "k": qkv}.get, ["q", "k", "v"]) == []
