"""Nemotron 3: one block a layer, which is a state space, attention that does not turn, experts or a dense feed-forward;
experts have no gate, and square what is above 0. Super's compute in fewer channels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tandem.architectures.family import SIGMOID, DerivedTensor, Family, Gguf, GgufKeys
from tandem.architectures.names import GGUF_DECODER, ExpertNames, Names, Renames
from tandem.architectures.recurrent.granite import SPACE_STEMS, check_time_steps, taps_of
from tandem.architectures.shared import assembled, gqa, moe, sigmoid_router
from tandem.errors import ConfigError
from tandem.mechanisms.dense.shape import Dense
from tandem.mechanisms.state_space.shape import StateSpace
from tandem.spec.activation import Activation
from tandem.spec.json_keys import JsonKeys
from tandem.spec.layers import Block, Body, Layer
from tandem.spec.model_config import ModelConfig
from tandem.spec.norm import Norm
from tandem.spec.rope import still

LETTERS = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"}
WORDS = {"mamba": "linear_attention", "attention": "full_attention"}
"""Kinds of layers: the hub's letters, and Transformers' words."""

NAMES = Names(
    norms=("norm",), attention="mixer", recurrent="mixer", dense="mixer", router="mixer.gate",
    router_bias="mixer.gate.e_score_correction_bias", shared="mixer.shared_experts",
    latent=("mixer.fc1_latent_proj", "mixer.fc2_latent_proj"),
    experts=ExpertNames(
        "mixer.experts.{expert}.{matrix}", gate_up="mixer.experts.gate_up_proj", down="mixer.experts.down_proj",
        stacked="mixer.experts.{matrix}",
    ),
)  # fmt: skip
RENAMES = Renames(
    {
        "backbone.layers.": "model.layers.", "backbone.embeddings.": "model.embed_tokens.",
        "model.embeddings.": "model.embed_tokens.", "backbone.norm_f.": "model.norm.", "model.norm_f.": "model.norm.",
    },
    signs=("backbone.norm_f.", "model.norm_f."),
)  # fmt: skip

SQUARED = Activation("relu2")
UNUSED = (
    "expand", "chunk_size", "time_step_min", "time_step_max", "time_step_floor",
    "mamba_ssm_cache_dtype", "moe_shared_expert_overlap", "num_logits_to_keep", "rescale_prenorm_residual",
    "use_mamba_kernels", "hidden_dropout", "mtp_layers_block_type", "mtp_hybrid_override_pattern", "residual_in_fp32",
    "hidden_act", "intermediate_size", "sliding_window", "num_hidden_layers", "rope_theta",
    "partial_rotary_factor", "mamba_proj_bias", "num_nextn_predict_layers",
)  # fmt: skip
"""Keys of training, of other code, and of features that attention does not have. Time steps have no limit here,
as where the model was trained; Transformers has one for those of prompts."""


def config(keys: JsonKeys, generation: JsonKeys) -> ModelConfig:
    for key in ("attention_bias", "mlp_bias"):
        keys.only(key, False, "matrices have no biases")
    keys.only("mlp_hidden_act", "relu2", "Nemotron's")
    keys.only("mamba_hidden_act", "silu", "convolutions end in it")
    check_time_steps(keys)
    for key in UNUSED:
        keys.get(key)
    kinds = _kinds(keys)
    keys = keys.overlaid({"rms_norm_eps": keys.optional("layer_norm_epsilon", 1e-5), "rope_theta": 1e4})
    norm = Norm(keys["rms_norm_eps"], wide=True)
    bodies = {kind: _body(keys, kind) for kind in set(kinds)}
    if "moe" not in bodies or "full_attention" not in bodies:
        raise ConfigError(f"{keys.where}: a model without experts or without attention is not supported")
    return assembled(keys, generation, tuple(Layer((Block(bodies[kind], norm),)) for kind in kinds), norm)


def _kinds(keys: JsonKeys) -> list[str]:
    """A list of words, or a letter for each layer."""
    listed, pattern = keys.get("layers_block_type") or keys.get("layer_types"), keys.get("hybrid_override_pattern")
    if not isinstance(listed, list):
        listed = [LETTERS.get(letter, letter) for letter in str(pattern or "")]
    kinds = [WORDS.get(str(word), str(word)) for word in listed]
    if unknown := sorted(set(kinds) - set(LETTERS.values())):
        known = ", ".join(LETTERS.values())
        raise ConfigError(f"{keys.where}: layer type {unknown[0]!r} is not supported; {known} are")
    if not kinds:
        raise ConfigError(f"{keys.where} lacks 'layers_block_type': add it, one word for each layer")
    return kinds


def _body(keys: JsonKeys, kind: str) -> Body:
    if kind == "linear_attention":
        return _space(keys)
    if kind == "full_attention":
        attention = gqa(keys)
        return replace(attention, rope=still(attention.head_dim))
    if kind == "mlp":
        return Dense(_width(keys, "intermediate_size", 21504), SQUARED)
    shared = _width(keys, "moe_shared_expert_intermediate_size", 3712) if keys.count("n_shared_experts", 1) else 0
    experts = moe(sigmoid_router(keys), _width(keys, "moe_intermediate_size", 1856), shared).activated_by(SQUARED)
    return replace(experts, experts=replace(experts.experts, latent=keys.optional("moe_latent_size", 0)))


def _width(keys: JsonKeys, key: str, example: int) -> int:
    width = keys.size(key, example)
    if width % 32:
        why = "feed-forwards without a gate have a width of whole 32s"
        raise ConfigError(f"{keys.where}: {key} is {width}, but {why}; try {example}")
    return width


def _space(keys: JsonKeys) -> StateSpace:
    heads, groups = keys.size("mamba_num_heads", 128), keys.size("n_groups", 8)
    if heads % groups:
        raise ConfigError(f"{keys.where}: n_groups {groups} does not divide {heads} heads; try 8")
    return StateSpace(
        heads, keys.size("mamba_head_dim", 64), groups, keys.size("ssm_state_size", 128), taps_of(keys, "conv_kernel"),
        Norm(keys["rms_norm_eps"]), keys.optional("use_bias", False), keys.optional("use_conv_bias", True),
    )  # fmt: skip


def gguf_config(keys: GgufKeys) -> dict[str, Any]:
    """A layer is what its tensors are."""
    keys.only("expert_gating_func", SIGMOID, "sigmoid")
    count = keys.depth
    kinds = [_kind(keys, f"blk.{layer}.") for layer in range(count)]
    heads = keys.size("ssm.time_step_rank")
    dense = next((i for i, kind in enumerate(kinds) if kind == "mlp"), None)
    return {
        "model_type": "nemotron_h",
        "layers_block_type": kinds,
        "num_key_value_heads": max(keys.layers("attention.head_count_kv", count)),
        "layer_norm_epsilon": keys.number("attention.layer_norm_rms_epsilon", 1e-5),
        "mamba_num_heads": heads,
        "mamba_head_dim": keys.need("ssm.inner_size") // heads,
        "n_groups": keys.need("ssm.group_count"),
        "ssm_state_size": keys.need("ssm.state_size"),
        "conv_kernel": keys.need("ssm.conv_kernel"),
        "use_conv_bias": any(keys.has_tensor(f"blk.{layer}.ssm_conv1d.bias") for layer in range(count)),
        "intermediate_size": keys.expert_width if dense is None else keys.rows(f"blk.{dense}.ffn_up.weight"),
        "n_routed_experts": keys.need("expert_count"),
        "num_experts_per_tok": keys.need("expert_used_count"),
        "n_shared_experts": keys.optional("expert_shared_count", 1),
        "moe_latent_size": keys.optional("moe_latent_size", 0) or None,
        "moe_intermediate_size": keys.expert_width,
        "moe_shared_expert_intermediate_size": keys.rows("ffn_up_shexp.weight"),
        "norm_topk_prob": keys.flag("expert_weights_norm", True),
        "routed_scaling_factor": keys.number("expert_weights_scale", 1.0),
        "n_group": keys.optional("expert_group_count", 1),
        "topk_group": keys.optional("expert_group_used_count", 1),
        "mlp_hidden_act": "relu2",
    }


def _kind(keys: GgufKeys, block: str) -> str:
    stems = {"ssm_in": "linear_attention", "attn_q": "full_attention", "ffn_gate_inp": "moe"}
    return next((kind for stem, kind in stems.items() if keys.has_tensor(f"{block}{stem}.weight")), "mlp")


def parts(_: GgufKeys) -> dict[str, DerivedTensor]:
    return {"mixer.A_log": DerivedTensor("mixer.A_log", numbers="log(-x)")}


STEMS = {stem: name.replace("self_attn", "mixer").replace("mlp", "mixer") for stem, name in GGUF_DECODER.items()} | {
    "attn_norm": "norm",
    "exp_probs_b": NAMES.router_bias,
    "ffn_latent_down": "mixer.fc1_latent_proj",
    "ffn_latent_up": "mixer.fc2_latent_proj",
    "ffn_up_shexp": "mixer.shared_experts.up_proj",
    "ffn_down_shexp": "mixer.shared_experts.down_proj",
} | {stem: f"mixer.{name}" for stem, name in SPACE_STEMS.items()}  # fmt: skip

GGUF = Gguf("nemotron_h_moe", gguf_config, STEMS, parts)
FAMILY = Family(("nemotron_h",), config, (NAMES,), GGUF, renames=RENAMES)
