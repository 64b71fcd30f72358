"""Step-3.5-Flash and the text of Step-3.7-Flash against Transformers: heads, rotations and clamps of two kinds."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import hub_copies
from every_type import tiny_config
from gguf_files import write_gguf
from sessions import Session, generated, ours, prompts, worst
from tandem import _core
from tandem.architectures.foreign.registry import model_class
from tandem.architectures.load import config_from_dict
from tandem.checkpoint import load_model_config
from tandem.errors import ConfigError
from tandem.kernels.cpu_ops import CpuOps
from tandem.mechanisms.grouped_query.shape import Gqa
from tandem.spec.model_config import ModelConfig

ABSENT = ("rope_parameters", "layer_types", "mlp_layer_types", "num_sliding_attention_heads", "per_layer_config")


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    return hub_copies.step(tmp_path_factory.mktemp("step") / "3.7")


@pytest.fixture(scope="module")
def text(whole, tmp_path_factory) -> Path:
    return hub_copies.step_text(whole, tmp_path_factory.mktemp("step") / "3.5")


def keys_of(whole: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((whole / "config.json").read_text())["text_config"]
    return found


@pytest.fixture(scope="module")
def logits(whole) -> list[torch.Tensor]:
    cls, config = model_class(tiny_config("step3p7"))
    plain = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = cls.from_pretrained(whole, config=config, dtype=torch.float32, **plain).eval()
    with torch.inference_mode():
        return [model(torch.tensor([prompt])).logits[0] for prompt in prompts()]


@pytest.mark.parametrize("tier", [_core.supported_tiers()[0], _core.supported_tiers()[-1]])
def test_logits_equal_transformers(whole, text, logits, tier) -> None:
    ops = CpuOps(_core.WorkerPool([-1, -1]), tier)
    assert worst(ours(Session(whole)), logits) < 1e-4
    assert worst(ours(Session(text, ops=ops)), logits) < 1e-4


def test_every_cut_of_a_prompt_gives_the_same_logits(text, logits) -> None:
    prompt, expected = prompts()[-1], logits[-1]
    for cut in range(1, len(prompt)):
        session = Session(text)
        parts = [session.step([(0, prompt[:cut])])[0], session.step([(0, prompt[cut:])])[0]]
        assert worst([torch.cat(parts)], [expected]) < 1e-4


def test_found_prefixes_and_preempted_sequences_answer_alike(text) -> None:
    generator = torch.Generator().manual_seed(3)
    first = torch.randint(256, (3, 30), generator=generator).tolist()
    calls = [first, [[*prompt[:26], 7, 8, 9] for prompt in first]]
    plain, _, _ = generated(text, calls, disable_radix_cache=True, max_total_tokens=400)
    cached, found, _ = generated(text, calls, max_total_tokens=400)
    tight, _, preempted = generated(text, calls, max_total_tokens=72, context_length=64, chunked_prefill_size=8)
    assert found >= 3 * 24 and preempted > 0 and cached == plain == tight


def test_a_gguf_file_is_the_same_model(text, logits, tmp_path) -> None:
    """Norms are 1 + w there, which rounds once more."""
    file = write_gguf(text, tmp_path / "m.gguf")
    assert load_model_config(file).unread_keys == ()
    assert worst(ours(Session(file)), logits) < 1e-4


def test_a_gguf_file_turns_as_llama_3s_rule_says(text, tmp_path) -> None:
    """Divisors are of a whole head's frequencies there, of which half the channels turn by every second."""
    shutil.copytree(text, tmp_path / "llama3")
    config = keys_of_text(text)
    rule = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    config["rope_parameters"]["full_attention"] |= rule | {"original_max_position_embeddings": 64}
    (tmp_path / "llama3/config.json").write_text(json.dumps(config))
    found = turns(load_model_config(write_gguf(tmp_path / "llama3", tmp_path / "m.gguf")))
    assert found == pytest.approx(turns(config_from_dict(config)), rel=1e-6)
    assert found != pytest.approx(turns(config_from_dict(keys_of_text(text))), rel=0.1)


def keys_of_text(text: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((text / "config.json").read_text())
    return found


def turns(config: ModelConfig) -> list[float]:
    """Frequencies of the first layer, which sees everything."""
    attention = config.layers[0].blocks[0].body
    assert isinstance(attention, Gqa) and attention.rope is not None and not attention.window
    return list(attention.rope.frequencies())


def test_the_hubs_keys_say_what_transformers_do(whole) -> None:
    theirs = keys_of(whole)
    hub = {key: value for key, value in theirs.items() if key not in ABSENT} | {
        "num_attention_groups": theirs["num_key_value_heads"], "moe_num_experts": 6, "moe_top_k": 2,
        "attention_other_setting": {"num_attention_heads": 6, "num_attention_groups": 2, "head_dim": 16},
        "moe_layers_enum": "1,2,3,4", "num_nextn_predict_layers": 1, "zero_centered": True, "sink": False,
        "layer_types": [*theirs["layer_types"], "sliding_attention"], "rope_theta": [5000.0, 300.0, 5000.0, 300.0, 9.0],
        "partial_rotary_factors": [0.5, 1.0, 0.5, 1.0, 1.0], "use_head_wise_attn_gate": True, "att_impl_type": "GQA",
    }  # fmt: skip
    del hub["num_key_value_heads"], hub["n_routed_experts"], hub["num_experts_per_tok"]
    found = config_from_dict(hub)
    assert found.layers == config_from_dict(theirs).layers
    assert found.unread_keys == ("num_nextn_predict_layers",)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("use_head_wise_attn_gate", False, "use_head_wise_attn_gate = False is not supported"),
        ("layer_types", ["full_attention"], "layer_types must be a list of 4, one for each layer"),
        ("layer_types", ["conv"] * 4, "layer type 'conv' is not supported"),
        ("attention_other_setting", {"num_attention_groups": 1}, "num_attention_groups 1 is not supported"),
    ],
)
def test_what_is_not_computed_is_refused(whole, key, value, message) -> None:
    with pytest.raises(ConfigError, match=message):
        config_from_dict(keys_of(whole) | {key: value})
