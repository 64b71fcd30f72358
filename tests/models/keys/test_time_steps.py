"""Nemotron's time steps: Transformers does not let those of prompts be smaller than `time_step_min`, which those of
decoding rows may be. Here none has a floor, as where the models were trained. That is the whole difference."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from sessions import Session, ours, prompts, worst
from tandem.architectures.load import config_from_dict
from tandem.errors import ConfigError
from tiny import COMMON, STEPS, VARIANTS, save_tiny


def theirs(path, floor: float | None) -> list[torch.Tensor]:
    """floor: of all time steps; None: as config.json says."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    for module in model.modules():
        if hasattr(module, "time_step_limit") and floor is not None:
            module.time_step_limit = (floor, float("inf"))
    with torch.inference_mode():
        return [model(torch.tensor([prompt])).logits[0] for prompt in prompts()]


def test_nothing_else_differs_from_transformers(tmp_path, monkeypatch):
    family, sizes = VARIANTS["nemotron_h"]
    monkeypatch.setitem(VARIANTS, "floored", (family, {k: v for k, v in sizes.items() if k not in STEPS}))
    save_tiny("floored", tmp_path / "floored")
    mine = ours(Session(tmp_path / "floored"))
    assert worst(mine, theirs(tmp_path / "floored", floor=0.0)) < 1e-5
    assert worst(mine, theirs(tmp_path / "floored", floor=None)) > 1e-4


@pytest.mark.parametrize(("key", "value"), [("time_step_limit", [0.001, 0.1]), ("mamba_hidden_act", "gelu")])
def test_what_would_change_a_state_space_is_refused(key, value):
    config = COMMON | VARIANTS["nemotron_h"][1] | {"model_type": "nemotron_h", key: value}
    with pytest.raises(ConfigError, match=f"{key} = .* is not supported"):
        config_from_dict(config)


def test_limits_that_are_none_are_taken():
    config = COMMON | VARIANTS["nemotron_h"][1] | {"model_type": "nemotron_h"}
    for limit in ([0.0, float("inf")], [0.0, {"__float__": "Infinity"}], None):
        config_from_dict(config | {"time_step_limit": limit})
