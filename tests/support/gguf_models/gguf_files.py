"""Writes Hugging Face directories as GGUF files, with the `gguf` package: its writer, its names, its quantisers.

What llama.cpp's converter does besides renaming is done here too: experts are stacked, rows of q and k of the llama
architecture are reordered.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from tokenizers import Tokenizer

import gguf_hybrid
import gguf_kinds
from gguf_delta import KINDS, add_delta, of_delta
from tiny import file_tensors

ARCHITECTURES = {
    "bailing_moe": gguf.MODEL_ARCH.BAILINGMOE,
    "llama": gguf.MODEL_ARCH.LLAMA, "mixtral": gguf.MODEL_ARCH.LLAMA, "qwen2_moe": gguf.MODEL_ARCH.QWEN2MOE,
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE, "olmoe": gguf.MODEL_ARCH.OLMOE, "glm4_moe": gguf.MODEL_ARCH.GLM4_MOE,
    "gpt_oss": gguf.MODEL_ARCH.GPT_OSS, "deepseek_v2": gguf.MODEL_ARCH.DEEPSEEK2,
    "deepseek_v3": gguf.MODEL_ARCH.DEEPSEEK2, "dots1": gguf.MODEL_ARCH.DOTS1, "minimax_m2": gguf.MODEL_ARCH.MINIMAXM2,
    "ernie4_5_moe": gguf.MODEL_ARCH.ERNIE4_5_MOE, "glm_moe_dsa": gguf.MODEL_ARCH.GLM_DSA,
    "gemma4_text": gguf.MODEL_ARCH.GEMMA4, "mimo_v2_flash": gguf.MODEL_ARCH.MIMO2,
    "glm4_moe_lite": gguf.MODEL_ARCH.DEEPSEEK2, "mistral4": gguf.MODEL_ARCH.MISTRAL4,
    "step3p5": gguf.MODEL_ARCH.STEP35, "hy_v3": gguf.MODEL_ARCH.DOTS1, "afmoe": gguf.MODEL_ARCH.AFMOE,
    "exaone_moe": gguf.MODEL_ARCH.EXAONE_MOE, "hunyuan_v1_moe": gguf.MODEL_ARCH.HUNYUAN_MOE,
    "laguna": gguf.MODEL_ARCH.STEP35, "deepseek_v32": gguf.MODEL_ARCH.GLM_DSA,
    "lfm2_moe": gguf.MODEL_ARCH.LFM2MOE, "granitemoe": gguf.MODEL_ARCH.GRANITE_MOE,
    "granitemoeshared": gguf.MODEL_ARCH.GRANITE_MOE, "granitemoehybrid": gguf.MODEL_ARCH.GRANITE_HYBRID,
    "nemotron_h": gguf.MODEL_ARCH.NEMOTRON_H_MOE, "kimi_linear": gguf.MODEL_ARCH.KIMI_LINEAR,
    "bailing_hybrid": gguf.MODEL_ARCH.KIMI_LINEAR, "glm5_next_text": gguf.MODEL_ARCH.KIMI_LINEAR,
    "qwen3_next": gguf.MODEL_ARCH.QWEN3NEXT, "qwen3_5_moe_text": gguf.MODEL_ARCH.QWEN35MOE,
    "qwen4_exp_text": gguf.MODEL_ARCH.QWEN35MOE,
}  # fmt: skip
NEWER = {
    "hy_v3": "hy_v3", "laguna": "laguna", "deepseek_v32": "deepseek32", "bailing_hybrid": "bailingmoe3",
    "glm5_next_text": "glm5-next", "qwen4_exp_text": "qwen4exp",
}  # fmt: skip
"""Architectures that the installed package does not have, whose tensors are called as another's."""
IN_TURNS = ("llama", "mixtral", "bailing_moe", "granitemoe", "granitemoeshared", "granitemoehybrid")
"""Types whose rows of q and k llama.cpp's converter reorders."""
CONFIGS = gguf_kinds.CONFIGS | {"bailing_hybrid": gguf_hybrid.add_ling, "glm5_next_text": gguf_hybrid.add_glm5}
NORMAL, CONTROL = gguf.TokenType.NORMAL, gguf.TokenType.CONTROL

Kind = gguf.GGMLQuantizationType
ChooseKind = Callable[[str, np.ndarray], Kind]


def only_f32(_name: str, _array: np.ndarray) -> Kind:
    return Kind.F32


def matrices_as(kind: Kind) -> ChooseKind:
    """Matrices in `kind`, but routers and vectors in F32, as llama.cpp has it."""
    return lambda name, array: kind if array.ndim > 1 and "ffn_gate_inp" not in name else Kind.F32


def write_gguf(
    source: Path, path: Path, choose: ChooseKind = only_f32, pre: str = "gpt-2", whole: bool = False
) -> Path:
    """The model directory `source` as one GGUF file. whole: as llama.cpp's converter wrote DeepSeek's models before it
    divided kv_b, and Qwen3-Next before it divided what delta nets project."""
    config = json.loads((source / "config.json").read_text())
    config = {"num_hidden_layers": len(config.get("layers_block_type", ())), **config}
    architecture = ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(path, NEWER.get(config["model_type"], gguf.MODEL_ARCH_NAMES[architecture]))
    if config["model_type"] in CONFIGS:
        CONFIGS[config["model_type"]](writer, config)
    elif architecture in (gguf.MODEL_ARCH.DEEPSEEK2, gguf.MODEL_ARCH.GLM_DSA, gguf.MODEL_ARCH.MISTRAL4):
        add_deepseek(writer, config, whole)
    else:
        add_config(writer, config)
    if config["model_type"] == "qwen4_exp_text":
        gguf_hybrid.add_qwen4(writer, config)
        gguf_hybrid.add_hashes(writer, file_tensors(source))
    add_tokenizer(writer, source, pre)
    for name, array in gguf_tensors(source, config, whole):
        add_tensor(writer, name, array, choose(name, array))
    return finish(writer, path)


def split(file: Path, directory: Path, count: int) -> list[Path]:
    """The same model as `count` files, as llama.cpp's gguf-split names them; only the first has all metadata."""
    reader = gguf.GGUFReader(file)
    paths = [directory / f"{file.stem}-{i + 1:05}-of-{count:05}.gguf" for i in range(count)]
    for i, path in enumerate(paths):
        writer = gguf.GGUFWriter(path, reader.fields["general.architecture"].contents())
        for field in reader.fields.values() if i == 0 else ():
            if field.name != "general.architecture" and not field.name.startswith("GGUF."):
                sub_type = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
                writer.add_key_value(field.name, field.contents(), field.types[0], sub_type)
        writer.add_uint16("split.no", i)
        writer.add_uint16("split.count", count)
        for tensor in reader.tensors[i::count]:
            writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
        finish(writer, path)
    return paths


def rewritten(
    file: Path, path: Path, changes: dict[str, Any], keep: Callable[[str], bool] = lambda name: True
) -> Path:
    """A copy of a model in one file with other metadata (None: without the key) and some of its tensors."""
    reader = gguf.GGUFReader(file)
    writer = gguf.GGUFWriter(path, reader.fields["general.architecture"].contents())
    for field in reader.fields.values():
        if field.name not in changes and field.name != "general.architecture" and not field.name.startswith("GGUF."):
            sub_type = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), field.types[0], sub_type)
    for name, value in changes.items():
        if value is not None:
            writer.add_key_value(name, value, gguf.GGUFValueType.get_type(value))
    for tensor in reader.tensors:
        if keep(tensor.name):
            writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
    return finish(writer, path)


def finish(writer: gguf.GGUFWriter, path: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_tensor(writer: gguf.GGUFWriter, name: str, array: np.ndarray, kind: Kind) -> None:
    if kind in (Kind.F32, Kind.F16):
        writer.add_tensor(name, array.astype(np.float32 if kind == Kind.F32 else np.float16))
    else:
        data = gguf.quantize(array, kind) if kind in QUANTISED_HERE else random_blocks(array.shape, kind)
        writer.add_tensor(name, data, raw_dtype=kind)


QUANTISED_HERE = (Kind.BF16, Kind.MXFP4, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0)
# Places of the halves that scale a block (ggml-common.h). NVFP4 has none, and IQ1_M's is in four pieces.
HALVES = {
    Kind.Q2_K: (80, 82), Kind.Q3_K: (108,), Kind.Q4_K: (0, 2), Kind.Q5_K: (0, 2), Kind.Q6_K: (208,), Kind.IQ4_NL: (0,),
    Kind.IQ4_XS: (0,), Kind.IQ3_S: (0,), Kind.IQ3_XXS: (0,), Kind.IQ2_S: (0,), Kind.IQ2_XS: (0,), Kind.IQ2_XXS: (0,),
    Kind.IQ1_S: (0,), Kind.IQ1_M: (), Kind.TQ2_0: (64,), Kind.NVFP4: (),
}  # fmt: skip
# Scales that bring random codes to a standard deviation near 0.05.
SIZES = {
    Kind.Q2_K: 4e-3, Kind.Q3_K: 1.5e-3, Kind.Q4_K: 2e-4, Kind.Q5_K: 1e-4, Kind.Q6_K: 4e-5, Kind.IQ4_NL: 7e-4,
    Kind.IQ4_XS: 4e-5, Kind.IQ3_S: 3e-4, Kind.IQ3_XXS: 3e-4, Kind.IQ2_S: 9e-4, Kind.IQ2_XS: 9e-4, Kind.IQ2_XXS: 9e-4,
    Kind.IQ1_S: 7e-3, Kind.IQ1_M: 7e-3, Kind.TQ2_0: 4e-2,
}  # fmt: skip


def random_blocks(shape: tuple[int, ...], kind: Kind) -> np.ndarray:
    """Blocks with random codes and scales, which the package reads but cannot write."""
    rows = gguf.quants.quant_shape_to_byte_shape(shape, kind)
    random = np.random.default_rng(sum(shape))
    data = random.integers(0, 256, rows, dtype=np.uint8)
    blocks = data.reshape(-1, gguf.GGML_QUANT_SIZES[kind][1])
    for at in HALVES[kind]:
        size = random.uniform(0.5, 1.5, (len(blocks), 1)) * SIZES[kind]
        blocks[:, at : at + 2] = size.astype(np.float16).view(np.uint8)
    if kind == Kind.IQ1_M:
        half = (random.uniform(0.5, 1.5, len(blocks)) * SIZES[kind]).astype(np.float16).view(np.uint16)
        for i in range(4):  # a quarter ends each of the last four words
            blocks[:, 49 + 2 * i] = blocks[:, 49 + 2 * i] & 15 | (half >> 4 * i & 15) << 4
    if kind == Kind.NVFP4:  # 2^-8 to 2^-5
        blocks[:, :4] = random.integers(2, 16, (len(blocks), 4))
    return data


def gguf_tensors(
    source: Path, config: dict[str, Any], whole: bool = False
) -> Iterator[tuple[str, np.ndarray]]:
    """Names and float32 arrays as llama.cpp's converter makes them."""
    layers = config["num_hidden_layers"] + config.get("num_nextn_predict_layers", 0)
    names = gguf.get_tensor_name_map(ARCHITECTURES[config["model_type"]], layers)
    dense = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    experts: dict[str, dict[int, np.ndarray]] = {}
    tensors = file_tensors(source)
    if config["model_type"] == "qwen4_exp_text":
        own = {name: each for name, each in tensors.items() if gguf_hybrid.is_qwen4(name)}
        numbers = {name: each.float().numpy() for name, each in own.items() if each.is_floating_point()}
        yield from gguf_hybrid.of_qwen4(numbers, config["indexer_head_dim"]).items()
        tensors = {name: each for name, each in tensors.items() if name not in own}
    for name, tensor in tensors.items():
        array = tensor.to(torch.float32).numpy()
        if found := re.fullmatch(r"(.*experts\.)(\d+)\.(\w+)\.weight", name):
            experts.setdefault(found[1] + found[3], {})[int(found[2])] = array
            continue
        if config["model_type"] == "gpt_oss" and ("experts" in name or "sinks" in name):
            yield from of_gpt_oss(name, array)
            continue
        if (space := gguf_kinds.of_space(name, array, config)) is not None:
            yield space
            continue
        if (hybrid := gguf_hybrid.of_ling(name, array, config) or gguf_hybrid.of_glm5(name, array, config)):
            yield hybrid
            continue
        if (delta := gguf_kinds.of_kimi_linear(name, array)) is not None:
            yield delta
            continue
        name = re.sub(r"block_sparse_moe\.(gate|up|down)_proj", r"mlp.\1_proj", name)  # dense, as the hub has them
        if apart := gguf_kinds.of_granite(name, array, config):
            yield from apart
            continue
        if (renamed := gguf_kinds.special(name)) is not None:
            yield renamed, array
            continue
        if "e_score_correction_bias" in name:
            layer = name.split(".")[2]
            yield f"blk.{layer}.exp_probs_b.bias", array.reshape(-1)
            continue
        if "kv_b_proj" in name and not whole:
            yield from divided(name.split(".")[2], array, config)
            continue
        if "linear_attn" in name:
            yield from of_delta(name, array, config, whole)
            continue
        if config["model_type"] in (*KINDS, "step3p5") and name.endswith("norm.weight"):
            array = array + 1
        if config["model_type"] in IN_TURNS:
            array = reordered(name, array, config)
        renamed = names.get_name(name, (".weight", ".bias")) or dense.get_name(name, (".weight",))
        assert renamed is not None, name
        yield renamed, array[0] if "shared_expert_gate" in name else array
    for name, each in experts.items():
        renamed = names.get_name(name) or names.get_name(name.removeprefix("model."))
        renamed = renamed or names.get_name(name.replace("backbone", "model").replace("mixer", "mlp"))
        assert renamed is not None, name
        yield renamed + ".weight", np.stack([each[i] for i in range(len(each))])


def of_gpt_oss(name: str, array: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Experts' numbers [E, K, N] and biases, of which gate's and up's columns take turns; and sinks."""
    block, last = f"blk.{name.split('.')[2]}.", name.rpartition(".")[2]
    if last == "sinks":
        yield f"{block}attn_sinks.weight", array
        return
    ending = ".bias" if last.endswith("bias") else ".weight"
    parts = (
        {"gate": array[..., ::2], "up": array[..., 1::2]} if last.startswith("gate_up") else {"down": array}
    )
    for matrix, part in parts.items():
        turned = part if ending == ".bias" else part.swapaxes(1, 2)
        yield f"{block}ffn_{matrix}_exps{ending}", np.ascontiguousarray(turned)


def reordered(name: str, array: np.ndarray, config: dict[str, Any]) -> np.ndarray:
    """Rows of q and k with the two rotary halves of every head interleaved."""
    counts = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    heads = next((count for part, count in counts.items() if part in name), 0)
    if not heads:
        return array
    return array.reshape(heads, 2, -1, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)


def divided(layer: str, kv_b: np.ndarray, config: dict[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    """kv_b as newer files have it: per head, the rows that make keys, transposed, and those that make values."""
    nope, value = config["qk_nope_head_dim"], config["v_head_dim"]
    heads = kv_b.reshape(-1, nope + value, kv_b.shape[1])
    yield f"blk.{layer}.attn_k_b.weight", np.ascontiguousarray(heads[:, :nope].swapaxes(1, 2))
    yield f"blk.{layer}.attn_v_b.weight", np.ascontiguousarray(heads[:, nope:])


def add_deepseek(writer: gguf.GGUFWriter, config: dict[str, Any], whole: bool) -> None:
    key, rope = config["qk_nope_head_dim"] + config["qk_rope_head_dim"], config["rope_parameters"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_attention_heads"] if whole else 1)
    writer.add_key_length(key if whole else config["kv_lora_rank"] + config["qk_rope_head_dim"])
    writer.add_value_length(config["v_head_dim"] if whole else config["kv_lora_rank"])
    if not whole:
        writer.add_key_length_mla(key)
        writer.add_value_length_mla(config["v_head_dim"])
    if config["q_lora_rank"]:
        writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_kv_lora_rank(config["kv_lora_rank"])
    writer.add_rope_dimension_count(config["qk_rope_head_dim"])
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    if rope["rope_type"] == "yarn":
        add_yarn(writer, rope)
        if "mscale_all_dim" in rope:
            writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])
    if "llama_4_scaling_beta" in rope:
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
    if config.get("index_topk"):
        writer.add_indexer_head_count(config["index_n_heads"])
        writer.add_indexer_key_length(config["index_head_dim"])
        writer.add_indexer_top_k(config["index_topk"])
    add_deepseek_experts(writer, config)


def add_yarn(writer: gguf.GGUFWriter, rope: dict[str, Any]) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(rope["factor"])
    writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
    writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])


def add_deepseek_experts(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    dense = config.get("first_k_dense_replace")
    kinds = config.get("mlp_layer_types", ["sparse"])
    writer.add_leading_dense_block_count(kinds.index("sparse") if dense is None else dense)
    writer.add_expert_count(config["n_routed_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    if config.get("n_group"):
        writer.add_expert_group_count(config["n_group"])
        writer.add_expert_group_used_count(config["topk_group"])
    if config["model_type"] in ("deepseek_v3", "deepseek_v32", "glm_moe_dsa"):
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if config.get("norm_topk_prob"):
        writer.add_expert_weights_norm(True)


def add_config(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    rope = config.get("rope_parameters") or {}
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    drafts = config.get("num_nextn_predict_layers", 0)
    writer.add_block_count(config["num_hidden_layers"] + drafts)
    if drafts:
        writer.add_nextn_predict_layers(drafts)
    writer.add_feed_forward_length(config.get("intermediate_size") or 0)
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    if config["model_type"] == "gpt_oss":
        writer.add_sliding_window(config["sliding_window"])
        writer.add_expert_feed_forward_length(config["intermediate_size"])
        if rope["rope_type"] == "yarn":
            add_yarn(writer, rope)
    if config.get("clip_qkv"):
        writer.add_clamp_kqv(config["clip_qkv"])
    if config["model_type"] in KINDS:
        add_delta(writer, config)
    if config["model_type"] == "ernie4_5_moe":
        add_ernie(writer, config)
    elif config["model_type"] != "llama":
        add_experts(writer, config)


def add_experts(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    kind = config["model_type"]
    counts = (config.get(name) for name in ("num_experts", "n_routed_experts", "num_local_experts"))
    writer.add_expert_count(next(count for count in counts if count))
    writer.add_expert_used_count(config["num_experts_per_tok"])
    if kind == "bailing_moe":
        writer.add_leading_dense_block_count(config["first_k_dense_replace"])
        writer.add_expert_shared_count(config["num_shared_experts"])
    if kind in ("qwen2_moe", "qwen3_moe", "glm4_moe", "dots1", "bailing_moe"):
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if kind == "minimax_m2":
        writer.add_expert_feed_forward_length(config["intermediate_size"])
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if kind not in ("mixtral", "gpt_oss", "minimax_m2", *KINDS):
        writer.add_expert_weights_norm(config["norm_topk_prob"])
    if kind == "qwen2_moe":
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
    if kind in ("glm4_moe", "dots1"):
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_leading_dense_block_count(config["first_k_dense_replace"])
        writer.add_expert_shared_count(config["n_shared_experts"])
        writer.add_expert_weights_scale(config["routed_scaling_factor"])
        writer.add_expert_group_count(config["n_group"])
        writer.add_expert_group_used_count(config["topk_group"])


def add_ernie(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_expert_count(config["moe_num_experts"])
    writer.add_expert_used_count(config["moe_k"])
    writer.add_interleave_moe_layer_step(config["moe_layer_interval"])
    writer.add_leading_dense_block_count(config["moe_layer_start_index"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_shared_count(config["moe_num_shared_experts"])


def add_tokenizer(writer: gguf.GGUFWriter, source: Path, pre: str) -> None:
    """A byte-level BPE as tokenizer.json has it, with the vocabulary padded to the model's."""
    parts = json.loads(Tokenizer.from_file(str(source / "tokenizer.json")).to_str())
    settings = json.loads((source / "tokenizer_config.json").read_text())
    size = json.loads((source / "config.json").read_text())["vocab_size"]
    special = {token["id"]: token["content"] for token in parts["added_tokens"]}
    by_id = {index: token for token, index in parts["model"]["vocab"].items()} | special
    tokens = [by_id.get(i, f"[PAD{i}]") for i in range(size)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    kinds = [
        CONTROL if i in special else NORMAL if i in by_id else gguf.TokenType.UNUSED for i in range(size)
    ]
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(pair) for pair in parts["model"]["merges"]])
    writer.add_chat_template(settings["chat_template"])
    for name, add in (("bos", writer.add_bos_token_id), ("eos", writer.add_eos_token_id)):
        add(tokens.index(settings[f"{name}_token"]))
