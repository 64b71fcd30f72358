"""DeepSeek-V4 as it lies on the hub: its own names, fp8 with scales of powers of two, experts in MXFP4, drafts."""

from __future__ import annotations

import shlex
from pathlib import Path
from weakref import ref

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from hub_v4 import both_forms, hub_config, saved
from plans import reason, with_gpu
from sessions import Session, worst
from tandem import LLM, SamplingParams, _core
from tandem.architectures.load import config_from_dict
from tandem.bench.architectures import named_subject
from tandem.checkpoint import open_checkpoint
from tandem.checkpoint.key_names import hugging_face_names
from tandem.cli.app import app
from tandem.errors import CheckpointError, ConfigError
from tandem.flags.engine_config import EngineConfig
from tandem.kernels.cpu_ops import CpuOps
from tandem.kernels.reference import TorchOps
from tandem.mechanisms.compressed_attention.shape import CompressedAttention
from tandem.mechanisms.compressed_attention.weights import CompressedWeights
from tandem.planner.choices.speculation import speculation, speculation_notices
from tandem.planner.plan import Plan
from tandem.planner.resolve import resolve
from tandem.spec.drafts import DraftBlockShape
from tandem.spec.model_config import ModelConfig
from tandem.spec.rope import Rope
from tiny import file_tensors

OPS = ["torch", *_core.supported_tiers()]
LENGTH = 140


@pytest.fixture(scope="module")
def both(tiny_models, tmp_path_factory) -> tuple[Path, Path]:
    """(the hub's own format, the numbers that it stands for)."""
    source, target = tiny_models["deepseek_v4-hub"], tmp_path_factory.mktemp("v4")
    packed, plain = both_forms(file_tensors(source))
    draft = {f"mtp.0.{n.removeprefix('layers.0.')}": t.clone() for n, t in packed.items() if n.startswith("layers.0.")}
    return saved(target / "hub", packed | draft, source, hub_config(source)), saved(target / "plain", plain, source)


def exact(path: Path, prompt: list[int]) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        return model(torch.tensor([prompt])).logits[0]


@pytest.mark.parametrize("name", OPS)
def test_the_hubs_own_format_is_computed_as_stored(both: tuple[Path, Path], name: str) -> None:
    """Of CPU kernels that round activations to bfloat16 the tolerance is that of such a rounding, 2^-8, at each of the
    11 products of 4 layers on a token's way, which add up as independent ones do. Every expert and entry is chosen:
    what rounding chooses differently is no error of arithmetic."""
    hub, plain = both
    prompt = torch.randint(256, (LENGTH,), generator=torch.Generator().manual_seed(7)).tolist()
    session = Session(hub, fuse=False, ops=TorchOps() if name == "torch" else CpuOps(_core.WorkerPool([-1, -1]), name),
                      pages=2, expert_format="stored", dense_codes=True)  # fmt: skip
    parts = prompt[:9], prompt[9:131], *([token] for token in prompt[131:])
    got = torch.cat([session.step([(0, part)])[0] for part in parts])
    assert worst([got], [exact(plain, prompt)]) < (1e-4 if name == "torch" else 44**0.5 * 2.0**-8)


def test_the_planner_sees_what_is_stored(both: tuple[Path, Path]) -> None:
    formats = open_checkpoint(both[0]).formats()
    assert formats.experts.name == "mxfp4" and "fp8" in formats.dense.name and "fp8" in formats.shared.name


def test_every_spelling_has_the_same_names(both: tuple[Path, Path], tiny_models) -> None:
    """Transformers' in memory, what it saves, and the hub's, which has a draft, too."""
    hub, saved_names = (set(open_checkpoint(path).names()) for path in both)
    scales = {name for name in hub if name.endswith(".scale") and "_hc." not in name}
    assert {name for name in hub - scales if not name.startswith("mtp.")} == saved_names
    fused = set(open_checkpoint(tiny_models.fused("deepseek_v4-hub")).names())
    assert {name for name in fused if ".experts." not in name} == {n for n in saved_names if ".experts." not in n}


def test_the_engine_answers_beside_a_draft_layer_that_is_not_run(both: tuple[Path, Path]) -> None:
    """Its layer lacks the projections, so nobody is told to use it."""
    hub, plain = both
    llm = LLM(str(hub), device="cpu", dtype="float32", kt_cpuinfer=2, max_total_tokens=512)
    assert not any("drafts with it" in notice for notice in llm.engine.plan.notices)
    assert not any("not understood" in notice for notice in llm.engine.plan.notices)
    prompt = list(range(30, 70))
    answer = llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True))[0].token_ids
    scores = exact(plain, prompt + answer)[len(prompt) - 1 : -1]
    chosen = scores[torch.arange(8), torch.tensor(answer)]
    assert (scores.max(-1).values - chosen).max() < 44**0.5 * 2.0**-8 * scores.abs().max()


def changed(tiny_models, **changes: object) -> ModelConfig:
    config = hub_config(tiny_models["deepseek_v4-hub"]) | changes
    return config_from_dict({key: value for key, value in config.items() if value is not None})


DSPARK = {
    "dspark_block_size": 5, "dspark_target_layer_ids": [1, 2, 3], "dspark_markov_rank": 256,
    "dspark_noise_token_id": 7,
}  # fmt: skip


@pytest.mark.parametrize(("changes", "why"), [
    ({"dspark_noise_token_id": None}, "whose dspark_noise_token_id is no token"),
    ({"dspark_target_layer_ids": [1, 2, 4]}, r"whose dspark_target_layer_ids [1, 2, 4] name no layers of the model"),
    ({"dspark_markov_rank": 0}, "without dspark_markov_rank"),
    ({"compress_ratios": [0, 4, 128, 4, 0, 4, 0]}, "which pools 4 tokens"),
    ({"dspark_n_routed_experts": 3}, "with 3 experts of its own, 8 of which a token uses"),
])  # fmt: skip
def test_a_dspark_draft_that_is_not_run_is_named(tiny_models, changes: dict[str, object], why: str) -> None:
    model = changed(tiny_models, num_nextn_predict_layers=1, **DSPARK | changes)
    assert model.draft.startswith("a DSpark draft of 3 layers for blocks of 5 tokens, ") and why in model.draft
    asked = EngineConfig.from_keywords("x", speculative_algorithm="NEXTN")
    [said] = speculation_notices(asked, model)
    assert "changes nothing: the checkpoint has a DSpark draft of 3 layers" in said and "NGRAM needs none" in said
    assert model.drafts is None and speculation(asked, model) is None


def test_drafts_are_told_apart(tiny_models) -> None:
    model = changed(tiny_models, num_nextn_predict_layers=1, **DSPARK)
    assert model.drafts is not None and model.drafts.block == DraftBlockShape(5, 3, 7, (1, 2, 3), 256)
    assert not model.draft and not model.unread_keys
    plain, speculative = (changed(tiny_models, num_nextn_predict_layers=count) for count in (0, 1))
    assert plain.draft == speculative.draft == "" and plain.drafts is None and speculative.drafts is not None
    pooled = changed(tiny_models, num_nextn_predict_layers=1, compress_ratios=[0, 4, 128, 4, 4])
    assert pooled.draft == "a draft layer (NextN) that pools 4 tokens" and pooled.drafts is None
    for name in ("NEXTN", "NGRAM"):
        assert speculation(EngineConfig.from_keywords("x", speculative_algorithm=name), model) is not None


FLASH = {
    "model_type": "deepseek_v4", "vocab_size": 129280, "hidden_size": 4096, "moe_intermediate_size": 2048,
    "num_hidden_layers": 43, "num_attention_heads": 64, "num_key_value_heads": 1, "head_dim": 512, "q_lora_rank": 1024,
    "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 6, "rms_norm_eps": 1e-6,
    "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0], "num_nextn_predict_layers": 1, "num_hash_layers": 3,
    "max_position_embeddings": 1048576, "qk_rope_head_dim": 64, "hc_mult": 4, "hc_sinkhorn_iters": 20,
}  # fmt: skip
PRO = FLASH | {
    "hidden_size": 7168, "num_attention_heads": 128, "num_hidden_layers": 61, "n_routed_experts": 384, "o_groups": 16,
    "index_topk": 1024, "moe_intermediate_size": 3072, "compress_ratios": None,
}  # fmt: skip


def kinds(model: ModelConfig) -> list[int]:
    bodies = [mixer for mixer in model.mixers if isinstance(mixer, CompressedAttention)]
    return [0 if body.compression is None else body.compression.stride for body in bodies]


def test_the_flash_model_has_its_layers_and_sizes() -> None:
    """284 billion weights, 13 of which a token uses, without the draft: as its makers say."""
    model = config_from_dict(FLASH)
    assert [kinds(model).count(stride) for stride in (0, 4, 128)] == [2, 21, 20]
    assert [layer.moe.router.table for layer in model.layers if layer.moe][:4] == [True, True, True, False]
    everything = model.routed_params + model.dense_params + model.vocab * model.hidden
    used = model.dense_params + model.routed_params * 6 / 256  # of the embedding one row
    assert round(everything / 1e9) == 284 and round(used / 1e9) == 13


def test_the_pro_model_by_its_configuration() -> None:
    model = config_from_dict({key: value for key, value in PRO.items() if value is not None})
    assert kinds(model)[:6] == [128, 128, 128, 4, 128, 4]
    everything = model.routed_params + model.dense_params + model.vocab * model.hidden
    assert 1.5e12 < everything < 1.7e12


@pytest.mark.parametrize("changes,said", [
    ({"compress_ratios": [0, 4, 7, 4]}, "layer_types or compress_ratios"),
    ({"compress_ratios": [0, 4]}, "for each of 4 layers"),
    ({"o_groups": 3}, "o_groups 3 does not divide 4 heads"),
    ({"scoring_func": "softmax"}, "scoring_func"),
    ({"num_key_value_heads": 2}, "num_key_value_heads"),
    ({"qk_rope_head_dim": 96}, "96 rotary channels of 32"),
    ({"mlp_layer_types": ["dense"] * 4}, "mlp_layer_types"),
    ({"compress_rate_hca": 1}, "pools 1 tokens"),
])  # fmt: skip
def test_what_is_not_computed_is_refused(tiny_models, changes: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        changed(tiny_models, **changes)


def test_a_table_of_other_experts_is_refused(both: tuple[Path, Path], tmp_path: Path) -> None:
    tensors = file_tensors(both[0])
    tensors["layers.0.ffn.gate.tid2eid"] = tensors["layers.0.ffn.gate.tid2eid"].to(torch.float32)
    broken = saved(tmp_path / "broken", tensors, both[0])
    with pytest.raises(CheckpointError, match="tid2eid is stored as F32; its whole numbers are read as I32 or I64"):
        Session(broken, pages=2)


def test_a_gpu_takes_it_whatever_backend_is_asked_for(tiny_models) -> None:
    """Its keys have kernels of their own; gathered keys, queries and streams of a chunk are planned for."""
    model = changed(tiny_models)
    config = EngineConfig(model="demo", attention_backend="flashinfer", page_size=16, chunked_prefill_size=512)
    made = resolve(config, model, with_gpu())
    assert made.gpu is not None and made.gpu.attention == "triton" and made.page_size == 128
    assert "kernels of their own" in reason(made, "attention")
    scratch = next(e.nbytes for ledger in made.ledgers for e in ledger.entries if e.name == "prompt scratch")
    row = 2 * 3 * 4 * 64 + 4 * 4 * 4 * 16 + 16 * 4 * 64  # queries, what turns of them, four streams
    order, places = 512 * 2 * 8 * (8 + 64), 64 * 3 * 8 * 1024 // 4  # of keys of each row; of entries of each sequence
    assert scratch == 9 * (64 << 20) + 512 * row + order + places


def test_the_tutorial_s_conversion_is_served_beside_the_checkpoint(both: tuple[Path, Path], tmp_path: Path) -> None:
    """Experts from MXFP4 to int4; what is dense stays the hub's. The answers are those of the converted numbers."""
    hub, out = both[0], tmp_path / "AMXINT4"
    line = f"""convert --input-path {hub} --input-type fp4 --output {out} --quant-method int4 --cpuinfer-threads 2
      --threadpool-count 1 --no-merge-safetensor"""
    done = CliRunner().invoke(app, shlex.split(line))
    assert done.exit_code == 0, done.output
    llm = LLM(str(hub), device="cpu", dtype="float32", kt_cpuinfer=2, max_total_tokens=512, kt_weight_path=str(out),
              kt_method="AMXINT4")  # fmt: skip
    assert "int4" in reason_of(llm.engine.plan, "expert format")
    sampling = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    alone = LLM(str(out), device="cpu", dtype="float32", kt_cpuinfer=2, max_total_tokens=512)
    answers = [each.generate([list(range(30, 70))], sampling)[0].token_ids for each in (llm, alone)]
    assert answers[0] == answers[1]


def reason_of(plan: Plan, name: str) -> str:
    return next(decision.value for decision in plan.decisions if decision.name == name)


def test_the_plan_of_the_whole_model_before_it_is_downloaded() -> None:
    """Its experts in MXFP4 and the rest mostly in fp8: what config.json says, without an index. 147 GB of experts."""
    model, stored = named_subject("deepseek-v4-flash")
    assert stored.experts.name == "mxfp4" and "fp8" in stored.dense.name
    experts = model.expert_bytes("stored", stored.experts) * model.routed_experts
    assert round(experts / 1e9) == 147


def test_a_draft_layer_is_found_under_either_name() -> None:
    """DeepSeek's own, and numbered behind the last layer, with DeepSeek's names of modules or Transformers'."""
    after = {
        "e_proj.weight": "e_proj.weight", "hnorm.weight": "hnorm.weight", "norm.weight": "norm.weight",
        "hc_head_fn": "hc_head_fn", "attn.wkv.weight": "self_attn.kv_proj.weight", "attn.kv_norm.weight":
        "self_attn.kv_norm.weight", "hc_attn_base": "attn_hc.base", "attn_norm.weight": "input_layernorm.weight",
        "ffn.gate.bias": "mlp.gate.e_score_correction_bias",
        "ffn.experts.3.w2.weight": "mlp.experts.3.down_proj.weight",
    }  # fmt: skip
    wanted = {f"mtp.0.{name}" for name in after.values()}
    heads = {"norm.weight": "shared_head.norm.weight", "hc_head_fn": "hc_head.hc_fn"}
    spellings = (
        [f"mtp.0.{name}" for name in after],
        [f"layers.43.{heads.get(name, name)}" for name in after],
        [f"model.layers.43.{heads.get(name, name)}" for name in after.values()],
    )
    for stored in spellings:
        other = ["layers.42.attn.wkv.weight", "layers.42.attn_norm.weight"]
        names = hugging_face_names([*stored, *other])
        assert {name for name in names if "mtp" in name} == wanted
        assert "model.layers.42.self_attn.kv_proj.weight" in names


def test_output_matrices_are_in_memory_once() -> None:
    """They are packed, or on a GPU; a copy beside that would be 2.7 GiB of DeepSeek-V4-Flash's."""
    shape = CompressedAttention(2, 16, 8, 4, Rope(1e4, 8), 1, 16, 1e-6)
    turns = torch.zeros(4, 4)
    weights = CompressedWeights(turns, turns, torch.zeros(2), torch.zeros(1, 16, 32))
    heads = CpuOps(_core.WorkerPool([-1]), "scalar").bound(shape, weights)
    groups = ref(weights.groups)
    del weights
    assert heads.weights.groups.nbytes == 0 and groups() is None
