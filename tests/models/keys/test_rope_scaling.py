"""`rope_scaling` that a user added to a config.json that has `rope_parameters`: it counts, as in Transformers 5."""

from __future__ import annotations

import json
import shutil

import pytest

from sessions import Session, ours, reference, worst
from tandem.architectures.load import config_from_dict, load_config
from tandem.errors import ConfigError

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
TURNING = (
    "qwen3_moe", "glm4_moe", "deepseek_v3", "deepseek_v2", "dots1", "hy_v3", "minimax_m2", "olmoe", "llama",
    "ernie4_5_moe", "granitemoe", "qwen2_moe", "gpt_oss", "solar_open", "exaone_moe",
)  # fmt: skip


def scaled(source, path, **more):
    shutil.copytree(source, path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"rope_scaling": YARN | more}))
    return path


@pytest.mark.parametrize("variant", TURNING)
def test_it_equals_transformers(tiny_models, tmp_path, variant):
    before = json.loads((tiny_models[variant] / "config.json").read_text())["rope_parameters"]
    kept = {key: before[key] for key in ("rope_theta", "partial_rotary_factor") if key in before}
    path = scaled(tiny_models[variant], tmp_path / variant, **kept)
    assert worst(ours(Session(path)), reference(path)) < 1e-4


def test_it_is_refused_where_transformers_would_forget_the_base(tiny_models, tmp_path):
    """There the family's usual base counts, which is not what the model was trained with."""
    path = scaled(tiny_models["qwen3_moe"], tmp_path / "scaled")
    with pytest.raises(
        ConfigError, match=r'rope_scaling replaces rope_parameters.*rope_theta: write.*"rope_theta": 5000'
    ):
        load_config(path)


@pytest.mark.parametrize("variant", ["laguna", "gemma4_text", "mimo_v2_flash"])
def test_it_is_refused_beside_rotations_of_several_kinds(tiny_models, tmp_path, variant):
    path = scaled(tiny_models[variant], tmp_path / "scaled", rope_theta=5000.0)
    with pytest.raises(ConfigError, match="rope_scaling lies beside rope_parameters.*full_attention"):
        load_config(path)


def test_it_counts_in_the_text_of_a_model_that_sees(tiny_models, tmp_path):
    flat = json.loads(
        (scaled(tiny_models["qwen3_moe"], tmp_path / "scaled", rope_theta=5000.0) / "config.json").read_text()
    )
    nested = {
        "model_type": "qwen3_vl_moe",
        "text_config": flat | {"norm_topk_prob": True},
        "vision_config": {},
    }
    assert config_from_dict(nested).layers[0].mixer == config_from_dict(flat).layers[0].mixer
