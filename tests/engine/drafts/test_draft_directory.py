"""A draft layer out of a directory of its own: what it drafts, that answers stay the same, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from draft_models import PROMPTS, chunks_of, drafted, engine_of
from fake_model import check_pages, request, run, token_ids
from repo_scripts import script_module
from tandem.engine.start.planning import plan_of
from tandem.errors import ConfigError
from tandem.flags.engine_config import EngineConfig
from tiny import file_tensors

VARIANT, DRAFTED = "glm4_moe-plain", 90
twin = script_module("mtp/layer")


def asks() -> list:
    return [
        request(name, prompt, max_tokens=14, ignore_eos=True, temperature=0.0)
        for name, prompt in PROMPTS.items()
    ]


def config_beside(source: Path, folder: Path, **keys: object) -> None:
    folder.mkdir(exist_ok=True)
    said = json.loads((source / "config.json").read_text()) | {"num_nextn_predict_layers": 1} | keys
    said.pop("num_mtp_layers", None)
    (folder / "config.json").write_text(json.dumps(said))


@pytest.fixture(scope="module")
def dense(tiny_models, tmp_path_factory):
    """A random layer with a dense feed-forward that drafts some tokens only; and its twin, as it is trained."""
    source, folder = tiny_models[VARIANT], tmp_path_factory.mktemp("dense") / "draft"
    keys = json.loads((source / "config.json").read_text())
    ropes = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}
    config_beside(source, folder, mtp_mlp_layer_types=["dense"], intermediate_size=50, draft_vocab_size=DRAFTED,
                  attention_bias=False, partial_rotary_factor=1.0, rope_parameters=ropes)  # fmt: skip
    torch.manual_seed(2)
    shape = twin.Shape(keys["hidden_size"], keys["num_attention_heads"], keys["num_key_value_heads"], keys["head_dim"],
                       50, 1e4, keys["rms_norm_eps"])  # fmt: skip
    layer, ids = twin.Layer(shape), torch.randperm(keys["vocab_size"])[:DRAFTED].sort().values
    with torch.no_grad():
        for name, weight in layer.named_parameters():
            weight.copy_((("norm" in name) + torch.randn_like(weight) * 0.15).bfloat16())
    before = f"model.layers.{keys['num_hidden_layers']}."
    tensors = {before + name: weight.detach().clone() for name, weight in layer.named_parameters()}
    save_file(tensors | {f"{before}d2t": ids - torch.arange(DRAFTED)}, folder / "draft.safetensors")
    return source, folder, layer, ids


@pytest.mark.parametrize("whole", [False, True], ids=["alone", "in a whole checkpoint"])
def test_a_layer_that_was_moved_drafts_as_before(tiny_models, tmp_path: Path, whole: bool) -> None:
    """What else its directory has, here all zeros, is not read."""
    source = tiny_models[VARIANT]
    model, folder = drafted(source, tmp_path / "both"), tmp_path / "draft"
    config_beside(source, folder)
    tensors = file_tensors(model.path)
    own = {k: v for k, v in tensors.items() if k.startswith("model.layers.3.")}
    others = {k: torch.zeros_like(v) for k, v in tensors.items() if k not in own}
    save_file(own | others if whole else own, folder / "model.safetensors")
    engine = engine_of(source, tmp_path, speculative_draft_model_path=str(folder))
    seen = list(chunks_of(engine, *asks()))
    assert len(seen) > 20 and all(
        list(draft_tokens) == model.chain(tokens, len(draft_tokens)) for tokens, draft_tokens in seen
    )


@torch.no_grad()
def test_a_dense_layer_of_few_tokens_drafts_what_its_twin_drafts(dense, tmp_path: Path) -> None:
    """The twin is what `scripts/train_mtp.py` trains: each draft token of a chain, in float32."""
    source, folder, layer, ids = dense
    engine = engine_of(source, tmp_path, speculative_draft_model_path=str(folder))
    model, tensors = drafted(source, tmp_path / "reference").model, file_tensors(source)
    embedding = tensors["model.embed_tokens.weight"].float()
    head = model.lm_head.weight[ids]
    seen = list(chunks_of(engine, *asks()))
    assert len(seen) > 20
    for tokens, draft_tokens in seen:
        text = torch.tensor(tokens)
        hidden = model(text[None, :-1], output_hidden_states=True).hidden_states[-1]
        for k, draft_token in enumerate(draft_tokens):
            chain = layer.chain(
                _longer(hidden, k), embedding[torch.tensor([*tokens[1:], *draft_tokens[:k]])][None], k + 1
            )
            assert draft_token == ids[(head @ chain[k][0, -1]).argmax()]


def _longer(hidden: torch.Tensor, rows: int) -> torch.Tensor:
    """Rows of draft tokens read other draft tokens."""
    return torch.nn.functional.pad(hidden, (0, 0, 0, rows))


def test_answers_are_those_of_plain_decoding(dense, tmp_path: Path) -> None:
    source, folder, *_ = dense
    flags = {"max_total_tokens": 96}
    alone = engine_of(
        source, tmp_path, speculative_algorithm=None, disable_speculative_governor=False, **flags
    )
    plain = run(alone, *asks())
    engine = engine_of(source, tmp_path, speculative_draft_model_path=str(folder), **flags)
    got = run(engine, *asks())
    assert {k: token_ids(v) for k, v in got.items()} == {k: token_ids(v) for k, v in plain.items()}
    assert engine.stats().speculation.draft_tokens > 20
    check_pages(engine)


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"hidden_size": 80}, "its hidden size is 80, not 72"),
        ({"vocab_size": 300}, "its vocabulary is 300, not 263"),
        ({"num_nextn_predict_layers": 0}, "has no draft layer"),
        ({"draft_vocab_size": 264}, "draft_vocab_size is 264"),
    ],
)
def test_another_model_s_layer_is_refused(tiny_models, tmp_path: Path, keys, reason: str) -> None:
    source, folder = tiny_models[VARIANT], tmp_path / "draft"
    config_beside(source, folder, **keys)
    wish = EngineConfig.from_keywords(str(source), speculative_algorithm="NEXTN",
                                      speculative_draft_model_path=str(folder))  # fmt: skip
    with pytest.raises(ConfigError, match=reason):
        plan_of(wish)


def test_a_directory_without_the_layer_is_refused(dense, tmp_path: Path) -> None:
    source, folder, *_ = dense
    shutil.copytree(folder, tmp_path / "draft")
    save_file({"other.weight": torch.zeros(2, 2)}, tmp_path / "draft" / "draft.safetensors")
    with pytest.raises(
        ConfigError, match=r"has no draft layer: there is no tensor model\.layers\.3\.eh_proj"
    ):
        engine_of(source, tmp_path, speculative_draft_model_path=str(tmp_path / "draft"))


def test_ngram_says_that_it_has_no_use_for_one(tiny_models) -> None:
    wish = EngineConfig.from_keywords(
        str(tiny_models[VARIANT]), speculative_algorithm="NGRAM", speculative_draft_model_path="/nowhere"
    )
    assert any("--speculative-draft-model-path changes nothing" in notice for notice in plan_of(wish).notices)
