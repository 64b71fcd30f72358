"""GLM-5.3-Flash as served: every cut, prefixes, pools; files and configurations of the hub; what stays on a CPU."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import Glm5NextConfig, Glm5NextForConditionalGeneration

from gguf_files import rewritten, write_gguf
from hub_copies import keys_of
from mean_draft_models import mean_drafted
from plans import machine, with_gpu
from recorded_steps import tiny_engine
from sessions import Session, ours, prompts, reference, worst
from tandem import _core
from tandem.architectures.load import config_from_dict, load_config
from tandem.bench.architectures import CONFIGS, named_config, named_subject
from tandem.checkpoint import load_model_config, open_checkpoint
from tandem.errors import CheckpointError, ConfigError
from tandem.flags.engine_config import EngineConfig
from tandem.kernels.cpu_ops import CpuOps
from tandem.kernels.reference import TorchOps
from tandem.mechanisms.channel_delta.shape import ChannelDelta
from tandem.mechanisms.dense.shape import Dense
from tandem.mechanisms.experts.shape import Moe
from tandem.mechanisms.latent.shape import Latent
from tandem.mechanisms.token_index.shape import Index
from tandem.planner.gpu_plan import scratch_bytes
from tandem.planner.memory import MemoryRequest
from tandem.planner.resolve import resolve
from tandem.spec.layers import Block
from tiny import BOS, EOS, VOCAB, file_tensors, save_tiny, save_tokenizer, settings
from tiny import VARIANTS as VARIANTS_OF_ALL

VARIANTS = ["glm5_next", "glm5_next-pools"]
FLASH = "glm-5.3-flash"


@pytest.fixture(params=["torch", "core"])
def ops(request: pytest.FixtureRequest):
    torch_ops = request.param == "torch"
    return TorchOps() if torch_ops else CpuOps(_core.WorkerPool([-1, -1]), _core.supported_tiers()[-1])


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_cut_of_a_prompt_equals_transformers(tiny_models, ops, variant: str) -> None:
    """The core's bits are the same, too, wherever a prompt is cut."""
    prompt, expected = prompts()[0], reference(tiny_models[variant])[0]
    session, whole = Session(tiny_models[variant], ops=ops), None
    for cut in range(len(prompt)):
        session.lengths = [0, 0, 0]
        parts = [session.step([(0, part)])[0] for part in (prompt[:cut], prompt[cut:]) if part]
        assert worst([torch.cat(parts)], [expected]) < 1e-4
        whole = torch.cat(parts) if whole is None else whole
        assert isinstance(ops, TorchOps) or torch.equal(torch.cat(parts), whole)


CHANGES = [{"index_topk": 100, "index_kpool": 4}, {"swiglu_limit": 100.0}, {"linear_lower_bound": -4.0}]


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_what_the_tests_above_see_at_work(tiny_models, tmp_path: Path, change: dict[str, object]) -> None:
    """With a budget for all tokens the first rows agree, and others do not."""
    model = tiny_models["glm5_next"]
    together, theirs = ours(Session(_with(model, tmp_path, **change))), reference(model)
    assert worst(together, theirs) > 1e-3
    if "index_topk" in change:
        assert worst([together[0][:15]], [theirs[0][:15]]) < 1e-4
        assert worst([together[0][15:]], [theirs[0][15:]]) > 1e-3


def _with(model: Path, to: Path, **keys: object) -> Path:
    for file in model.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    (to / "config.json").write_text(json.dumps(keys_of(to) | keys))
    return to


# -- files of the hub ---

TEXT = settings(
    vocab_size=VOCAB, hidden_size=48, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=4, q_lora_rank=20,
    kv_lora_rank=24, qk_nope_head_dim=12, v_head_dim=16, index_n_heads=12, index_head_dim=16, index_topk=8,
    index_kpool=4, n_routed_experts=6, num_experts_per_tok=2, moe_intermediate_size=20, intermediate_size=44,
    linear_num_heads=4, linear_head_dim=16, bos_token_id=BOS, eos_token_id=EOS, pad_token_id=EOS,
    initializer_range=0.15, mlp_layer_types=["dense", "sparse", "sparse", "sparse"],
)  # fmt: skip
TOWER = settings(depth=1, hidden_size=16, num_heads=2, out_hidden_size=48, intermediate_size=20,
                 projection_intermediate_size=20)  # fmt: skip


@pytest.fixture(scope="module")
def beside_images(tmp_path_factory) -> Path:
    """As the hub has it: text beside a tower, under the hub's names, and a draft layer."""
    torch.manual_seed(4)
    path = tmp_path_factory.mktemp("glm") / "model"
    model = Glm5NextForConditionalGeneration(Glm5NextConfig(text_config=TEXT, vision_config=TOWER)).float()
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if name.endswith(("compress_ape", "compress_gate", "A_log", "_hc.base")):
                tensor.copy_(torch.randn_like(tensor) * 0.3)
    model.save_pretrained(path)
    save_tokenizer(path)
    keys = json.loads((path / "config.json").read_text())
    keys["text_config"]["num_nextn_predict_layers"] = 1
    (path / "config.json").write_text(json.dumps(keys))
    return path


def test_text_beside_images(beside_images: Path) -> None:
    stored = str(list(open_checkpoint(beside_images)._shards.names()))
    assert "model.language_model.layers.3.hc_attn_fn" in stored and "index_kpool_compress_ape" in stored
    model = Glm5NextForConditionalGeneration.from_pretrained(
        beside_images, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.inference_mode():
        expected = [model(torch.tensor([prompt])).logits[0] for prompt in prompts()]
    assert worst(ours(Session(beside_images)), expected) < 1e-4


def test_images_and_drafts_are_named_and_left_out(beside_images: Path) -> None:
    for each in (machine(), with_gpu()):
        plan = resolve(EngineConfig(model="m"), load_model_config(beside_images), each)
        assert any("vision_config" in notice and "images" in notice for notice in plan.notices)
        assert any("a draft layer, which is not loaded" in notice for notice in plan.notices)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_gguf_file_is_the_same_model(tmp_path: Path, monkeypatch, variant: str) -> None:
    """Heads' matrices are divided in a file, so they are multiplied in another order. In a file dense layers are first,
    and delta nets have as many heads as attention."""
    family, sizes = VARIANTS_OF_ALL[variant]
    count = len(sizes["layer_types"])
    kinds = ["dense"] + ["sparse"] * (count - 1)
    alike = {"linear_num_heads": sizes["num_attention_heads"], "mlp_layer_types": kinds}
    monkeypatch.setitem(VARIANTS_OF_ALL, "file", (family, sizes | alike))
    save_tiny("file", tmp_path / "source")
    file = write_gguf(tmp_path / "source", tmp_path / "m.gguf")
    found, expected = load_model_config(file), load_config(tmp_path / "source")
    assert found.unread_keys == () and shortened(found.layers) == shortened(expected.layers)
    assert worst(ours(Session(file)), ours(Session(tmp_path / "source"))) < 1e-5


def shortened(layers: object) -> str:
    """Files have numbers in float32."""
    return re.sub(r"\d+\.\d+(e-?\d+)?", lambda number: f"{float(number[0]):.6g}", repr(layers))


def test_a_gguf_file_that_is_not_understood_is_refused(tiny_models, tmp_path: Path) -> None:
    file = write_gguf(tiny_models["glm5_next-pools"], tmp_path / "m.gguf")
    tail = {"glm5-next.attention.indexer.kpool_select_tail": False}
    with pytest.raises(CheckpointError, match="kpool_select_tail is false"):
        load_model_config(rewritten(file, tmp_path / "other.gguf", tail))


# -- configurations ---

HUB: dict[str, Any] = CONFIGS[FLASH] | {
    "layer_types": ["deepseek_sparse_attention" if i % 4 == 3 else "linear_attention" for i in range(45)],
    "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 42, "indexer_types": ["full"] * 45, "index_kpool_compress": True,
    "index_kpool_always_select_tail": True, "indexer_rope_interleave": True, "index_share_for_mtp_iteration": True,
    "mhc": True, "mhc_post_mult_value": 2, "mla_use_nope": True, "moe_router_dtype": "float32", "head_dim": 0,
    "qk_head_dim": 256, "num_key_value_heads": 64, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
    "attention_bias": False, "hidden_act": "silu", "num_nextn_predict_layers": 0, "linear_attn_config": {
        "num_heads": 64, "head_dim": 128, "short_conv_kernel_size": 4, "gate_lower_bound": -5.0,
        "kda_layers": [i for i in range(45) if i % 4 != 3], "full_attn_layers": list(range(3, 45, 4)),
    },
}  # fmt: skip


def test_glm_flash_is_what_its_authors_say_it_is() -> None:
    """34 delta nets, 11 latent attentions whose keys of an index stand for 4 tokens. Of its 321 billion weights a draft
    layer has 7.4."""
    config = config_from_dict({"model_type": "glm5_next", "text_config": HUB | {"model_type": "glm5_next_text"}})
    assert config.unread_keys == () and config.layers == named_config(FLASH, None).layers
    deltas = [mixer for mixer in config.mixers if isinstance(mixer, ChannelDelta)]
    attentions = [mixer for mixer in config.mixers if isinstance(mixer, Latent)]
    assert len(deltas) == 34 and {(d.floor, d.full_rank, d.inner) for d in deltas} == {(-5.0, False, 8192)}
    assert len(attentions) == 11
    assert {(each.rope_dim, each.cached_dim, _index(each).most) for each in attentions} == {(0, 512, 2051)}
    assert config.state_layout("bfloat16", 4).token_bytes == 11 * (1024 + 64)
    weights = config.dense_params + config.routed_params + config.vocab * config.hidden
    assert 312e9 < weights < 315e9
    hyper = config.layers[0].hyper
    assert hyper is not None and hyper.mean and hyper.streams == 4
    limits = {block.body.activation.limit for layer in config.layers[:3] for block in layer.blocks[1:]
              if isinstance(block.body, Dense)}  # fmt: skip
    assert limits == {10.0} and config.moe.experts.activation.limit == 10.0 and config.moe.fusible_shared == 1
    assert [type(layer.blocks[1].body) for layer in config.layers[:4]] == [Dense, Dense, Dense, Moe]


def _index(mixer: Latent) -> Index:
    assert mixer.index is not None
    return mixer.index


def test_layers_are_counted_from_nought_where_kinds_are_absent() -> None:
    keys = HUB | {"layer_types": None, "indexer_types": None}
    assert config_from_dict(keys).layers == config_from_dict(HUB).layers


@pytest.mark.parametrize(("inner", "floor"), [
    ({"gate_lower_bound": None}, -5.0), ({"gate_lower_bound": None, "safe_gate": False}, 0.0),
    ({"gate_lower_bound": -3.0}, -3.0),
])  # fmt: skip
def test_without_a_floor_decays_are_kimis(inner: dict[str, Any], floor: float) -> None:
    """As Transformers reads it: null is the usual one, unless it says that there is none."""
    keys = HUB | {"linear_attn_config": HUB["linear_attn_config"] | inner}
    (found,) = {mixer.floor for mixer in config_from_dict(keys).mixers if isinstance(mixer, ChannelDelta)}
    assert found == floor


@pytest.mark.parametrize(("changes", "message"), [
    ({"indexer_types": ["full"] * 7 + ["shared"] + ["full"] * 37}, "layers that share a choice are not supported"),
    ({"index_topk_freq": 4}, "layers that share a choice are not supported"),
    ({"index_kpool_compress": False}, "index_kpool_compress = False is not supported"),
    ({"index_kpool_always_select_tail": False}, "index_kpool_always_select_tail = False is not supported"),
    ({"index_kpool": 3}, "index_kpool 3 does not divide index_topk 2048"),
    ({"mla_use_nope": False}, "mla_use_nope = False is not supported"),
    ({"qk_rope_head_dim": 64}, "qk_rope_head_dim = 64 is not supported"),
    ({"q_lora_rank": None}, "lacks 'q_lora_rank'"),
    ({"layer_types": ["sliding_attention"] * 45}, "'sliding_attention' is not supported"),
    ({"layer_types": ["linear_attention"] * 45}, "layer_types has no deepseek_sparse_attention"),
    ({"mlp_layer_types": ["dense"] * 45}, "no layer is MoE"),
    ({"mhc_post_mult_value": 1}, "mhc_post_mult_value = 1 is not supported"),
    ({"swiglu_limit": 0.0}, r"limit of a swiglu_clamp activation is 0\.0"),
    ({"moe_router_dtype": "bfloat16"}, "moe_router_dtype = 'bfloat16' is not supported"),
    ({"linear_attn_config": {"gate_lower_bound": 1.0}}, r"gate_lower_bound is 1\.0, and must be below 0"),
    ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported here"),
])  # fmt: skip
def test_what_is_not_understood_is_refused(changes: dict[str, object], message: str) -> None:
    keys = dict(HUB)
    if "linear_attn_config" in changes:
        changes = {"linear_attn_config": HUB["linear_attn_config"] | changes["linear_attn_config"]}
    with pytest.raises(ConfigError, match=message):
        config_from_dict(keys | changes)


def test_it_runs_beside_a_gpu(tiny_models) -> None:
    assert resolve(EngineConfig(model="m"), load_config(tiny_models["glm5_next"]), with_gpu()).gpu is not None


def test_rows_of_all_streams_are_counted_in_the_gpu_memory_of_a_step() -> None:
    """Twice in bfloat16, three times in float32, beside what a mixer takes."""
    model = named_config(FLASH, None)
    one = replace(model, layers=tuple(replace(e, blocks=_without_streams(e.blocks)) for e in model.layers))
    config = EngineConfig.from_keywords("m", disable_cuda_graph=True, chunked_prefill_size=2048, context_length=8192)
    requests = (MemoryRequest(config, each, with_gpu(), "bfloat16", "int4", 8) for each in (model, one))
    streams, plain = map(scratch_bytes, requests)
    assert streams - plain == 2048 * 4 * 4096 * (2 * 2 + 3 * 4)


def _without_streams(blocks: tuple[Block, ...]) -> tuple[Block, ...]:
    return tuple(replace(block, hyper=None) for block in blocks)


def test_pages_have_whole_pools(tiny_models) -> None:
    config = EngineConfig.from_keywords("m", page_size=6)
    plan = resolve(config, load_config(tiny_models["glm5_next"]), machine())
    assert plan.page_size == 8 and any("--page-size 6 becomes 8" in notice for notice in plan.notices)


@pytest.mark.parametrize("variant", ["glm5_next", "kimi_linear", "bailing_hybrid"])
def test_drafts_are_planned_on_either_side(tiny_models, variant: str) -> None:
    model, config = load_config(tiny_models[variant]), EngineConfig(model="m", speculative_algorithm="NGRAM")
    plan, beside = (resolve(config, model, each) for each in (machine(), with_gpu()))
    assert beside.gpu is not None and plan.draft_tokens == beside.draft_tokens == 7
    assert not any("changes nothing" in notice for notice in (*plan.notices, *beside.notices))


def test_a_draft_layer_is_planned_beside_a_gpu(tiny_models) -> None:
    keys = keys_of(tiny_models["glm5_next"]) | {"num_nextn_predict_layers": 1}
    config = EngineConfig(model="m", speculative_algorithm="NEXTN")
    for each in (machine(), with_gpu()):
        assert resolve(config, config_from_dict(keys), each).draft_tokens == 3


def test_a_draft_layer_with_streams_of_its_own_is_refused(tiny_models, tmp_path: Path) -> None:
    """None is published; what they would do cannot be known."""
    path = mean_drafted(tiny_models["glm5_next"], tmp_path / "m", 5).path
    tensors = file_tensors(path)
    tensors["model.layers.4.hc_attn_fn"] = tensors["model.layers.3.hc_attn_fn"].clone()
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"streams of its own \(model\.layers\.4\.attn_hc\.fn\)"):
        tiny_engine(path, tmp_path, speculative_algorithm="NEXTN")
    tiny_engine(path, tmp_path)  # without drafts it is left in its file


def test_a_draft_layer_has_one_stream(tiny_models) -> None:
    """As large as one of the model's sparse layers, but for its streams' weights, with a projection of two vectors."""
    keys = keys_of(tiny_models["glm5_next"]) | {"num_nextn_predict_layers": 1}
    model = config_from_dict(keys)
    drafts = model.drafts
    assert drafts is not None and drafts.mean and drafts.layer.hyper is None
    assert [block.body for block in drafts.layer.blocks] == [block.body for block in model.layers[3].blocks]
    assert config_from_dict(keys | {"num_nextn_predict_layers": 0}).drafts is None


def test_published_in_fp8() -> None:
    model, stored = named_subject(f"{FLASH}-fp8")
    assert stored.experts.name == "fp8 128x128" and 300e9 < model.weight_bytes("bfloat16", "stored", stored) < 345e9
