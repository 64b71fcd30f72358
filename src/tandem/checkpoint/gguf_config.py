"""A GGUF file's metadata as the `config.json` and `generation_config.json` that Hugging Face would have beside it.

Keys are those of gguf-py's constants.py; what llama.cpp fixes per architecture instead of storing it (whether weights
of chosen experts are normalised, the router's scores) is taken from its model files.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tandem.checkpoint.gguf_model import GGUFModel
from tandem.errors import CheckpointError

SIGMOID = 2  # of expert_gating_func; 1 is softmax
SAMPLING = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}
# Tokens that end an answer whatever else does, where a vocabulary has them; a file names only one or two of them.
END_TOKENS = (
    "<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|end|>", "<end_of_turn>",
    "<|user|>", "<|observation|>", "<｜end▁of▁sentence｜>", "</s>",
)  # fmt: skip
CONTROL = 3  # of token_type

Config = dict[str, Any]


class _Keys:
    """`{architecture}.{key}` of a model's metadata."""

    def __init__(self, model: GGUFModel) -> None:
        self.model, self.prefix = model, model.architecture + "."

    def need(self, key: str) -> int:
        return self._first(key) if self._is_list(key) else self.model.need(self.prefix + key, int)

    def optional(self, key: str, default: int) -> int:
        return self.need(key) if self.prefix + key in self.model.metadata else default

    def number(self, key: str, default: float) -> float:
        return self.model.optional(self.prefix + key, default)

    def flag(self, key: str, default: bool) -> bool:
        return self.model.optional(self.prefix + key, default)

    def has(self, key: str) -> bool:
        return self.prefix + key in self.model.metadata

    def _is_list(self, key: str) -> bool:
        return isinstance(self.model.metadata.get(self.prefix + key), list)

    def _first(self, key: str) -> int:
        """Some writers repeat a number for every layer."""
        values = self.model.array(self.prefix + key, int)
        if len(set(values)) != 1:
            raise CheckpointError(
                f"{self.model.path}: {self.prefix}{key} differs between layers, which is not supported"
            )
        return values[0]


def config_json(model: GGUFModel) -> Config:
    """What `config.json` would say. CheckpointError for an architecture that is not supported, or a missing key."""
    architecture = model.architecture
    if architecture not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise CheckpointError(
            f"{model.path}: architecture {architecture!r} is not supported; these are: {known}"
        )
    keys = _Keys(model)
    return _shared(keys) | ARCHITECTURES[architecture](keys)


def generation_json(model: GGUFModel) -> Config:
    """What `generation_config.json` would say: tokens that end an answer, sampling where its authors recommend one."""
    generation: Config = {"eos_token_id": end_ids(model)}
    for key, name in SAMPLING.items():
        value = model.metadata.get(f"general.sampling.{key}")
        if isinstance(value, int | float):
            generation[name] = value
    return generation


def end_ids(model: GGUFModel) -> list[int]:
    """Ids of all tokens that end an answer, those that the file names first."""
    named = [model.optional(f"tokenizer.ggml.{key}_token_id", -1) for key in ("eos", "eot", "eom")]
    tokens = model.array("tokenizer.ggml.tokens", str)
    kinds = model.array("tokenizer.ggml.token_type", int)
    known = [
        i
        for i, (token, kind) in enumerate(zip(tokens, kinds, strict=False))
        if kind == CONTROL and token in END_TOKENS
    ]
    return list(dict.fromkeys(i for i in (*named, *known) if i >= 0))


def _shared(keys: _Keys) -> Config:
    model, heads = keys.model, keys.need("attention.head_count")
    hidden = keys.need("embedding_length")
    config: Config = {
        "vocab_size": _rows(model, "token_embd.weight"),
        "hidden_size": hidden,
        "num_hidden_layers": keys.need("block_count") - keys.optional("nextn_predict_layers", 0),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.optional("attention.head_count_kv", heads),
        "head_dim": keys.optional("attention.key_length", hidden // max(heads, 1)),
        "intermediate_size": keys.optional("feed_forward_length", 0)
        or keys.optional("expert_feed_forward_length", 0),
        "max_position_embeddings": keys.need("context_length"),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon", 1e-5),
        "tie_word_embeddings": "output.weight" not in model.tensors,
        "rope_parameters": _rope(keys),
        "hidden_act": "silu",
    }
    for name in ("bos", "eos"):
        config[f"{name}_token_id"] = model.metadata.get(f"tokenizer.ggml.{name}_token_id")
    return config


def _rope(keys: _Keys) -> Config:
    """`rope_parameters` of Transformers 5. Frequency factors as a tensor are Llama 3's scaling."""
    kind = keys.model.optional(f"{keys.prefix}rope.scaling.type", "none")
    rope: Config = {"rope_theta": keys.number("rope.freq_base", 10000.0), "rope_type": "default"}
    if kind != "none":
        rope |= {
            "rope_type": kind,
            "factor": keys.number("rope.scaling.factor", 1.0),
            "original_max_position_embeddings": keys.optional("rope.scaling.original_context_length", 0),
        }
    if "rope_freqs.weight" in keys.model.tensors:
        rope["rope_type"] = "llama3"
    return rope


def _llama(keys: _Keys) -> Config:
    if not keys.optional("expert_count", 0):
        return {"model_type": "llama", "attention_bias": _has_bias(keys)}
    chosen = {
        "num_local_experts": keys.need("expert_count"),
        "num_experts_per_tok": keys.need("expert_used_count"),
    }
    return {"model_type": "mixtral"} | chosen


def _qwen2_moe(keys: _Keys) -> Config:
    return {
        "model_type": "qwen2_moe",
        "qkv_bias": _has_bias(keys),
        "norm_topk_prob": keys.flag("expert_weights_norm", False),
        "moe_intermediate_size": _expert_width(keys),
        "shared_expert_intermediate_size": _rows(keys.model, "ffn_gate_shexp.weight"),
    } | _qwen_experts(keys)


def _qwen3_moe(keys: _Keys) -> Config:
    return {
        "model_type": "qwen3_moe",
        "attention_bias": _has_bias(keys),
        "norm_topk_prob": keys.flag("expert_weights_norm", True),
        "moe_intermediate_size": _expert_width(keys),
    } | _qwen_experts(keys)


def _qwen_experts(keys: _Keys) -> Config:
    layers = range(keys.need("block_count"))
    dense = [i for i in layers if f"blk.{i}.ffn_gate_inp.weight" not in keys.model.tensors]
    return {
        "num_experts": keys.need("expert_count"),
        "num_experts_per_tok": keys.need("expert_used_count"),
        "mlp_only_layers": dense,
    }


def _olmoe(keys: _Keys) -> Config:
    return {
        "model_type": "olmoe",
        "attention_bias": _has_bias(keys),
        "num_experts": keys.need("expert_count"),
        "num_experts_per_tok": keys.need("expert_used_count"),
        "norm_topk_prob": keys.flag("expert_weights_norm", False),
        "intermediate_size": _expert_width(keys),
        "clip_qkv": keys.number("attention.clamp_kqv", 0.0),
    }


def _glm4_moe(keys: _Keys) -> Config:
    if keys.optional("expert_gating_func", SIGMOID) != SIGMOID:
        raise CheckpointError(
            f"{keys.model.path}: {keys.prefix}expert_gating_func is not {SIGMOID} (sigmoid)"
        )
    head = keys.need("attention.key_length")
    return {
        "model_type": "glm4_moe",
        "attention_bias": _has_bias(keys),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in keys.model.tensors,
        "partial_rotary_factor": keys.optional("rope.dimension_count", head) / head,
        "n_routed_experts": keys.need("expert_count"),
        "num_experts_per_tok": keys.need("expert_used_count"),
        "n_shared_experts": keys.optional("expert_shared_count", 1),
        "moe_intermediate_size": _expert_width(keys),
        "first_k_dense_replace": keys.optional("leading_dense_block_count", 0),
        "norm_topk_prob": keys.flag("expert_weights_norm", True),
        "routed_scaling_factor": keys.number("expert_weights_scale", 1.0),
        "n_group": keys.optional("expert_group_count", 1),
        "topk_group": keys.optional("expert_group_used_count", 1),
    }


def _deepseek2(keys: _Keys) -> Config:
    """DeepSeek-V2 and V3, which their routers' scores tell apart; files that do not name the scores are V2.

    The multi-head sizes are the plain ones in files with `kv_b` whole, and have names of their own in newer ones.
    """
    sigmoid = keys.optional("expert_gating_func", 1) == SIGMOID
    rope_dim, groups = keys.need("rope.dimension_count"), keys.optional("expert_group_count", 1)
    value = keys.optional("attention.value_length_mla", 0) or keys.need("attention.value_length")
    key = keys.optional("attention.key_length_mla", 0) or keys.need("attention.key_length")
    return {
        "model_type": "deepseek_v3" if sigmoid else "deepseek_v2",
        "q_lora_rank": keys.optional("attention.q_lora_rank", 0) or None,
        "kv_lora_rank": keys.need("attention.kv_lora_rank"),
        "qk_nope_head_dim": key - rope_dim,
        "qk_rope_head_dim": rope_dim,
        "v_head_dim": value,
        "n_routed_experts": keys.need("expert_count"),
        "num_experts_per_tok": keys.need("expert_used_count"),
        "n_shared_experts": keys.optional("expert_shared_count", 0),
        "moe_intermediate_size": _expert_width(keys),
        "first_k_dense_replace": keys.optional("leading_dense_block_count", 0),
        "norm_topk_prob": keys.flag("expert_weights_norm", False),
        "routed_scaling_factor": keys.number("expert_weights_scale", 1.0),
        "n_group": groups,
        "topk_group": keys.optional("expert_group_used_count", 1),
        "rope_parameters": _rope(keys) | _deepseek_yarn(keys),
    } | ({} if sigmoid else {"topk_method": "group_limited_greedy" if groups > 1 else "greedy"})


def _deepseek_yarn(keys: _Keys) -> Config:
    """YaRN's further values. mscale_all_dim is stored as a tenth of it; mscale is not stored: it is the same in every
    DeepSeek model, and llama.cpp takes it to be."""
    yarn: Config = {}
    for name in ("beta_fast", "beta_slow"):
        if keys.has(f"rope.scaling.yarn_{name}"):
            yarn[name] = keys.number(f"rope.scaling.yarn_{name}", 0.0)
    if keys.has("rope.scaling.yarn_log_multiplier"):
        yarn["mscale"] = yarn["mscale_all_dim"] = 10 * keys.number("rope.scaling.yarn_log_multiplier", 0.1)
    return yarn


ARCHITECTURES: dict[str, Callable[[_Keys], Config]] = {
    "deepseek2": _deepseek2,
    "glm4moe": _glm4_moe,
    "llama": _llama,
    "olmoe": _olmoe,
    "qwen2moe": _qwen2_moe,
    "qwen3moe": _qwen3_moe,
}


def _has_bias(keys: _Keys) -> bool:
    return "blk.0.attn_q.bias" in keys.model.tensors


def _expert_width(keys: _Keys) -> int:
    """Neurons of an expert: the key, or in files that lack it the rows of the experts themselves."""
    stored = keys.optional("expert_feed_forward_length", 0)
    return stored or _rows(keys.model, "ffn_gate_exps.weight")


def _rows(model: GGUFModel, ending: str) -> int:
    """Output rows of the first tensor whose name ends so."""
    for name, tensor in model.tensors.items():
        if name.endswith(ending) and len(tensor.shape) >= 2:
            return tensor.shape[-2]
    raise CheckpointError(f"{model.path} has no matrix {ending}")
