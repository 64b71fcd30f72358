"""GGUF files: the same model as the directory they were written from; every block type; broken files are named."""

from __future__ import annotations

import random
import shutil
import struct
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

import tiny
from gguf_files import (
    ARCHITECTURES,
    HALVES,
    QUANTISED_HERE,
    Kind,
    finish,
    matrices_as,
    random_blocks,
    split,
    write_gguf,
)
from plans import with_gpu
from sessions import Session, ours, prompts, rms, worst
from tandem import LLM, SamplingParams, _core
from tandem.architectures import GGUF
from tandem.architectures.load import load_config
from tandem.architectures.model_types import read_table
from tandem.checkpoint import load_model_config, open_checkpoint, read_generation, resolve_model
from tandem.checkpoint.gguf_config import AS_SAFETENSORS
from tandem.errors import CheckpointError, ConfigError, TandemError
from tandem.flags.engine_config import EngineConfig
from tandem.formats.gguf_blocks import GGUF_CODES
from tandem.formats.reference import decoded
from tandem.kernels.cpu_ops import CpuOps
from tandem.planner.resolve import resolve
from tandem.spec.model_config import STORED
from tandem.text.tokenizer import Tokenizer
from tiny import save_tokenizer, settings

# All but those with a sliding window, which these architectures' metadata do not have.
VARIANTS = (
    "llama", "llama-bias", "mixtral", "qwen2_moe", "qwen3_moe", "qwen3_moe-tied", "glm4_moe", "glm4_moe-plain",
    "olmoe", "olmoe-clip", "dots1", "minimax_m2", "minimax_m2-whole",
)  # fmt: skip


@pytest.fixture(scope="module")
def files(tiny_models, tmp_path_factory):
    """`files(variant)`: the tiny model of that variant as a GGUF file in F32."""
    directory, made = tmp_path_factory.mktemp("gguf"), {}

    def file(variant: str) -> Path:
        if variant not in made:
            made[variant] = write_gguf(tiny_models[variant], directory / f"{variant}.gguf")
        return made[variant]

    return file


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_metadata_says_what_config_json_says(tiny_models, files, variant):
    found, expected = load_model_config(files(variant)), load_config(tiny_models[variant])
    assert found.unread_keys == ()
    assert replace(found, unread_keys=()) == replace(expected, unread_keys=(), eos_ids=found.eos_ids)
    assert set(found.eos_ids) == {257}


@pytest.mark.parametrize("variant", VARIANTS)
def test_f32_files_give_the_same_tensors_and_bits(tiny_models, files, variant):
    source, found = open_checkpoint(tiny_models[variant]), open_checkpoint(files(variant))
    assert set(found.names()) == set(source.names())
    for name in source.names():
        assert torch.equal(found.get(name, tuple(source.get(name).shape)), source.get(name)), name
    for a, b in zip(ours(Session(tiny_models[variant])), ours(Session(files(variant))), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("changes", [{}, {"moe_layer_interval": 2, "moe_num_shared_experts": 0}])
def test_ernie(tmp_path, monkeypatch, changes):
    """Rotary pairs stay neighbours in the file, and its router's bias is a vector; files have no moe_norm_min."""
    family, others = tiny.VARIANTS["ernie4_5_moe"]
    monkeypatch.setitem(tiny.VARIANTS, "ernie", (family, others | {"moe_norm_min": 1e-12} | changes))
    tiny.save_tiny("ernie", tmp_path / "source")
    file = write_gguf(tmp_path / "source", tmp_path / "m.gguf")
    found, expected = load_model_config(file), load_config(tmp_path / "source")
    assert replace(found, unread_keys=()) == replace(expected, unread_keys=(), eos_ids=found.eos_ids)
    for a, b in zip(ours(Session(tmp_path / "source")), ours(Session(file)), strict=True):
        assert torch.equal(a, b)


def test_the_tokenizer_and_the_chat_template_come_from_inside(tiny_models, files):
    theirs, found = Tokenizer.load(tiny_models["olmoe"]), Tokenizer.load(files("olmoe"))
    for text in ("Grüße, 42 Äpfel!\n\n x", "<bos>a<eos>"):
        assert found.encode(text) == theirs.encode(text)
        assert found.decode(found.encode(text), skip_special_tokens=False) == text
    assert (found.bos_id, found.eos_ids) == (256, (257,))
    messages = [{"role": "user", "content": "hi"}]
    assert found.apply_chat_template(messages) == theirs.apply_chat_template(messages) == "user: hi\n"


# -- block types ---

WIDE = settings(
    vocab_size=263, hidden_size=256, num_hidden_layers=1, max_position_embeddings=128, num_experts_per_tok=2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=64, num_experts=4, moe_intermediate_size=256,
    intermediate_size=256, norm_topk_prob=True, bos_token_id=256, eos_token_id=257,
)  # fmt: skip


@pytest.fixture(scope="module")
def wide(tmp_path_factory) -> Path:
    """A Qwen3-MoE whose rows are whole blocks of every type."""
    path = tmp_path_factory.mktemp("wide")
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_moe", **WIDE)).save_pretrained(path)
    save_tokenizer(path)
    return path


def dequantised(file: Path, source: Path) -> dict[str, torch.Tensor]:
    """All weights as the `gguf` package reads them, under Hugging Face's names."""
    stored = {t.name: gguf.dequantize(t.data, t.tensor_type) for t in gguf.GGUFReader(file).tensors}
    names = gguf.get_tensor_name_map(ARCHITECTURES["qwen3_moe"], 1)
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in open_checkpoint(source)._parts.items():  # names and shapes only
        stem, dot, rest = name.partition(".experts.")
        index, _, matrix = rest.partition(".")
        renamed = names.get_name(f"{stem}{dot}{matrix}" if dot else name, try_suffixes=(".weight", ".bias"))
        array = stored[renamed][int(index)] if dot else stored[renamed]
        tensors[name] = torch.from_numpy(np.array(array, np.float32)).view(tensor.shape)
    return tensors


@pytest.mark.parametrize("kind", [*QUANTISED_HERE, *HALVES, Kind.F16], ids=lambda kind: kind.name)
def test_every_block_type_gives_the_logits_of_its_weights_in_transformers(wide, tmp_path, kind):
    """The weights as the `gguf` package dequantises them, in Transformers, float32."""
    file = write_gguf(wide, tmp_path / "model.gguf", matrices_as(kind))
    check_logits(file, wide, tmp_path)
    module = "model.layers.0.mlp.experts.3.down_proj"
    assert str(open_checkpoint(file).format(module)) == kind.name.lower()


def mixed_by_tensor(name: str, array: np.ndarray) -> Kind:
    """As UD files are: gates and ups in one type, downs in another, some wider than others."""
    if array.ndim < 2 or "ffn_gate_inp" in name:
        return Kind.F32
    if "_exps" not in name:
        return Kind.Q6_K if "attn" in name else Kind.Q2_K
    return Kind.IQ3_S if "down" in name else Kind.IQ2_XXS


def test_types_mixed_by_tensor_are_one_model(wide, tmp_path):
    file = write_gguf(wide, tmp_path / "model.gguf", mixed_by_tensor)
    check_logits(file, wide, tmp_path)
    experts = open_checkpoint(file).formats().experts
    assert experts.name == "iq2_xxs + iq3_s" and experts.unread_by_gpu == ""
    assert experts.bytes_per_weight * 8 == pytest.approx((2 * 2.1875 + 3.4375) / 3)
    llm = LLM(str(file), max_total_tokens=256)
    [answer] = llm.generate(["hi"], SamplingParams(max_tokens=5, temperature=0.0))
    assert llm.engine.plan.expert_format == STORED and 1 <= len(answer.token_ids) <= 5


def test_gate_and_up_may_have_two_types(wide, tmp_path):
    """As in UD files: computed side by side on the CPU. GPU kernels, which take both as one, are not asked."""

    def choose(name: str, array: np.ndarray) -> Kind:
        return Kind.Q3_K if "up_exps" in name else mixed_by_tensor(name, array)

    file = write_gguf(wide, tmp_path / "model.gguf", choose)
    check_logits(file, wide, tmp_path)
    stored = open_checkpoint(file).formats()
    assert stored.experts.unread_by_gpu == "gates and ups of two formats (layer 0: iq2_xxs, q3_k)"
    config = EngineConfig(model=str(file), kt_gpu_experts_ratio=0.0)
    plan = resolve(config, load_model_config(file), with_gpu(), stored)
    assert plan.gpu is not None and plan.gpu.sizes.experts == 0
    with pytest.raises(ConfigError, match="gates and ups of two formats"):
        resolve(replace(config, kt_gpu_experts_ratio=0.5), load_model_config(file), with_gpu(), stored)
    llm = LLM(str(file), max_total_tokens=256)
    [answer] = llm.generate(["hi"], SamplingParams(max_tokens=5, temperature=0.0))
    assert llm.engine.plan.expert_format == STORED and 1 <= len(answer.token_ids) <= 5


def check_logits(file: Path, wide: Path, tmp_path: Path) -> None:
    reference_dir = tmp_path / "reference"
    shutil.copytree(wide, reference_dir)
    save_file(dequantised(file, wide), reference_dir / "model.safetensors", metadata={"format": "pt"})
    model = AutoModelForCausalLM.from_pretrained(reference_dir, dtype=torch.float32)
    with torch.inference_mode():
        expected = [model(torch.tensor([prompt])).logits[0] for prompt in prompts()]
    assert worst(ours(Session(file)), expected) < 1e-4


@pytest.mark.parametrize("kind", [kind for kind in Kind if kind.name in GGUF_CODES], ids=lambda kind: kind.name)
def test_blocks_are_the_packages_own_numbers(kind):
    weight = np.random.default_rng(1).standard_normal((7, 768), dtype=np.float32)
    data = gguf.quantize(weight, kind) if kind in QUANTISED_HERE else random_blocks(weight.shape, kind)
    found = decoded(GGUF_CODES[kind.name](torch.from_numpy(data)))
    assert torch.equal(found, torch.from_numpy(gguf.dequantize(data, kind)))


@pytest.mark.parametrize("kind", (Kind.Q4_1, Kind.Q2_K, Kind.Q6_K, Kind.IQ4_XS, Kind.IQ2_S), ids=lambda kind: kind.name)
def test_kernels_compute_from_the_blocks_themselves(wide, tmp_path, kind):
    """As it is served: bfloat16 activations, weights kept as codes. No further off than with weights as bfloat16."""
    file = write_gguf(wide, tmp_path / "model.gguf", matrices_as(kind))
    ops = CpuOps(_core.WorkerPool([-1, -1]), _core.supported_tiers()[-1])
    exact = ours(Session(file))
    codes = Session(file, "bfloat16", ops=ops, expert_format=STORED, dense_codes=True)
    assert rms(ours(codes), exact) < 1.5 * rms(ours(Session(file, "bfloat16", ops=ops)), exact)
    stored = open_checkpoint(file).formats()
    assert stored.experts.name == stored.dense.name.split(" + ")[0] == kind.name.lower()
    assert stored.experts.methods == ("GGUF",) and not stored.experts.decoded


@pytest.mark.parametrize("kind", (Kind.F16, Kind.Q6_K, Kind.Q5_K), ids=lambda kind: kind.name)
def test_embedded_tokens_are_read_one_by_one(wide, tmp_path, kind):
    checkpoint = open_checkpoint(write_gguf(wide, tmp_path / "model.gguf", matrices_as(kind)))
    name, shape, ids = "model.embed_tokens.weight", (263, 256), torch.tensor([5, 262, 5, 0])
    assert torch.equal(checkpoint.lookup(name, shape)(ids), checkpoint.get(name, shape)[ids])
    with pytest.raises(
        CheckpointError, match=r"token_embd\.weight has shape \(263, 256\), but .* \(263, 512\)"
    ):
        checkpoint.lookup(name, (263, 512))


def test_a_file_is_served_alone(files):
    """From metadata to text: plan, tokenizer, chat template, model and engine out of one file."""
    llm = LLM(str(files("qwen3_moe")), max_total_tokens=256)
    [answer] = llm.chat([{"role": "user", "content": "hi"}], SamplingParams(max_tokens=5, temperature=0.0))
    assert answer.prompt == "user: hi\n" and 1 <= len(answer.token_ids) <= 5


# -- files as people have them ---


def test_several_files_are_one_model(tiny_models, files, tmp_path):
    parts = split(files("glm4_moe"), tmp_path, 3)
    for path in (parts[0], parts[2], resolve_model(tmp_path)):
        found, whole = open_checkpoint(path), open_checkpoint(files("glm4_moe"))
        assert set(found.names()) == set(whole.names())
        assert all(torch.equal(found.get(name), whole.get(name)) for name in whole.names())
        assert load_model_config(path) == load_model_config(files("glm4_moe"))
    parts[1].unlink()
    with pytest.raises(CheckpointError, match=r"00002-of-00003\.gguf is missing"):
        open_checkpoint(parts[0])


def test_a_part_that_lost_its_name_is_refused(files, tmp_path):
    split(files("olmoe"), tmp_path, 2)[0].rename(tmp_path / "part.gguf")
    with pytest.raises(CheckpointError, match="is one of 2 files: give them back their names"):
        open_checkpoint(tmp_path / "part.gguf")


def test_a_directory_with_one_gguf_model_is_that_model(files, tmp_path):
    file = tmp_path / "a.gguf"
    shutil.copy(files("llama"), file)
    assert resolve_model(tmp_path) == file == resolve_model(file)
    shutil.copy(files("llama"), tmp_path / "b.gguf")
    with pytest.raises(CheckpointError, match=r"several models: .* a\.gguf, b\.gguf"):
        resolve_model(tmp_path)


def test_an_unnamed_file_is_gguf_by_its_first_bytes(files, tmp_path):
    blob = tmp_path / "sha256-b179c9523d0e6a0f"
    shutil.copy(files("llama"), blob)
    assert load_model_config(resolve_model(blob)).model_type == "llama"


def test_recommended_sampling_is_read(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_sampling_temp(0.6)
    writer.add_sampling_top_k(20)
    writer.add_eos_token_id(1)
    writer.add_token_list(["a", "<|im_end|>", "<|endoftext|>"])
    writer.add_token_types([gguf.TokenType.NORMAL, gguf.TokenType.CONTROL, gguf.TokenType.CONTROL])
    writer.add_tensor("output_norm.weight", np.ones(4, np.float32))
    finish(writer, tmp_path / "m.gguf")
    assert read_generation(tmp_path / "m.gguf") == {"eos_token_id": [1, 2], "temperature": 0.6, "top_k": 20}


@pytest.mark.parametrize(
    ("tokens", "ends"),
    [
        (["<|return|>", "a", "<|end|>", "<|call|>"], [0, 3]),  # gpt-oss: an answer is several messages
        (["a", "<|end|>", "<|user|>"], [1, 2]),
        (["<eos>", "<|turn>", "<turn|>", "<|tool_response>", "<|tool_call>"], [0, 2, 3]),  # Gemma 4
        (["a", "[EOS]", "[EOT]", "<|im_end|>"], [1, 2, 3]),  # Kimi-K2
    ],
)  # fmt: skip
def test_tokens_that_end_an_answer(tmp_path, tokens, ends):
    """Those that a converter shows as text end it, too."""
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_token_list(tokens)
    shown = gguf.TokenType.USER_DEFINED
    kinds = {"a": gguf.TokenType.NORMAL, "<|tool_response>": shown, "<|tool_call>": shown}
    writer.add_token_types([kinds.get(token, gguf.TokenType.CONTROL) for token in tokens])
    writer.add_tensor("output_norm.weight", np.ones(4, np.float32))
    finish(writer, tmp_path / "m.gguf")
    assert read_generation(tmp_path / "m.gguf") == {"eos_token_id": ends}


# -- what cannot be read ---


def refused(tmp_path: Path, tensors: dict[str, tuple[np.ndarray, Kind]], **metadata: object) -> str:
    """What is said of a file with these tensors and metadata."""
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", str(metadata.pop("architecture", "llama")))
    for key, value in metadata.items():
        writer.add_key_value(key.replace("__", "."), value, gguf.GGUFValueType.get_type(value))
    for name, (array, kind) in tensors.items():
        writer.add_tensor(name, array, raw_dtype=kind)
    writer.add_tensor("blk.0.attn_norm.weight", np.ones(4, np.float32))
    finish(writer, tmp_path / "m.gguf")
    with pytest.raises(TandemError) as caught:
        load_model_config(tmp_path / "m.gguf")
        open_checkpoint(tmp_path / "m.gguf")
    return str(caught.value)


ONE = {"token_embd.weight": (np.ones((2, 4), np.float32), Kind.F32)}
SIZES = {
    "llama__block_count": 1, "llama__embedding_length": 4, "llama__feed_forward_length": 8,
    "llama__context_length": 16, "llama__attention__head_count": 2,
}  # fmt: skip


@pytest.mark.parametrize(
    "metadata, message",
    [
        (
            {"architecture": "rwkv7"},
            "architecture 'rwkv7' is not supported; these are: afmoe, bailingmoe, bailingmoe2, bailingmoe3, deepseek2",
        ),
        ({"architecture": "phimoe"}, "step35. Its safetensors run (kt models phimoe): take those"),
        ({}, "lacks llama.attention.head_count: convert"),
        (SIZES | {"llama__block_count": "x"}, "llama.block_count is 'x', not a int"),
        (SIZES | {"llama__block_count": 0}, "block_count is 0"),
        (SIZES | {"llama__rope__scaling__type": "longrope"}, "rope type 'longrope' is not supported"),
        (SIZES | {"llama__attention__head_count_kv": [1, 2]}, "head_count_kv differs between layers"),
    ],
)
def test_metadata_that_cannot_be_served_is_named(tmp_path, metadata, message):
    said = refused(tmp_path, ONE, **metadata)
    assert message in said and "m.gguf" in said


def test_whoever_is_sent_to_safetensors_finds_them_run():
    how = {row.model_type: row.how for row in read_table().rows}
    assert all(how[model_type] != "refused" for model_type in AS_SAFETENSORS.values())
    assert not set(AS_SAFETENSORS) & set(GGUF)


@pytest.mark.parametrize(("kind", "block_bytes"), [(Kind.TQ1_0, 54), (Kind.Q1_0, 18)])
def test_a_block_type_that_cannot_be_read_is_named(kind, block_bytes, tmp_path):
    blocks = np.zeros((2, block_bytes), np.uint8)
    said = refused(tmp_path, {"token_embd.weight": (blocks, kind)}, **SIZES)
    assert f"tensor token_embd.weight is stored as {kind.name}; readable are F32" in said


def test_factors_of_nvfp4_that_nobody_reads_are_named(tmp_path):
    tensors = {
        "token_embd.weight": (np.zeros((2, 36), np.uint8), Kind.NVFP4),
        "token_embd.scale": (np.ones(1, np.float32), Kind.F32),
    }
    assert "token_embd.scale holds factors of token_embd.weight" in refused(tmp_path, tensors, **SIZES)


def test_a_matrix_of_whole_numbers_is_refused(tmp_path):
    """They are read where they choose experts, and nowhere else."""
    said = refused(tmp_path, {"token_embd.weight": (np.ones((2, 4), np.int32), Kind.I32)}, **SIZES)
    assert "tensor token_embd.weight is stored as I32; readable are F32" in said and "I32" not in said.split(";")[1]


def test_absurd_counts_are_refused_without_allocating(files, tmp_path):
    """Every 64-bit count of the header in turn becomes 2^60, and 2^63."""
    data = files("llama").read_bytes()
    start = data.index(b"tokenizer.ggml.tokens") + len("tokenizer.ggml.tokens") + 8
    for at in (8, 16, 24, start):
        for count in (1 << 60, (1 << 64) - 1, 1 << 40):
            broken = tmp_path / "broken.gguf"
            broken.write_bytes(data[:at] + struct.pack("<Q", count) + data[at + 8 :])
            with pytest.raises(CheckpointError, match=r"broken\.gguf is truncated or not GGUF"):
                open_checkpoint(broken)


@pytest.mark.parametrize("share", [0.0, 0.0001, 0.01, 0.3, 0.99, 0.99999])
def test_a_truncated_file_is_named(files, tmp_path, share):
    data = files("qwen3_moe").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(data[: int(len(data) * share)])
    with pytest.raises(CheckpointError, match=r"cut\.gguf"):
        open_checkpoint(tmp_path / "cut.gguf")


def test_flipped_bytes_in_the_header_give_an_error_or_a_model(files, tmp_path):
    """Whatever byte is wrong: an error of ours, or a file that still reads; in bounded time."""
    data, dice = files("qwen3_moe").read_bytes(), random.Random(7)
    header, broken, refusals = data.index(b"blk.2.") + 200, tmp_path / "broken.gguf", 0
    for _ in range(300):
        at = dice.randrange(header)
        broken.write_bytes(data[:at] + bytes([dice.randrange(256)]) + data[at + 1 :])
        try:
            config, checkpoint = load_model_config(broken), open_checkpoint(broken)
            Tokenizer.load(broken)
            assert config.hidden == 72 or checkpoint.names()
        except TandemError as error:
            assert "broken.gguf" in str(error), str(error)
            refusals += 1
    assert refusals > 30
