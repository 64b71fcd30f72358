"""DeepSeek-V3.2 and GLM-5 as served: every cut, prefixes, preemption; checkpoints and configurations of the hub."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from quantised_models import save_deepseek_names, save_quantised
from sessions import Session, median, ours, prompts, reference, worst
from tandem import LLM, _core
from tandem.architectures.load import config_from_dict
from tandem.bench.architectures import CONFIGS, named_config
from tandem.bench.step_bound import gpu_step_bytes
from tandem.bench.stored import stored_as
from tandem.bench.synthetic import SyntheticCheckpoint
from tandem.checkpoint import open_checkpoint
from tandem.engine.protocol import GenerateRequest, SamplingSettings
from tandem.errors import ConfigError
from tandem.formats.codes import WeightCodes
from tandem.kernels.cpu_ops import CpuOps
from tandem.kernels.reference import TorchOps
from tandem.mechanisms.latent.shape import Latent
from tandem.mechanisms.token_index.shape import Index
from tandem.spec.model_config import ModelConfig
from tiny import VARIANTS, save_tiny, settings

SPARSE = ["deepseek_v32", "glm_moe_dsa"]
FLAGS = {"dtype": "float32", "kt_cpuinfer": 2, "page_size": 4, "max_running_requests": 3}
GREEDY = SamplingSettings(temperature=0.0, max_tokens=14, ignore_eos=True)


@pytest.fixture(params=["torch", "core"])
def ops(request: pytest.FixtureRequest):
    torch_ops = request.param == "torch"
    return TorchOps() if torch_ops else CpuOps(_core.WorkerPool([-1, -1]), _core.supported_tiers()[-1])


@pytest.mark.parametrize("variant", SPARSE)
def test_every_cut_of_a_prompt_equals_transformers(tiny_models, ops, variant: str) -> None:
    """The core's bits are the same, too, wherever a prompt is cut."""
    prompt, expected = prompts()[0][:23], reference(tiny_models[variant])[0][:23]
    session, whole = Session(tiny_models[variant], ops=ops), None
    for cut in range(23):
        session.lengths = [0, 0, 0]
        parts = [session.step([(0, part)])[0] for part in (prompt[:cut], prompt[cut:]) if part]
        assert worst([torch.cat(parts)], [expected]) < 1e-4
        whole = torch.cat(parts) if whole is None else whole
        assert isinstance(ops, TorchOps) or torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("variant", SPARSE)
def test_the_choice_matters(tiny_models, tmp_path: Path, variant: str) -> None:
    """The same weights with a budget for all tokens: the first rows agree, the others do not. So the tests above see an
    indexer at work."""
    model = tiny_models[variant]
    session = Session(_with(model, tmp_path, index_topk=100))
    together, chosen = session.step([(0, prompts()[0])])[0], reference(model)[0]
    budget = json.loads((model / "config.json").read_text())["index_topk"]
    assert worst([together[:budget]], [chosen[:budget]]) < 1e-4
    assert worst([together[budget:]], [chosen[budget:]]) > 1e-2


def _with(model: Path, to: Path, **keys: object) -> Path:
    for file in model.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    config = json.loads((to / "config.json").read_text())
    (to / "config.json").write_text(json.dumps(config | keys))
    return to


def _greedy_as_transformers(path: Path, prompt: list[int], answer: list[int]) -> bool:
    """Transformers, given prompt and answer, would have said the same token after each."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *answer[:-1]]])).logits[0, len(prompt) - 1 :]
    return logits.argmax(-1).tolist() == answer


@pytest.mark.parametrize("variant", SPARSE)
def test_text_of_later_turns_is_transformers(tiny_models, variant: str) -> None:
    """The second turn finds the first in the prefix tree, the indexer's keys with it; prompts come in chunks."""
    llm = LLM(str(tiny_models[variant]), **FLAGS, max_total_tokens=256, chunked_prefill_size=6)
    prompt = list(range(40, 71))
    for turn in range(3):
        answer = llm.generate([prompt], GREEDY)[0]
        assert _greedy_as_transformers(tiny_models[variant], prompt, answer.token_ids)
        assert not turn or answer.cached_tokens >= len(prompt) - 3 - 2 * 4
        prompt = [*prompt, *answer.token_ids, 7, 8, 9]


@pytest.mark.parametrize("radix", [True, False])
@pytest.mark.parametrize("variant", SPARSE)
def test_text_after_a_preemption_is_transformers(tiny_models, variant: str, radix: bool) -> None:
    llm = LLM(
        str(tiny_models[variant]), **FLAGS, max_total_tokens=72, disable_radix_cache=not radix, chunked_prefill_size=16
    )
    llm.engine._scheduler.pace.slice_seconds = lambda: 60.0  # chunks at once: pages run out while many decode
    asked = [[(37 * i + 11 * j) % 250 for j in range(15 + i)] for i in range(3)]
    answers = llm.generate(asked, GREEDY)
    assert llm.engine.stats().preemptions > 0
    for prompt, answer in zip(asked, answers, strict=True):
        assert _greedy_as_transformers(tiny_models[variant], prompt, answer.token_ids)


BLOCKS = settings(
    hidden_size=128, moe_intermediate_size=128, intermediate_size=256, num_attention_heads=4, num_key_value_heads=4,
    q_lora_rank=128, kv_lora_rank=128, qk_nope_head_dim=32, qk_rope_head_dim=32, v_head_dim=32, n_routed_experts=8,
    index_n_heads=16, index_head_dim=128,
)  # fmt: skip


@pytest.fixture(scope="module")
def blocks(tmp_path_factory) -> Path:
    """A DeepSeek-V3.2 of whole fp8 blocks."""
    family, changes = VARIANTS["deepseek_v32"]
    VARIANTS["deepseek_v32-blocks"] = (family, changes | BLOCKS)
    path = tmp_path_factory.mktemp("blocks") / "model"
    save_tiny("deepseek_v32-blocks", path)
    del VARIANTS["deepseek_v32-blocks"]
    return path


def test_a_checkpoint_of_fp8_blocks(blocks: Path, tmp_path: Path) -> None:
    """As the hub has it: the indexer's `wq_b` and `wk` with block scales, its `weights_proj` without; and the same
    under DeepSeek's own names."""
    plain_ones = "weights_proj", "kv_a_proj_with_mqa"
    quantised, plain = save_quantised(
        blocks, tmp_path, lambda module: None if module.endswith(plain_ones) else "fp8 blocks"
    )
    names = str(list(open_checkpoint(quantised)._shards.names()))
    assert "self_attn.indexer.wk.weight_scale_inv" in names and "weights_proj.weight_scale_inv" not in names
    exact = ours(Session(quantised))
    assert worst(exact, reference(plain)) < 1e-4
    renamed = save_deepseek_names(quantised, tmp_path / "renamed")
    assert all(torch.equal(a, b) for a, b in zip(exact, ours(Session(renamed)), strict=True))
    session = Session(quantised, "bfloat16", dense_codes=True, expert_format="stored")
    assert median(ours(session), exact) < 1.5 * median(reference(plain, torch.bfloat16), exact)


# -- configurations ---


def test_deepseek_v32_is_what_its_authors_say_it_is() -> None:
    """DeepSeek-V3 and an indexer in each of 61 layers; 128 numbers more per token and layer; MTP's layer apart."""
    keys = CONFIGS["deepseek-v32"] | {"num_nextn_predict_layers": 1, "ep_size": 1, "scoring_func": "sigmoid"}
    config, base = config_from_dict(keys), named_config("deepseek-v3", None)
    each = 1536 * 64 * 128 + 7168 * 128 + 7168 * 64
    assert config.dense_params - base.dense_params == 61 * each
    assert config.state_layout("bfloat16").token_bytes == 61 * (576 + 128) * 2
    assert config.unread_keys == () and config.drafts is not None
    assert all(isinstance(m, Latent) and m.index == _index(config, 0) for m in config.mixers)
    assert _index(config, 0).rope.pairs == "halves" and _index(config, 0).budget == 2048


GLM_52 = settings(
    indexer_types=["full" if i < 3 or i % 4 == 2 else "shared" for i in range(78)], index_topk_freq=4,
    index_skip_topk_offset=3, index_topk_pattern=None, index_share_for_mtp_iteration=True, moe_router_dtype="float32",
    max_position_embeddings=1048576, head_dim=64, qk_head_dim=256, num_key_value_heads=64, ep_size=1, pretraining_tp=1,
    moe_layer_freq=1, rope_interleave=True, scoring_func="sigmoid", topk_method="noaux_tc",
    rope_parameters={"rope_theta": 8e6, "rope_type": "default"},
)  # fmt: skip


@pytest.mark.parametrize("left_out", [(), ("indexer_types",)])
def test_glm_52_chooses_in_21_of_78_layers(left_out: tuple[str, ...]) -> None:
    keys = CONFIGS["glm-5"] | {key: value for key, value in GLM_52.items() if key not in left_out}
    config = config_from_dict(keys)
    assert not config.unread_keys
    sources = [_index(config, i).reuse for i in range(78)]
    assert sources.count(None) == 21 and sources[:8] == [None, None, None, 2, 2, 2, None, 6]
    assert config.state_layout("bfloat16").token_bytes == 2 * (78 * 576 + 21 * 128)
    assert _index(config, 0).rope.pairs == "neighbours" and _index(config, 0).rope.theta == 8e6


def test_patterns_of_letters() -> None:
    keys = CONFIGS["glm-5"] | {"num_hidden_layers": 5, "index_topk_pattern": "FSFSS"}
    assert [_index(config_from_dict(keys), i).reuse for i in range(5)] == [None, 0, None, 2, 2]


def _index(config: ModelConfig, layer: int) -> Index:
    mixer = config.mixers[layer]
    assert isinstance(mixer, Latent) and mixer.index is not None
    return mixer.index


@pytest.mark.parametrize(("changes", "message"), [
    ({"indexer_types": ["shared"] * 78}, "'full' for the first"),
    ({"indexer_types": ["full"] * 3}, "for each of 78 layers"),
    ({"indexer_types": ["full"] * 77 + ["none"]}, "must say 'full' or 'shared'"),
    ({"index_topk_pattern": "F" * 77}, "for each of 78 layers"),
    ({"mlp_layer_types": ["dense"] * 3}, "mlp_layer_types must be a list of 78"),
    ({"q_lora_rank": None}, "q_lora_rank is null"),
    ({"index_head_dim": 32}, "index_head_dim 32 is less than qk_rope_head_dim 64"),
    ({"layer_types": ["full_attention"] * 78}, "every layer is indexed_attention"),
    ({"index_topk": 0}, "index_topk is 0"),
    ({"scoring_func": "softmax"}, "scoring_func = 'softmax' is not supported"),
])  # fmt: skip
def test_what_is_not_understood_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_from_dict(CONFIGS["glm-5"] | changes)


def test_a_step_reads_the_latents_of_chosen_tokens_and_all_keys_of_indexers() -> None:
    config = named_config("glm-5", 8)
    stored = stored_as(config, "fp8")
    short, long = (gpu_step_bytes(config, stored, 2, tokens) for tokens in (2048, 131072))
    assert long - short == 2 * 8 * 2 * 128 * (131072 - 2048)


def test_benches_store_indexers_as_published_checkpoints_do() -> None:
    checkpoint, layer = SyntheticCheckpoint("fp8"), "model.layers.0.self_attn.indexer."
    for module, codes in (("wq_b", True), ("wk", True), ("weights_proj", False)):
        assert isinstance(checkpoint.weight(layer + module, (128, 256)), WeightCodes) == codes


def test_the_draft_layer_is_named(tiny_models, tmp_path: Path) -> None:
    model = _with(tiny_models["glm_moe_dsa"], tmp_path, num_nextn_predict_layers=1)
    with pytest.warns(UserWarning, match=r"num_nextn_predict_layers: the model's draft layers \(MTP\) are not loaded"):
        llm = LLM(str(model), **FLAGS, max_total_tokens=64)
    llm.engine.add(GenerateRequest(id="0", prompt_ids=[1, 2, 3], sampling=GREEDY))
    assert llm.engine.step()
