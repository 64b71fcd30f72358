"""`--kt-weight-path`: routed experts out of another directory or GGUF file than everything else."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from gguf_files import write_gguf
from quantised_models import experts_only, save_deepseek_names, save_quantised
from tandem import LLM, SamplingParams
from tandem.architectures.load import load_config
from tandem.checkpoint import open_checkpoint, with_experts
from tandem.cli.app import app
from tandem.errors import CheckpointError, ConfigError, TandemError
from tiny import VARIANTS, file_tensors, save_tiny, settings

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, logprobs=1, ignore_eos=True)
SIZES = settings(
    hidden_size=128, num_hidden_layers=3, moe_intermediate_size=64, intermediate_size=96, n_routed_experts=8, n_group=2,
    topk_group=1,
)  # fmt: skip


def is_routed(name: str) -> bool:
    return ".experts." in name


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> tuple[Path, Path]:
    """Two models of one architecture with other weights: a dense layer, shared experts, routed ones."""
    base, made = tmp_path_factory.mktemp("models"), []
    family, changes = VARIANTS["glm4_moe"]
    for name in ("glm4_moe-one", "glm4_moe-two"):
        VARIANTS[name] = (family, changes | SIZES)
        save_tiny(name, base / name)
        del VARIANTS[name]
        made.append(base / name)
    return made[0], made[1]


def joined(dense: Path, experts: Path, target: Path) -> Path:
    """One directory with what both are to give."""
    shutil.copytree(dense, target, ignore=shutil.ignore_patterns("*.safetensors*"))
    tensors = {k: v for k, v in file_tensors(dense).items() if not is_routed(k)}
    tensors |= {k: v for k, v in file_tensors(experts).items() if is_routed(k)}
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def answer(model: Path, **flags: object) -> tuple[list[int], object]:
    llm = LLM(str(model), dtype="float32", max_total_tokens=128, kt_cpuinfer=2, **flags)
    [result] = llm.generate([[5, 9, 250, 17]], GREEDY)
    return result.token_ids, result.logprobs


def plain(dense: Path, experts: Path, _tmp: Path) -> tuple[Path, Path]:
    return experts, experts


def int4(dense: Path, experts: Path, tmp: Path) -> tuple[Path, Path]:
    return save_quantised(experts, tmp, experts_only("int4 packed g32"))


def int4_deepseek_names(dense: Path, experts: Path, tmp: Path) -> tuple[Path, Path]:
    quantised, decoded = int4(dense, experts, tmp)
    return save_deepseek_names(quantised, tmp / "renamed"), decoded


def gguf_file(dense: Path, experts: Path, tmp: Path) -> tuple[Path, Path]:
    tmp.mkdir()
    return write_gguf(experts, tmp / "experts.gguf"), experts


@pytest.mark.parametrize("stored", [plain, int4, int4_deepseek_names, gguf_file])
def test_the_model_is_that_of_both_together(models, tmp_path, stored) -> None:
    """In float32 codes are decoded exactly: the same bits as one directory with the same numbers."""
    dense, other = models
    experts, numbers = stored(dense, other, tmp_path / "stored")
    expected = answer(joined(dense, numbers, tmp_path / "joined"))
    assert answer(dense, kt_weight_path=str(experts)) == expected
    assert expected != answer(dense) and expected != answer(other)


def test_experts_are_computed_from_their_codes(models, tmp_path) -> None:
    """bf16 dense layers, int4 experts, as the plan says; --kt-method means the experts of the other directory."""
    dense, other = models
    experts, _ = int4(dense, other, tmp_path)
    shown = CliRunner().invoke(app, ["serve", str(dense), "--kt-weight-path", str(experts), "--plan-only"])
    assert shown.exit_code == 0, shown.output
    lines = {line.split("  ")[0]: line for line in shown.output.splitlines()}
    assert "int4 g32" in lines["expert format"] and "--kt-weight-path" in lines["expert weights"]
    assert "dense format" not in lines
    llm = LLM(str(dense), kt_amx_weight_path=str(experts), kt_method="RAWINT4", max_total_tokens=128)
    assert len(llm.generate(["Hello"], GREEDY)[0].token_ids) == 8


def test_the_model_directory_itself_changes_nothing(models) -> None:
    dense, _ = models
    assert answer(dense, kt_weight_path=str(dense)) == answer(dense)


def test_a_packed_cache_belongs_to_its_experts(models, tmp_path, capsys) -> None:
    dense, other = models
    flags = {"packed_cache": str(tmp_path)}
    alone, both = answer(dense, **flags), answer(dense, kt_weight_path=str(other), **flags)
    assert alone != both and len(list(tmp_path.glob("*.packed"))) == 2
    capsys.readouterr()
    assert answer(dense, kt_weight_path=str(other), **flags) == both and answer(dense, **flags) == alone
    assert capsys.readouterr().err == ""


def test_bytes_are_those_that_are_read(models) -> None:
    dense, other = models
    both = with_experts(open_checkpoint(dense), str(other), load_config(dense))
    routed = sum(v.nbytes for k, v in file_tensors(other).items() if is_routed(k))
    rest = sum(v.nbytes for k, v in file_tensors(dense).items() if not is_routed(k))
    assert both.nbytes() == routed + rest and both.nbytes(experts=True) == routed
    assert set(both.names()) == set(file_tensors(dense))


def refused(models: tuple[Path, Path], path: Path) -> str:
    with pytest.raises(TandemError) as caught:
        answer(models[0], kt_weight_path=str(path))
    return str(caught.value)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("hidden_size", 256, "its hidden size is 256, but --model has 128"),
        ("num_hidden_layers", 2, "its number of layers is 2, but --model has 3"),
        ("first_k_dense_replace", 0, "its number of MoE layers is 3, but --model has 2"),
        ("n_routed_experts", 16, "its number of experts is 16, but --model has 8"),
        ("n_routed_experts", 4, "n_group 2, topk_group 1 do not fit"),
        ("moe_intermediate_size", 32, "its expert width is 32, but --model has 64"),
    ],
)
def test_another_model_is_refused_before_loading(models, tmp_path, key, value, message) -> None:
    other = Path(shutil.copytree(models[1], tmp_path / "other"))
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {key: value}))
    said = refused(models, other)
    assert message in said and str(other) in said


def test_shapes_that_no_config_explains_are_named(models, tmp_path) -> None:
    """Without config.json the tensors themselves are compared, one by one."""
    tensors = {k: v for k, v in file_tensors(models[1]).items() if is_routed(k)}
    wrong = "model.layers.2.mlp.experts.7.up_proj.weight"
    save_file(tensors | {wrong: torch.zeros(64, 96)}, tmp_path / "experts.safetensors")
    said = refused(models, tmp_path)
    assert "experts.safetensors" in said and wrong in said and "(64, 96)" in said


def test_a_layer_without_experts_is_named(models, tmp_path) -> None:
    tensors = {k: v for k, v in file_tensors(models[1]).items() if is_routed(k) and ".layers.2." not in k}
    save_file(tensors, tmp_path / "experts.safetensors")
    said = refused(models, tmp_path)
    assert "model.layers.2.mlp.experts.0.gate_proj" in said and str(tmp_path) in said


def test_a_path_without_experts_is_refused(models, tmp_path, tiny_models) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        answer(models[0], kt_weight_path=str(tmp_path / "none"))
    with pytest.raises(CheckpointError, match="holds no routed experts"):
        answer(models[0], kt_weight_path=str(tiny_models["llama"]))
    with pytest.raises(ConfigError, match="another model"):
        answer(tiny_models["qwen3_moe"], kt_weight_path=str(models[0]))


def kt_merged(path: Path, name: str = "blk.1.ffn_{}_exps.{}.numa.{}.{}") -> Path:
    """As KTransformers' converter merges its experts: flat codes and scales by NUMA node, the rest renamed."""
    path.mkdir()
    tensors = {"blk.0.attn_norm.weight": torch.ones(4)}
    for matrix in ("up", "gate", "down"):
        for node in range(4):
            tensors[name.format(matrix, 0, node, "weight")] = torch.zeros(64, dtype=torch.int8)
            tensors[name.format(matrix, 0, node, "scale")] = torch.ones(8)
    save_file(tensors, path / "model.safetensors")
    return path


def kt_loose(path: Path) -> Path:
    folder = path / "_layer_1" / "_numa_0"
    folder.mkdir(parents=True)
    for part in ("quant", "scale"):
        (folder / f"INT8_down_0_64Byte_{part}_.kt").write_bytes(bytes(64))
    return path


@pytest.mark.parametrize(
    ("made", "kind", "method"),
    [(kt_merged, "for 4 NUMA nodes", "INT4"), (kt_loose, "loose .kt files", "INT8")],
)
def test_what_ktransformers_packed_is_refused_with_the_command_for_ours(
    models, tmp_path, made, kind, method
) -> None:
    dense, path = models[0], made(tmp_path / f"Tiny-AMX{'INT8' if made is kt_loose else 'INT4'}")
    ours = f"{path}-tandem"
    with pytest.raises(ConfigError) as refused:
        with_experts(open_checkpoint(dense), str(path), load_config(dense))
    text = str(refused.value)
    assert (
        kind in text
        and f"kt convert {dense} {ours} --method {method}, and give --kt-weight-path {ours}" in text
    )
    with pytest.raises(ConfigError, match="KTransformers' converter packed these"):
        open_checkpoint(path)
