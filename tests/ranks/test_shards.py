"""Ranks: shards of every native family add up to the whole model, in logits, bytes and states."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch

import tandem.checkpoint.checkpoint as safetensors
from block_draft_models import block_drafted
from draft_models import drafted
from quantised_models import BLOCKS, everything, experts_only, mixed, save_quantised
from rank_threads import with_ranks
from sessions import Session, median, ours, plan, prompts, worst
from tandem import _core
from tandem.checkpoint import load_model_config, open_checkpoint
from tandem.errors import ConfigError
from tandem.formats.codes import WeightCodes
from tandem.formats.reference import decoded
from tandem.kernels.cpu_ops import CpuOps
from tandem.kernels.reference import TorchOps
from tandem.mechanisms.grouped_query.shape import Gqa
from tandem.models import build
from tandem.planner.ranks.cut import cut, divided, possible_ranks
from tandem.spec.model_config import head_rows
from tandem.spec.shard import RankShard
from tiny import VARIANTS, TinyModels, settings

BLOCK_COUNT, SUMMANDS = 12, 64
ROUNDING = BLOCK_COUNT * SUMMANDS * 2.0**-24
"""Of float32, relative to the largest logit: every block's sums begin anew in another order."""
MOST = 4
EVEN = {  # of families whose other variants are odd in some size
    "granitemoeshared-even": ("granitemoeshared", VARIANTS["granitemoeshared"][1] | settings(num_key_value_heads=2)),
    "granitemoehybrid-even": ("granitemoehybrid", VARIANTS["granitemoehybrid"][1] | settings(
        mamba_n_heads=12, mamba_d_head=12, mamba_n_groups=4)),
    "kimi_linear-even": ("kimi_linear", VARIANTS["kimi_linear-short"][1] | settings(linear_num_heads=4)),
}  # fmt: skip
ALL = [*VARIANTS, *EVEN]


@pytest.fixture(scope="module", autouse=True)
def even_ones():
    VARIANTS.update(EVEN)
    yield
    for variant in EVEN:
        del VARIANTS[variant]


WIDE = BLOCKS | settings(moe_intermediate_size=256, intermediate_size=512)
STORED = {
    "all fp8": everything("fp8 blocks"), "fp8 + int4": mixed, "all gptq": everything("gptq"),
    "all awq": everything("awq"), "all int8": everything("int8 per channel"), "all mxfp8": everything("mxfp8 inverse"),
    "experts mxfp4": experts_only("mxfp4 deepseek"), "experts nvfp4": experts_only("nvfp4 modelopt"),
    "act-order": everything("gptq act-order"),
}  # fmt: skip


def several(variant: str, tiny_models: TinyModels) -> list[int]:
    return [n for n in possible_ranks(load_model_config(tiny_models[variant])) if 2 <= n <= MOST]


def compare(path, ranks: int, ops=TorchOps, **how) -> None:
    """All ranks have the same bits, and the whole model's numbers."""
    whole, each = ours(Session(path, ops=ops(), **how)), with_ranks(ranks, path, ops, ours, **how)
    assert worst(each[0], whole) < ROUNDING
    for got in each[1:]:
        assert all(torch.equal(a, b) for a, b in zip(got, each[0], strict=True))


@pytest.mark.parametrize("variant", ALL)
def test_shards_add_up_to_the_whole(tiny_models, variant) -> None:
    for ranks in several(variant, tiny_models):
        compare(tiny_models[variant], ranks)


def test_every_family_can_be_divided(tiny_models) -> None:
    families = {family for family, _ in VARIANTS.values()}
    assert families == {VARIANTS[variant][0] for variant in VARIANTS if several(variant, tiny_models)}


@pytest.mark.parametrize("variant", ["qwen2_moe", "gpt_oss", "glm4_moe", "mixtral", "gemma4_text", "deepseek_v4-hub"])
def test_experts_in_one_tensor_and_shared_ones_apart(tiny_models, variant) -> None:
    ranks = several(variant, tiny_models)[0]
    compare(tiny_models.fused(variant), ranks)
    compare(tiny_models[variant], ranks, fuse=False)


def core() -> CpuOps:
    return CpuOps(_core.WorkerPool([-1]), _core.supported_tiers()[-1])


@pytest.mark.parametrize("variant", ["qwen3_moe-yarn", "deepseek_v3-plain", "qwen3_next", "deepseek_v4-hub", "gpt_oss"])
def test_the_core_computes_shards(tiny_models, variant) -> None:
    """In float32 as in plain torch; in bfloat16 about as close to that as the whole model is. Ranks round their
    summands, too. Medians: where a router's near tie falls the other way, a whole row differs."""
    path, ranks = tiny_models[variant], several(variant, tiny_models)[-1]
    compare(path, ranks, core)
    exact = ours(Session(path))
    alone = median(ours(Session(path, "bfloat16", ops=core())), exact)
    assert median(with_ranks(ranks, path, core, ours, dtype="bfloat16")[0], exact) < 1.5 * alone


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    family, changes = VARIANTS["glm4_moe"]
    VARIANTS["glm4_moe-wide"] = (family, changes | WIDE)
    yield TinyModels(tmp_path_factory.mktemp("plain"))["glm4_moe-wide"]
    del VARIANTS["glm4_moe-wide"]


@pytest.mark.parametrize("name", STORED)
def test_stored_codes(wide, tmp_path, name) -> None:
    """The numbers that codes stand for; and the codes themselves in the C++ core."""
    path = save_quantised(wide, tmp_path, STORED[name])[0]
    compare(path, 2)
    how = {"expert_format": "stored", "dense_codes": True, "dtype": "bfloat16", "fuse": name.startswith("all")}
    exact = ours(Session(path))
    alone = median(ours(Session(path, ops=core(), **how)), exact)
    assert median(with_ranks(2, path, core, ours, **how)[0], exact) < 1.5 * alone


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    """Four ranks have 64 of what 128 share a scale: experts' widths, and inputs of o_proj."""
    family, changes = VARIANTS["glm4_moe"]
    sizes = settings(moe_intermediate_size=256, intermediate_size=256, num_key_value_heads=4)
    VARIANTS["glm4_moe-four"] = (family, changes | BLOCKS | sizes)
    yield TinyModels(tmp_path_factory.mktemp("plain"))["glm4_moe-four"]
    del VARIANTS["glm4_moe-four"]


@pytest.mark.parametrize("name", ["all fp8", "all gptq", "all awq"])
def test_a_cut_goes_through_groups(four, tmp_path, name) -> None:
    """A scale is repeated for both halves of its group. The numbers are the same, and codes stay codes."""
    path = save_quantised(four, tmp_path, STORED[name])[0]
    compare(path, 4)
    how = {"expert_format": "stored", "dense_codes": True, "dtype": "bfloat16"}
    exact = ours(Session(path))
    alone = median(ours(Session(path, ops=core(), **how)), exact)
    assert median(with_ranks(4, path, core, ours, **how)[0], exact) < 1.5 * alone


def test_what_a_cut_through_groups_holds(four, tmp_path) -> None:
    """The planner counts the scales that are repeated: those of down."""
    path = save_quantised(four, tmp_path, everything("fp8 blocks"))[0]
    checkpoint, model = open_checkpoint(path), load_model_config(path)
    stored = checkpoint.formats()
    assert possible_ranks(model, stored.experts.along, stored) == [1, 2, 4]
    module, shape = "model.layers.1.mlp.experts.3.down_proj", (model.hidden, 256)
    whole = checkpoint.weight(module, shape)
    for rank in range(4):
        columns = slice(64 * rank, 64 * (rank + 1))
        own = checkpoint.weight(module, shape, slice(None), columns)
        assert isinstance(own, WeightCodes) and own.group == 64 and whole.group == 128
        assert torch.equal(own.codes, whole.codes[:, columns])
        assert torch.equal(decoded(own), decoded(whole)[:, columns])
    parts = [cut(model, RankShard(rank, 4), stored.experts.along, stored) for rank in range(4)]
    bytes = sum(part.expert_bytes("stored", stored.experts) for part in parts)
    more = model.hidden * 256 * 4 / 128  # a float32 scale for every row of panels
    assert bytes - model.expert_bytes("stored", stored.experts) == pytest.approx(more, abs=4)
    halves = [cut(model, RankShard(rank, 2), stored.experts.along, stored) for rank in range(2)]
    assert sum(half.expert_bytes("stored", stored.experts) for half in halves) == pytest.approx(
        model.expert_bytes("stored", stored.experts), abs=2
    )


@pytest.mark.parametrize("family", ["glm4_moe", "deepseek_v3-plain", "qwen3_next", "deepseek_v4-every", "dspark"])
def test_a_draft_layer_is_divided_too(tiny_models, tmp_path, family) -> None:
    block = family == "dspark"  # which says how likely its draft tokens are
    source, make = tiny_models["deepseek_v4-every" if block else family], block_drafted if block else drafted
    path = make(source, tmp_path / "drafted").path
    ranks = next(n for n in possible_ranks(load_model_config(path)) if n > 1)

    def draft_tokens(session: Session) -> torch.Tensor:
        batch = session.batch([(0, prompts()[0])])
        session.model.forward(batch, session.states)
        return session.model.draft(None, batch, session.states)[1]

    with torch.inference_mode():
        whole = draft_tokens(Session(path, drafts=True))
    for got in with_ranks(ranks, path, TorchOps, draft_tokens, drafts=True):
        assert (got - whole).abs().max() < ROUNDING * whole.abs().max()


# -- what ranks hold ---


class Counted(safetensors.SafetensorsCheckpoint):
    """Counts the numbers of matrices that are read, by their tensors' names."""

    def __init__(self, path) -> None:
        super().__init__(path)
        self.read = Counter[str]()

    def weight(self, module, *how, **more):
        found = super().weight(module, *how, **more)
        self.read[module] = found.numel()
        return found

    def expert_weight(self, module, expert, *how, **more):
        found = super().expert_weight(module, expert, *how, **more)
        self.read[f"{module}.{expert}"] = found.numel()
        return found


BYTES = ("qwen3_moe", "qwen3_moe-yarn", "glm4_moe", "deepseek_v3-plain", "deepseek_v4-hub", "olmoe", "gpt_oss")


@pytest.mark.parametrize("variant", BYTES)
def test_the_planner_counts_what_ranks_read(tiny_models, variant) -> None:
    """Of all matrices; and what no rank has alone is what all have."""
    path, model = tiny_models[variant], load_model_config(tiny_models[variant])
    ranks, whole = several(variant, tiny_models)[-1], numbers_read(path, model)
    each = [cut(model, RankShard(rank, ranks)) for rank in range(ranks)]
    read = [numbers_read(path, own) for own in each]
    for own, found in zip(each, read, strict=True):
        assert found.total() == planned(own)
    for module, size in whole.items():
        assert sum(found[module] for found in read) in (size, ranks * size, size * copies(model, ranks))
    twice = sum(found.total() for found in read) - whole.total()
    assert twice == sum(map(planned, each)) - planned(model) > 0


def numbers_read(path, model) -> Counter[str]:
    checkpoint = Counted(path)
    build(model, replace(plan(), fuse_shared_experts=False), checkpoint, TorchOps())
    return checkpoint.read


def planned(model) -> int:
    """Of the planner's sizes those of matrices."""
    norms = model.dense_params - sum(body.params(model.hidden) for body in model.bodies)
    head = head_rows(model).size * model.hidden
    blocks = sum(len(layer.blocks) for layer in model.layers)
    assert norms >= head + blocks * model.hidden
    return model.dense_params - (norms - head) + model.routed_params


def copies(model, ranks: int) -> int:
    kv = {body.kv_heads for body in model.bodies if isinstance(body, Gqa) and divided(body)}
    return ranks // min(kv, default=ranks) or 1


def test_states_are_divided_with_their_heads(tiny_models) -> None:
    def token(variant: str, ranks: int) -> int:
        return cut(load_model_config(tiny_models[variant]), RankShard(0, ranks)).state_layout("bfloat16").token_bytes

    def slot(variant: str, ranks: int) -> int:
        return (
            cut(load_model_config(tiny_models[variant]), RankShard(0, ranks)).state_layout("bfloat16").rewritten_bytes
        )

    assert token("qwen3_moe", 1) == 4 * token("qwen3_moe", 4)
    assert token("qwen3_moe-yarn", 1) == 2 * token("qwen3_moe-yarn", 2) == 2 * token("qwen3_moe-yarn", 4)
    assert token("deepseek_v3-plain", 1) == token("deepseek_v3-plain", 4)
    assert slot("qwen3_next", 1) == 2 * slot("qwen3_next", 2)


# -- what cannot be divided ---


@pytest.mark.parametrize(
    ("variant", "ranks", "unit", "message"),
    [
        ("qwen2_moe", 4, 1, "6 query heads cannot be divided among 4 ranks; possible: 1, 2$"),
        ("qwen3_moe-tied", 2, 1, "3 heads of keys cannot be divided among 2 ranks; possible: 1, 3, 6$"),
        ("deepseek_v3", 2, 1, "5 heads cannot be divided among 2 ranks; possible: 1$"),
        ("qwen3_moe", 4, 14, "28 rows of experts, which have groups of 14, cannot be .*; possible: 1, 2$"),
        ("qwen3_next", 4, 1, "heads of keys of delta nets cannot .*; possible: 1, 2$"),
        ("deepseek_v4", 2, 1, "3 groups of the output cannot be divided among 2 ranks; possible: 1$"),
    ],
)
def test_what_cannot_be_divided_is_named(tiny_models, variant, ranks, unit, message) -> None:
    with pytest.raises(ConfigError, match=f"^--tensor-parallel-size {ranks}: .*{message}"):
        cut(load_model_config(tiny_models[variant]), RankShard(0, ranks), unit)


@pytest.mark.parametrize("dense", [False, True])
def test_groups_of_codes_stay_whole(wide, tmp_path, dense) -> None:
    """Blocks of 128 in experts of 256 rows, and in a projection of as many inputs: halves of them are whole enough."""
    choice = everything("fp8 blocks") if dense else experts_only("fp8 blocks")
    path = save_quantised(wide, tmp_path, choice)[0]
    what = "o_proj" if dense else "down_proj"
    said = rf"^--tensor-parallel-size 8: model.*{what} is fp8 128x128, and its 256 inputs .* 1, 2, 4$"
    with pytest.raises(ConfigError, match=said):
        build(cut(load_model_config(path), RankShard(0, 8)), plan(), open_checkpoint(path), TorchOps())
