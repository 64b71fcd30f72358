"""`kt convert --calibrate`: errors go where the text does not see them, whatever interrupts it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from convert_models import save_plain
from tandem.checkpoint import open_checkpoint
from tandem.convert import Conversion, convert
from tandem.convert.calibration import Calibration, LayerInputs
from tandem.convert.compensate import compensated
from tandem.errors import ConfigError
from tandem.formats.codes import WeightCodes
from tandem.formats.reference import decoded
from tandem.formats.rounding import INT4, INT8, IntegerGrid
from tandem.kernels.fit import fit_groups
from tandem.quality.text import Windows
from tiny import BOS, COMMON, save_tokenizer, settings

EXPERTS, WIDTH, LAYERS = 4, 64, 3


def inputs_of(columns: int, tokens: int) -> torch.Tensor:
    """Correlated, as hidden states are: most of what they say is in a few directions."""
    generator = torch.Generator().manual_seed(1)
    directions = torch.randn(columns // 4, columns, generator=generator)
    return torch.randn(tokens, columns // 4, generator=generator) @ directions + 0.1 * torch.randn(
        tokens, columns, generator=generator
    )


def loss(
    weight: torch.Tensor, fitted: tuple[torch.Tensor, torch.Tensor], x: torch.Tensor, group: int
) -> float:
    codes, scales = fitted
    return ((weight - codes * scales.float().repeat_interleave(group, 1)) @ x.T).square().sum().item()


@pytest.mark.parametrize("grid, group", [(INT4, 32), (INT4, 128), (INT8, 64)])
def test_outputs_lose_less_than_half_of_what_rounding_alone_loses(grid: IntegerGrid, group: int) -> None:
    weight, x = torch.randn(48, 256, generator=torch.Generator().manual_seed(2)), inputs_of(256, 400)
    fitted = compensated(weight, x.T @ x, grid, group)
    assert loss(weight, fitted, x, group) < 0.5 * loss(weight, fit_groups(weight, grid, group), x, group)
    assert fitted[0].min() >= grid.low and fitted[0].max() <= grid.high
    assert torch.isfinite(fitted[1].float()).all()


@pytest.mark.parametrize("tokens", [0, 1, 3])
def test_few_inputs_or_none_are_no_error(tokens: int) -> None:
    weight, x = torch.randn(8, 64), torch.randn(tokens, 64)
    codes, scales = compensated(weight, x.T @ x, INT4, 32)
    back = codes * scales.float().repeat_interleave(32, 1)
    assert ((back - weight).norm() / weight.norm()).item() < 0.2


def test_products_count_each_token_as_its_answer_counts() -> None:
    x, gate, up = torch.randn(300, 16), torch.randn(8, 16), torch.randn(8, 16)
    ids = torch.stack([torch.randperm(3)[:2] for _ in range(300)])
    inputs = LayerInputs(x, ids, torch.rand(300, 2))
    own = sum(
        inputs.weights[t, k] ** 2 * torch.outer(x[t], x[t])
        for t in range(300)
        for k in range(2)
        if ids[t, k] == 1
    )
    rest = inputs.products(1) - own  # 256 rows of the layer, of 64 average ones' weight
    expected = x[:256].T @ x[:256] * (inputs.weights.square().mean() * 64 / 256)
    assert torch.allclose(rest, expected, rtol=1e-3, atol=1e-2)
    h = F.silu(x @ gate.T) * (x @ up.T)
    assert inputs.products(5, (gate, up)).shape == (8, 8)  # nobody chose it: the layer's average alone
    assert torch.allclose(
        inputs.products(5, (gate, up)),
        h[:256].T @ h[:256] * (inputs.weights.square().mean() / 4),
        rtol=1e-3,
        atol=1e-2,
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    sizes = settings(
        hidden_size=64, num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        num_experts=EXPERTS, num_experts_per_tok=2, moe_intermediate_size=WIDTH, intermediate_size=64,
        mlp_only_layers=[0],
    )  # fmt: skip
    torch.manual_seed(3)
    made = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_moe", **(COMMON | sizes)))
    path = tmp_path_factory.mktemp("calibrated") / "model"
    made.to(torch.bfloat16).save_pretrained(path)
    save_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def windows():
    generator = torch.Generator().manual_seed(4)
    return Windows(tuple((BOS, *torch.randint(256, (100,), generator=generator).tolist()) for _ in range(4)))


def matrix(path, name):
    weight = open_checkpoint(path).weight(name, (64, 64))
    return decoded(weight) if isinstance(weight, WeightCodes) else weight.float()


def test_experts_answer_better_on_the_text(model, windows, tmp_path):
    wish = Conversion(model, tmp_path / "plain")
    convert(wish)
    convert(replace(wish, out=tmp_path / "calibrated", calibrate=windows))
    calibration, lost = Calibration(model, windows), {"plain": 0.0, "calibrated": 0.0}
    assert calibration.inputs(0) is None  # a dense layer
    for layer in range(1, LAYERS):
        inputs = calibration.inputs(layer)
        for expert in range(EXPERTS):
            x, counts = inputs.of_expert(expert)
            for side in lost:
                for name in ("gate_proj", "up_proj"):
                    module = f"model.layers.{layer}.mlp.experts.{expert}.{name}"
                    off = matrix(tmp_path / side, module) - matrix(model, module)
                    lost[side] += (counts * x @ off.T).square().sum().item()
    assert lost["calibrated"] < 0.9 * lost["plain"]
    assert calibration.inputs(LAYERS) is None  # behind the last


def test_interrupted_or_with_other_workers_the_bytes_are_the_same(model, windows, tmp_path, monkeypatch):
    wish = Conversion(model, tmp_path / "whole", merge=False, calibrate=windows)
    convert(replace(wish, workers=1))
    resumed = replace(wish, out=tmp_path / "resumed", workers=3)

    class Stop(Exception):
        pass

    def stop(self, layer):
        if layer == 2:
            raise Stop
        return inputs(self, layer)

    inputs = Calibration.inputs
    with monkeypatch.context() as patched:
        patched.setattr(Calibration, "inputs", stop)
        with pytest.raises(Stop):
            convert(resumed)
    assert (resumed.out / "layer-00001.safetensors").exists() and not (resumed.out / "config.json").exists()
    with pytest.raises(ConfigError, match="other settings .calibrate "):
        convert(replace(resumed, calibrate=None))
    convert(resumed)
    assert {f.name: f.read_bytes() for f in resumed.out.iterdir()} == {
        f.name: f.read_bytes() for f in wish.out.iterdir()
    }


def test_formats_that_cannot_be_calibrated_are_refused(windows, tmp_path):
    source = save_plain(tmp_path / "in")
    with pytest.raises(
        ConfigError, match="--calibrate is for INT4 and INT8: leave it out, or take one of them"
    ):
        convert(Conversion(source, tmp_path / "out", "FP8", calibrate=windows))
