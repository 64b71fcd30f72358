"""Pieces of `config.json` that families share.

Sizes must be present. Flags that are absent take the value the family's Transformers class has for them,
since that is what the checkpoint was saved against. What we do not compute is refused, never ignored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import replace

from tandem.errors import ConfigError
from tandem.mechanisms.dense.shape import Dense
from tandem.mechanisms.experts.shape import Experts, Moe
from tandem.mechanisms.grouped_query.shape import Gqa, QkNorm
from tandem.mechanisms.router.shape import Router
from tandem.spec.activation import Activation, ActivationKind
from tandem.spec.drafts import Drafts
from tandem.spec.json_keys import DRAFT_LAYERS, JsonKeys
from tandem.spec.layers import Attention, Layer, Mixer, pre_norm
from tandem.spec.model_config import ModelConfig
from tandem.spec.norm import Norm
from tandem.spec.rope import Rope, one_rope, positions_of, read_rope, rope_keys, still


def text_part(keys: JsonKeys, part: str = "text_config") -> JsonKeys:
    """The keys of a part of a model that reads images or sound, too; all keys where it has none. Whether embeddings are
    tied, the whole says first."""
    nested = keys.mapping(part)
    if not nested:
        return keys
    inside = one_rope(keys.inside(part)) if "rope_scaling" in nested else keys.inside(part)
    tied = keys.get("tie_word_embeddings")
    return inside if tied is None else inside.overlaid({"tie_word_embeddings": tied})


def positive(keys: JsonKeys, key: str, usual: int) -> int:
    """A small number of at least 1. usual: what an absent key means."""
    value = keys.count(key, usual, most=256)
    if not value:
        raise ConfigError(f"{keys.where}: {key} is 0; try {usual}")
    return value


def layer_count(keys: JsonKeys) -> int:
    return keys.size("num_hidden_layers", 24, most=10_000)


def model(
    keys: JsonKeys,
    generation: JsonKeys,
    mixers: Callable[[int], Mixer],
    moe: Moe | None = None,
    moe_layers: Collection[int] = (),
    plus_one: bool = False,
) -> ModelConfig:
    """Layers of attention and a feed-forward: `moe` in `moe_layers`, a dense one elsewhere, all of the activation that
    `hidden_act` names. plus_one: of all norms."""
    how = activation(keys)
    moe = None if moe is None else moe.activated_by(how)
    if moe is not None and not moe_layers:
        raise ConfigError(
            "config.json: no layer is MoE; this is a dense model, by num_hidden_layers and keys of dense layers"
        )
    count, norm = layer_count(keys), Norm(epsilon(keys), plus_one)
    sparse = moe is not None and len(set(moe_layers)) == count
    width = keys.optional("intermediate_size", 0) if sparse else keys.size("intermediate_size", 5632)
    dense = Dense(width, how)
    layers = [
        pre_norm(mixers(i), moe if moe is not None and i in moe_layers else dense, norm) for i in range(count)
    ]
    return assembled(keys, generation, tuple(layers), norm)


def assembled(keys: JsonKeys, generation: JsonKeys, layers: tuple[Layer, ...], norm: Norm) -> ModelConfig:
    """Model configuration around `layers`, with the keys that every family has."""
    return ModelConfig(
        model_type=keys["model_type"],
        hidden=keys.size("hidden_size", 2048),
        vocab=keys.size("vocab_size", 151936),
        layers=layers,
        norm=norm,
        tied_embeddings=keys.optional("tie_word_embeddings", False),
        max_positions=_positions(keys, layers),
        eos_ids=generation.integers("eos_token_id") or keys.integers("eos_token_id"),
        unread_keys=keys.unread,
    )


def _positions(keys: JsonKeys, layers: tuple[Layer, ...]) -> int:
    """The least of what layers read. Those that look back no farther than a window turn as well at any position."""
    attentions = [layer.mixer for layer in layers if isinstance(layer.mixer, Attention)]
    far = [each for each in attentions if each.sees_all] or attentions
    if not far:  # nothing turns
        return keys.size("max_position_embeddings", 32768)
    return min(positions_of(rope_keys(keys), each.rope) for each in far)


def with_drafts(keys: JsonKeys, model: ModelConfig, *, count: int = 0) -> ModelConfig:
    """With a draft layer like the last one that looks back at tokens, where the checkpoint has some. Of several the
    first drafts all tokens. Its feed-forward may be dense. count: what absent keys mean."""
    counts = [keys.count(key, 0) for key in DRAFT_LAYERS if keys.get(key) is not None]
    layers = [layer for layer in model.layers if isinstance(layer.mixer, Attention) and layer.moe is not None]
    if not (max(counts, default=count) and layers):
        return replace(model, unread_keys=keys.unread)
    vocab = keys.count("draft_vocab_size", 0, most=model.vocab)
    drafts = Drafts(_with_feed_forward(keys, layers[-1]), model.norm, 0 if vocab == model.vocab else vocab)
    return replace(model, drafts=drafts, unread_keys=keys.unread)


def _with_feed_forward(keys: JsonKeys, layer: Layer) -> Layer:
    """A draft layer's, as Transformers' key says; sparse where it says nothing."""
    kind = next(iter(keys.get("mtp_mlp_layer_types") or ["sparse"]))
    if kind != "dense":
        return layer
    dense = Dense(keys.size("intermediate_size", 5632), activation(keys))
    blocks = (replace(each, body=dense) if isinstance(each.body, Moe) else each for each in layer.blocks)
    return replace(layer, blocks=tuple(blocks))


ACTIVATIONS: dict[str, ActivationKind] = {
    "silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh",
}  # fmt: skip
"""Activations of gated feed-forwards, by the names that Transformers has for them."""


def activation(keys: JsonKeys) -> Activation:
    """Activation that `hidden_act` names. Raises ConfigError for one that no kernel computes."""
    name = keys.optional("hidden_act", "silu")
    if name not in ACTIVATIONS:
        raise ConfigError(
            f"{keys.where}: hidden_act = {name!r} is not supported; these are: {', '.join(ACTIVATIONS)}"
        )
    return Activation(ACTIVATIONS[name])


def epsilon(keys: JsonKeys) -> float:
    value = keys.need("rms_norm_eps", 1e-6)
    if not (math.isfinite(value) and value >= 0):
        raise ConfigError(f"{keys.where}: rms_norm_eps is {value}, and must be 0 or more; try 1e-06")
    return value


def gqa(
    keys: JsonKeys,
    *,
    qkv_bias: bool = False,
    out_bias: bool = False,
    qk_norm: QkNorm = "none",
    window: int = 0,
    clip: float = 0.0,
    rotary_share: float | None = None,
    plus_one: bool = False,
) -> Gqa:
    """rotary_share: of a head's channels that turn, where config.json does not say; None: all, always."""
    heads = keys.size("num_attention_heads", 16)
    kv_heads = keys.optional("num_key_value_heads", heads)
    head_dim = keys.optional("head_dim", keys.size("hidden_size", 2048) // heads)
    if kv_heads < 1 or heads % kv_heads:
        raise ConfigError(f"config.json: num_key_value_heads {kv_heads} does not divide {heads} heads")
    return Gqa(
        heads, kv_heads, head_dim, _rope(keys, head_dim, rotary_share), window, qk_norm,
        Norm(epsilon(keys), plus_one), qkv_bias, out_bias, clip,
    )  # fmt: skip


def _rope(keys: JsonKeys, head_dim: int, default_share: float | None) -> Rope:
    merged = rope_keys(keys)
    whole = (merged.get("rope_type") or merged.get("type")) == "proportional"  # says for itself what turns
    share = merged.optional("partial_rotary_factor", 1.0 if default_share is None else default_share)
    if share != 1.0 and default_share is None and not whole:
        raise ConfigError(f"config.json: partial_rotary_factor {share} is not part of this family; 1.0 is")
    if not 0 < share <= 1:
        raise ConfigError(f"{keys.where}: partial_rotary_factor is {share}, and must be above 0 and at most 1; try 1.0")
    dims = head_dim if whole else int(head_dim * share)
    if not 0 < dims <= head_dim:
        raise ConfigError(f"config.json: {dims} rotary channels of {head_dim} do not fit")
    return read_rope(merged, dims)


def softmax_router(keys: JsonKeys, experts_key: str, normalize: bool, *aliases: str) -> Router:
    return Router(
        keys.size(experts_key, 64, *aliases), keys.size("num_experts_per_tok", 8), "softmax", normalize
    )


def sigmoid_router(
    keys: JsonKeys,
    experts: str = "n_routed_experts",
    *,
    normalize: bool = True,
    scale: float = 1.0,
    groups: int = 1,
    top_groups: int = 1,
) -> Router:
    """DeepSeek-V3's: sigmoid, chosen with a bias, from the best groups. experts: the key of their number; the others:
    what absent keys mean."""
    return Router(
        num_experts=keys.size(experts, 256, "num_local_experts"),
        top_k=keys.size("num_experts_per_tok", 8),
        score="sigmoid",
        normalize=keys.optional("norm_topk_prob", normalize),
        scale=keys.optional("routed_scaling_factor", scale),
        num_groups=keys.optional("n_group", groups),
        top_groups=keys.optional("topk_group", top_groups),
        has_bias=True,
        float32_logits=True,
        epsilon=1e-20,
    )


def moe(router: Router, width: int, shared_width: int = 0, shared_gate: bool = False) -> Moe:
    """Raises ConfigError for a router that cannot choose so many."""
    experts, top_k, groups, top_groups = router.num_experts, router.top_k, router.num_groups, router.top_groups
    if top_k > experts:
        raise ConfigError(f"config.json: num_experts_per_tok {top_k} is more than the {experts} experts")
    uneven = groups < 1 or experts % groups or not 1 <= top_groups <= groups
    if uneven or top_k > top_groups * (experts // groups):
        raise ConfigError(f"config.json: n_group {groups}, topk_group {top_groups} do not fit")
    if groups > 1 and experts // groups < 2:
        raise ConfigError(f"config.json: n_group {groups} leaves groups of one; try {experts // 2}")
    if shared_width < 0:
        raise ConfigError(f"config.json: the shared expert has a width of {shared_width}; try 0")
    shared = Dense(shared_width) if shared_width else None
    return Moe(router, Experts(experts, width), shared, shared_gate and shared is not None)


def sparse_step_layers(keys: JsonKeys) -> list[int]:
    """Qwen: every `decoder_sparse_step`-th layer, except those of `mlp_only_layers`."""
    step = keys.optional("decoder_sparse_step", 1)
    dense = set(keys.integers("mlp_only_layers"))
    if step < 1:
        raise ConfigError(f"config.json: decoder_sparse_step is {step}, and must be at least 1")
    return [i for i in range(layer_count(keys)) if i not in dense and (i + 1) % step == 0]


def layers_after_dense(keys: JsonKeys, dense: int) -> list[int]:
    """Those of `mlp_layer_types` that are sparse; where it is absent, all after the first `first_k_dense_replace`.
    dense: what absent ones mean."""
    count, kinds = layer_count(keys), keys.get("mlp_layer_types")
    first = keys.count("first_k_dense_replace", dense)
    if kinds is None:
        return list(range(first, count))
    if not isinstance(kinds, list) or len(kinds) != count or set(map(str, kinds)) - {"dense", "sparse"}:
        raise ConfigError(f"{keys.where}: mlp_layer_types must be a list of {count} times dense or sparse")
    return [i for i, kind in enumerate(kinds) if kind == "sparse"]


def layer_kinds(keys: JsonKeys, default: Callable[[int], str]) -> list[str]:
    """`layer_types`, or what stands for it where it is absent."""
    count = layer_count(keys)
    kinds = keys.get("layer_types") or [default(i) for i in range(count)]
    if not isinstance(kinds, list) or len(kinds) != count:
        raise ConfigError(
            f"config.json: layer_types must be a list of {count}, one for each layer; or remove it"
        )
    return [str(kind) for kind in kinds]


WINDOW, FULL = "sliding_attention", "full_attention"


def windowed(keys: JsonKeys, attention: Gqa, window: int, has_window: Callable[[int], bool]) -> list[Gqa]:
    """Attention of each layer: `attention`, with the `sliding_window` in layers that have one.

    window and has_window: the meaning of absent keys.
    """
    absent = "sliding_window" not in keys
    size = window if absent else keys.count("sliding_window", 0, most=1 << 31)
    kinds = layer_kinds(keys, lambda i: WINDOW if size and has_window(i) else FULL)
    if unknown := sorted(set(kinds) - {WINDOW, FULL}):
        raise ConfigError(
            f"{keys.where}: layer type {unknown[0]!r} is not supported; {WINDOW} and {FULL} are"
        )
    if WINDOW in kinds and not size:
        raise ConfigError(f"{keys.where}: layer_types has {WINDOW}, but there is no sliding_window; try 4096")
    return [replace(attention, window=size if kind == WINDOW else 0) for kind in kinds]


def turning_in_windows(
    keys: JsonKeys, attention: Gqa, kinds: list[str], window: int, *, without: bool = False
) -> list[Gqa]:
    """Attention of each layer, which turns only in layers with a window.

    window: the meaning of an absent `sliding_window`; without: whether all turn where it is null.
    """
    if unknown := sorted(set(kinds) - {WINDOW, FULL}):
        raise ConfigError(f"{keys.where}: layer type {unknown[0]!r} is not supported; {WINDOW} and {FULL} are")
    size = keys.count("sliding_window", 0, most=1 << 31) if "sliding_window" in keys else window
    near, far = replace(attention, window=size), replace(attention, rope=still(attention.head_dim))
    if without and not size:
        far = near
    return [near if kind == WINDOW else far for kind in kinds]


def check_convolutions(keys: JsonKeys) -> None:
    """Checks layers whose convolutions end in `hidden_act`, as their feed-forwards do."""
    if activation(keys).kind != "silu":
        raise ConfigError(
            f"{keys.where}: hidden_act = {keys['hidden_act']!r} is not supported here, since convolutions end in it, "
            "too; 'silu' is"
        )
