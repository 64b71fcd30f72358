"""Qwen3.8-Flash-Next as served: every cut, hashes, streams; the hub's files and configurations; what stays on a CPU."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    Qwen4ExpConfig,
    Qwen4ExpForConditionalGeneration,
    Qwen4ExpTextConfig,
)
from transformers.models.qwen4_exp import modeling_qwen4_exp as theirs

from hub_copies import keys_of
from plans import machine, with_gpu
from sessions import Session, ours, plan, prompts, reference, worst
from tandem import _core
from tandem.architectures.load import config_from_dict, load_config
from tandem.architectures.recurrent.qwen4_exp import primes
from tandem.bench.architectures import CONFIGS, named_config
from tandem.bench.synthetic import SyntheticCheckpoint
from tandem.checkpoint import load_model_config, open_checkpoint
from tandem.errors import CheckpointError, ConfigError
from tandem.flags.engine_config import EngineConfig
from tandem.kernels.cpu_ops import CpuOps
from tandem.kernels.reference import TorchOps
from tandem.mechanisms.cost import cost_of
from tandem.mechanisms.delta_net.shape import DeltaRule
from tandem.mechanisms.gated_streams.shape import GatedStreams
from tandem.mechanisms.grouped_query.shape import Gqa
from tandem.mechanisms.ngrams.shape import Ngram
from tandem.mechanisms.ngrams.torch import Hashes, hashed, last_ids
from tandem.mechanisms.token_index.cost import SCORE_BYTES
from tandem.models import build
from tandem.models.passing import ForwardState
from tandem.planner.host_memory import pinned_bytes
from tandem.planner.resolve import resolve
from tandem.spec.gpu_scratch import StepSize
from tiny import BOS, EOS, VOCAB, save_tokenizer, settings

VARIANTS = ["qwen4_exp", "qwen4_exp-tables"]
NEXT = "qwen3.8-flash-next"


@pytest.fixture(params=["torch", "core"])
def ops(request: pytest.FixtureRequest):
    torch_ops = request.param == "torch"
    return TorchOps() if torch_ops else CpuOps(_core.WorkerPool([-1, -1]), _core.supported_tiers()[-1])


def with_ends(prompt: list[int]) -> list[int]:
    """With ends of texts in the middle: two together, and one where n-grams of several lengths meet it."""
    return [EOS if at in (3, 11, 12, 16) else token for at, token in enumerate(prompt)]


def expected(path: Path, prompt: list[int]) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        found: Tensor = model(torch.tensor([prompt])).logits[0]
    return found


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_cut_of_a_prompt_equals_transformers(tiny_models, ops, variant: str) -> None:
    """The core's bits are the same, too, wherever a prompt is cut."""
    prompt = with_ends(prompts()[0])
    exact = expected(tiny_models[variant], prompt)
    session, whole = Session(tiny_models[variant], ops=ops), None
    for cut in range(len(prompt)):
        session.lengths = [0, 0, 0]
        parts = [session.step([(0, part)])[0] for part in (prompt[:cut], prompt[cut:]) if part]
        assert worst([torch.cat(parts)], [exact]) < 1e-4
        whole = torch.cat(parts) if whole is None else whole
        assert isinstance(ops, TorchOps) or torch.equal(torch.cat(parts), whole)


CHANGES = [
    {"indexer_budget": 100}, {"output_gate_type": "silu"}, {"eos_token_id": 5}, {"indexer_compress_ratio": 2},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 3000.0, "partial_rotary_factor": 0.25}},
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: next(iter(change)))
def test_what_the_tests_above_see_at_work(tiny_models, tmp_path: Path, change: dict[str, object]) -> None:
    """With a budget for all tokens the first rows agree, and others do not."""
    model, prompt = tiny_models["qwen4_exp"], with_ends(prompts()[0])
    exact = expected(model, prompt)
    found = Session(_with(model, tmp_path, **change)).step([(0, prompt)])[0]
    assert worst([found], [exact]) > 1e-3
    if "indexer_budget" in change:
        assert worst([found[:15]], [exact[:15]]) < 1e-4 and worst([found[15:]], [exact[15:]]) > 1e-3
    if "eos_token_id" in change:
        assert worst([found[:1]], [exact[:1]]) > 1e-4  # what stands for tokens that are missing


def _with(model: Path, to: Path, **keys: object) -> Path:
    for file in model.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    (to / "config.json").write_text(json.dumps(keys_of(to) | keys))
    return to


def test_rejected_drafts_leave_nothing_behind(tiny_models) -> None:
    """Rows of wrong tokens, then the right ones in their places, also where a block had closed."""
    prompt = with_ends(prompts()[0])
    session = Session(tiny_models["qwen4_exp"], ops=CpuOps(_core.WorkerPool([-1, -1]), _core.supported_tiers()[-1]))
    whole = session.step([(0, prompt)])[0]
    tried = DraftedSession(tiny_models["qwen4_exp"])
    assert torch.equal(tried.text(prompt, wrong=3), whole)


class DraftedSession(Session):
    """Each step has three draft tokens; memories take in what is sure."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, ops=CpuOps(_core.WorkerPool([-1, -1]), _core.supported_tiers()[-1]))
        from tandem.engine.state.arrays import allocate

        layout = self.config.state_layout("float32", self.page, draft_tokens=3)
        self.states = allocate(layout, 3 * self.pages, slots=4).arrays
        for array in (array for arrays in self.states for array in arrays):
            array.fill_(float("nan"))

    def text(self, prompt: list[int], wrong: int) -> Tensor:
        """Logits of a prompt that comes token by token, each followed by wrong ones, every third by right ones."""
        rows, at, state_lens = list[Tensor](), 0, 0
        while at < len(prompt):
            right = min(len(prompt), at + (1 + wrong if at % 3 == 2 else 1))
            tokens = prompt[at:right] + [(token + 7) % 250 for token in range(1 + wrong - (right - at))]
            self.lengths[0] = at
            batch = replace(
                self.batch([(0, tokens)]), state_lens=torch.tensor([state_lens]).int(),
                num_verified=torch.tensor([1]).int(),
            )
            with torch.inference_mode():
                rows.append(self.model.forward(batch, self.states)[: right - at])
            state_lens, at = at + 1, right
        return torch.cat(rows)


# -- hashes ---


@pytest.fixture(scope="module")
def published_hashes(tmp_path_factory) -> theirs.Qwen4ExpTextNGramEmbedding:
    """Transformers' own, for the vocabulary of the published model; its table has no rows here."""
    keys = {key: value for key, value in CONFIGS[NEXT].items() if key != "model_type"}
    with torch.device("meta"):
        made = theirs.Qwen4ExpTextNGramEmbedding(Qwen4ExpTextConfig(**keys), 2560, 1)
    config = made.unigram_vocab_size, made.ngram_size, made.ple_layer_index, made.seed
    made.layer_multipliers = theirs._build_layer_multipliers(*config)
    made.ngram_heads_vocab_sizes = torch.tensor(made.head_vocab_sizes)
    made.ngram_heads_offsets = torch.tensor(made.head_offsets)
    made.ngram_embedding = _Numbers()
    return made


class _Numbers(nn.Module):
    """In place of the table."""

    weight = torch.empty(0)

    def forward(self, numbers: Tensor) -> Tensor:
        return numbers


STOP, PLACEHOLDER = 248044, 248056
IDS = [17, 23, 29, STOP, 5, 248319, 0, STOP, STOP, 11, PLACEHOLDER, PLACEHOLDER, 3, 100000, 23, 29, 17, STOP, 1, 2]


@pytest.mark.parametrize("cut", [0, 1, 2, 9, 18])
def test_hashes_are_the_references(published_hashes, cut: int) -> None:
    """20 tokens with ends of texts, images' placeholders and the start, whole and in two parts."""
    shape = next(body for body in named_config(NEXT, None).bodies if isinstance(body, Ngram))
    made = published_hashes
    with torch.inference_mode():
        exact = made(torch.tensor([IDS]), None).view(len(IDS), -1)
    assert shape.table.rows == 320_001_536 and shape.table.width == 160 and shape.stop == STOP
    assert tuple(made.head_vocab_sizes) == primes(20_000_000 - 1, 0, 16)
    hashes = Hashes(made.layer_multipliers, made.ngram_heads_vocab_sizes, made.ngram_heads_offsets)
    ring, found = torch.full((2, shape.longest, 1), float("nan")), list[Tensor]()
    for first, end in ((0, cut), (cut, len(IDS))):
        if first < end:
            ids = torch.tensor(IDS[first:end])
            found.append(hashed(last_ids(ids, _rows(first, end), ring, shape), hashes, shape.heads))
    assert torch.equal(torch.cat(found), exact)
    assert exact[0].tolist() == FIRST


FIRST = [
    7961118, 35595600, 53154041, 65925962, 86478454, 100794091, 133015820, 144041389, 176216895, 183261499, 211010573,
    235637741, 252030661, 269649351, 289128081, 308564037,
]  # fmt: skip
"""Of token 17 at a text's beginning, as other engines have it for the published model."""


def _rows(first: int, end: int) -> Any:
    at = torch.arange(first, end)
    each = {"query_starts": [0, end - first], "seq_lens": [end], "slots": [1]}
    tensors = {name: torch.tensor(values).int() for name, values in each.items()}
    from tandem.models.batch import ForwardBatch

    batch = ForwardBatch(at, at, at, block_tables=torch.zeros(1, 64).int(), logits_rows=at, **tensors)
    return ForwardState(batch, torch.empty(0)).rows


# -- files of the hub ---

TEXT = settings(
    vocab_size=VOCAB, hidden_size=48, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    num_experts=6, num_experts_per_tok=2, moe_intermediate_size=20, shared_expert_intermediate_size=20,
    linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=12,
    output_gate_type="sigmoid", hc_lowrank=12, indexer_n_heads=12, indexer_kv_heads=1, indexer_head_dim=16,
    indexer_budget=8, indexer_compress_ratio=4, ple_layer_ids=[2], ngram_vocab_size_base=50, split_ngram_parts=4,
    bos_token_id=BOS, eos_token_id=EOS, pad_token_id=EOS, initializer_range=0.15,
    rope_parameters=settings(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5, mrope_section=[2, 1, 1],
                             mrope_interleaved=True),
)  # fmt: skip
TOWER = settings(depth=1, hidden_size=16, num_heads=2, out_hidden_size=48, intermediate_size=20,
                 num_position_embeddings=16)  # fmt: skip


@pytest.fixture(scope="module")
def beside_images(tmp_path_factory) -> Path:
    """As the hub has it: text beside a tower, under the hub's names, and words of its own for kinds of layers."""
    torch.manual_seed(4)
    path = tmp_path_factory.mktemp("qwen") / "model"
    model = Qwen4ExpForConditionalGeneration(Qwen4ExpConfig(text_config=TEXT, vision_config=TOWER)).float()
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if "norm" in name or name.endswith(("conv1d.weight", "A_log")):
                tensor.copy_(torch.randn_like(tensor) * 0.3)
    model.save_pretrained(path)
    save_tokenizer(path)
    keys = json.loads((path / "config.json").read_text())
    keys["text_config"]["layer_types"] = ["linear_attention"] * 3 + ["full_attention"]
    (path / "config.json").write_text(json.dumps(keys))
    return path


def test_text_beside_images(beside_images: Path) -> None:
    stored = str(list(open_checkpoint(beside_images)._shards.names()))
    assert "model.language_model.layers.1.ple.ple_embedding.ngram_embedding.shard_3.weight" in stored
    model = Qwen4ExpForConditionalGeneration.from_pretrained(
        beside_images, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.inference_mode():
        exact = [model(torch.tensor([prompt])).logits[0] for prompt in prompts()]
    assert worst(ours(Session(beside_images)), exact) < 1e-4
    assert "vision_config" in load_model_config(beside_images).unread_keys


def test_images_are_named_and_left_out(beside_images: Path) -> None:
    made = resolve(EngineConfig(model="m"), load_model_config(beside_images), machine())
    assert any("vision_config" in notice and "images" in notice for notice in made.notices)


@pytest.mark.parametrize(("without", "message"), [
    ("shard_0.weight", r"has no tensor model\.layers\.1\.ple\.ple_embedding\.ngram_embedding\.shard_0\.weight"),
    ("layer_multipliers", "has no tensor .*layer_multipliers"), ("hyper_connection_mixer.input_mix_weight_up.weight",
                                                                  "has no tensor .*input_mix_weight_up"),
])  # fmt: skip
def test_what_a_checkpoint_lacks_is_named(tiny_models, tmp_path: Path, without: str, message: str) -> None:
    from safetensors.torch import save_file

    from tiny import file_tensors

    _with(tiny_models["qwen4_exp"], tmp_path)
    tensors = {name: tensor for name, tensor in file_tensors(tmp_path).items() if not name.endswith(without)}
    for file in tmp_path.glob("*.safetensors*"):
        file.unlink()
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        Session(tmp_path)


@pytest.mark.parametrize(("which", "change"), [("offsets", 1000), ("offsets", -1000), ("vocab_sizes", -1000)])
def test_hashes_that_name_rows_beyond_the_table_are_refused(
    tiny_models, tmp_path: Path, which: str, change: int
) -> None:
    from safetensors.torch import save_file

    from tiny import file_tensors

    _with(tiny_models["qwen4_exp"], tmp_path)
    tensors = file_tensors(tmp_path)
    name = f"model.layers.1.ple.ple_embedding.ngram_heads_{which}"
    tensors[name] = tensors[name] + change
    for file in tmp_path.glob("*.safetensors*"):
        file.unlink()
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="name rows beyond the table's"):
        Session(tmp_path)


# -- configurations ---

HUB: dict[str, Any] = CONFIGS[NEXT] | {
    "layer_types": ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(48)],
    "attention_bias": False, "attn_output_gate": True, "hidden_act": "silu", "mamba_ssm_dtype": "float32",
    "mtp_num_hidden_layers": 0, "mtp_use_dedicated_embeddings": False, "split_ngram_parts": 128, "seed": 1234,
    "partial_rotary_factor": 0.25, "mlp_only_layers": [],
    "mtp": {"hybrid": True, "layer_types": ["full_attention"], "num_hidden_layers": 1, "rope_theta": 10_000_000},
}  # fmt: skip


def test_flash_next_is_what_its_authors_say_it_is() -> None:
    """36 delta nets and 12 attentions that choose: 125 billion weights, of which a token uses 6, and the head, beside a
    table of 51 billion."""
    config = config_from_dict({"model_type": "qwen4_exp", "text_config": HUB | {"model_type": "qwen4_exp_text"}})
    assert config.unread_keys == () and config.layers == named_config(NEXT, None).layers
    deltas = [mixer for mixer in config.mixers if isinstance(mixer, DeltaRule)]
    attentions = [mixer for mixer in config.mixers if isinstance(mixer, Gqa)]
    assert len(deltas) == 36 and {delta.gate for delta in deltas} == {"sigmoid"} and len(attentions) == 12
    assert {(each.rope.dims, each.index and each.index.most) for each in attentions} == {(64, 2051)}
    assert config.state_layout("bfloat16", 4).token_bytes == 12 * (2048 + 64)
    weights = config.dense_params + config.routed_params + config.vocab * config.hidden
    (table,) = config.tables
    assert 124e9 < weights < 126e9 and table.rows * table.width == 320_001_536 * 160
    used = config.dense_params + config.expert_params * 10 * 48
    assert 6.5e9 < used < 6.8e9
    assert config.layers[1].hyper == GatedStreams(4, 320) and isinstance(config.layers[1].blocks[0].body, Ngram)
    assert not any(isinstance(body, Ngram) for i, layer in enumerate(config.layers) if i != 1
                   for body in (block.body for block in layer.blocks))  # fmt: skip
    slot = config.state_layout("float32", 4).slot_bytes
    assert 36 * 48 * 128 * 128 * 4 < slot < 36 * 48 * 128 * 128 * 4 * 1.1


def test_layers_have_their_usual_kinds_where_none_are_given() -> None:
    assert config_from_dict(HUB | {"layer_types": None}).layers == config_from_dict(HUB).layers


@pytest.mark.parametrize(("changes", "message"), [
    ({"indexer_kv_heads": 2}, "indexer_kv_heads = 2 is not supported"),
    ({"indexer_n_heads": None}, "lacks 'indexer_n_heads'"),
    ({"indexer_compress_ratio": 3}, "indexer_compress_ratio 3 does not divide indexer_budget 2048"),
    ({"indexer_compress_ratio": 1}, "indexer_compress_ratio 1 does not divide"),
    ({"indexer_head_dim": 32}, "64 rotary channels do not fit into indexer_head_dim 32"),
    ({"output_gate_type": "tanh"}, "output_gate_type = 'tanh' is not supported"),
    ({"layer_types": ["sliding_attention"] * 48}, "'sliding_attention' is not supported"),
    ({"layer_types": ["linear_attention"] * 48}, "layer_types has no full_attention"),
    ({"full_attention_interval": 0, "layer_types": None}, "full_attention_interval is 0"),
    ({"hc_count": 1}, "hc_count is 1, and must be at least 2"),
    ({"ple_layer_ids": [49]}, "ple_layer_ids has 49, and layers are 1 to 48"),
    ({"ple_embed_dim": 2561}, "ple_embed_dim 2561 is not a multiple of 16 hashes"),
    ({"ngram_size": 1}, "is not a multiple of 0 hashes|must be at least 2, 1 and 2"),
    ({"ple_conv_kernel_size": 1}, "must be at least 2, 1 and 2"),
    ({"eos_token_id": None}, "lacks 'eos_token_id', at which n-grams end"),
    ({"attn_output_gate": False}, "attn_output_gate = False is not supported"),
    ({"mtp_use_dedicated_embeddings": True}, "mtp_use_dedicated_embeddings = True is not supported"),
    ({"num_experts_per_tok": 600}, "num_experts_per_tok 600 is more than the 512 experts"),
])  # fmt: skip
def test_what_is_not_understood_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_from_dict(HUB | changes)


def test_it_runs_beside_a_gpu(tiny_models) -> None:
    """Rows that steps read of its tables are pinned, for a step and for each graph; the tables stay as they are."""
    model = load_config(tiny_models["qwen4_exp"])
    config = EngineConfig.from_keywords("m", tables="ram")
    plan = resolve(config, model, with_gpu())
    assert plan.gpu is not None and plan.tables == "ram"
    entries = {entry.name: entry.nbytes for entry in plan.ledgers[1].entries}
    assert entries["tables"] == 2 * sum(table.rows * table.width for table in model.tables) > 0
    token = 2 * sum(body.width for body in model.bodies if isinstance(body, Ngram))
    sizes = (plan.max_step_tokens, *plan.gpu.graph_sizes)
    assert entries["rows"] == sum(pinned_bytes(size * token) for size in sizes) > 0
    mapped = resolve(EngineConfig.from_keywords("m", tables="map"), model, with_gpu())
    assert {entry.name: entry.nbytes for entry in mapped.ledgers[1].entries}.get("tables", 0) == 0


def test_prompts_that_choose_have_sums_of_rows_that_decode() -> None:
    """A step's scratch holds them, 256 rows at a time: 24 heads, 32 parts, 256 channels and two numbers in float32."""
    attention = next(mixer for mixer in named_config("qwen3.8-flash-next", None).mixers if isinstance(mixer, Gqa))
    sizes = [cost_of(attention).scratch_bytes(StepSize(rows, 1 << 17, 8), 2560, 4) for rows in (2048, 4096)]
    assert sizes[0] > 3 * SCORE_BYTES + 256 * 24 * 32 * (256 + 2) * 4 and sizes[1] > sizes[0]


def test_pages_have_whole_blocks(tiny_models) -> None:
    config = EngineConfig.from_keywords("m", page_size=6)
    plan = resolve(config, load_config(tiny_models["qwen4_exp"]), machine())
    assert plan.page_size == 8 and any("--page-size 6 becomes 8" in notice for notice in plan.notices)


def test_bits_are_the_same_in_every_batch(tiny_models) -> None:
    """As `--enable-deterministic-inference` promises, which takes the family."""
    config = EngineConfig(model="m", enable_deterministic_inference=True)
    assert resolve(config, load_config(tiny_models["qwen4_exp"]), machine()).deterministic
    path, (a, b, c) = tiny_models["qwen4_exp"], map(with_ends, prompts())
    own = CpuOps(_core.WorkerPool([-1, -1]), _core.supported_tiers()[-1])
    alone, together = Session(path, ops=own), Session(path, ops=own)
    first = alone.step([(0, a)])[0]
    both = together.step([(2, c), (0, a[:9]), (1, b)])[1]
    rest = [together.step([(1, [t]), (0, a[9 + i : 10 + i])])[1] for i, t in enumerate(range(len(a) - 9))]
    assert torch.equal(torch.cat([both, *rest]), first)
    assert reference(path)[0].shape == first.shape


def test_made_up_weights_run(tiny_models) -> None:
    """As benches have them, whatever the sizes."""
    config = load_config(tiny_models["qwen4_exp-tables"])
    session = Session(tiny_models["qwen4_exp-tables"])
    session.model = build(config, plan(), SyntheticCheckpoint(), TorchOps())  # type: ignore[arg-type]
    logits = session.step([(0, prompts()[0])])[0]
    assert logits.shape == (len(prompts()[0]), config.vocab) and bool(logits.isfinite().all())
