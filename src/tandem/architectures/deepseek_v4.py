"""DeepSeek-V4: shared keys in a window, pooled entries behind it, hyper-connections, routers by score or by table."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tandem.architectures.dspark import BLOCK_SIZE, with_block
from tandem.architectures.family import Family
from tandem.architectures.gguf.deepseek_v4 import DEEPSEEK_V4
from tandem.architectures.names import DraftNames, Names
from tandem.architectures.shared import activation, assembled, epsilon, layer_count, moe, positive
from tandem.errors import ConfigError
from tandem.mechanisms.compressed_attention.shape import CompressedAttention, Compression, EntryIndex
from tandem.mechanisms.experts.shape import Moe
from tandem.mechanisms.router.shape import Router
from tandem.mechanisms.streams.shape import Hyper
from tandem.spec.activation import Activation
from tandem.spec.drafts import Drafts
from tandem.spec.json_keys import JsonKeys
from tandem.spec.layers import pre_norm
from tandem.spec.model_config import ModelConfig
from tandem.spec.norm import Norm
from tandem.spec.rope import Rope, read_rope

SLIDING, SPARSE, HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
KINDS = (SLIDING, SPARSE, HEAVY)
RATIOS = {"0": SLIDING, "4": SPARSE, "128": HEAVY}
"""Layer kinds by entries of `compress_ratios`, which has an entry for each layer, and for draft layers behind them."""

STRIDES = {SPARSE: ("compress_rate_csa", 4), HEAVY: ("compress_rate_hca", 128)}
HASHED, SCORED = "hash_moe", "moe"
HASH_LAYERS = 3


def config(keys: JsonKeys, generation: JsonKeys) -> ModelConfig:
    _refuse_others(keys)
    norm, count = Norm(epsilon(keys), wide=True), layer_count(keys)
    hyper = Hyper(
        positive(keys, "hc_mult", 4),
        positive(keys, "hc_sinkhorn_iters", 20),
        keys.optional("hc_eps", 1e-6),
        norm.eps,
    )
    experts = _experts(keys)
    hashed = replace(experts, router=replace(experts.router, table=True, has_bias=False))
    attention = {kind: _attention(keys, kind) for kind in KINDS}
    layers = [
        pre_norm(attention[kind], hashed if router == HASHED else experts, norm, hyper)
        for kind, router in zip(_kinds(keys, count), _routers(keys, count), strict=True)
    ]
    drafts = Drafts(pre_norm(attention[SLIDING], experts, norm, hyper), norm)
    base = assembled(keys, generation, tuple(layers), norm)
    return with_block(keys, base, drafts) if keys.get(BLOCK_SIZE) else _with_draft(keys, base, drafts)


def _refuse_others(keys: JsonKeys) -> None:
    keys.only("scoring_func", "sqrtsoftplus", "DeepSeek-V4's")
    keys.only("norm_topk_prob", True, "DeepSeek-V4 normalises")
    keys.only("topk_method", "noaux_tc", "DeepSeek-V4's")
    keys.only("num_key_value_heads", 1, "all heads share one key")
    keys.only("hidden_act", "silu", "its experts clamp before silu")
    for key in ("attention_bias", "mlp_bias"):
        keys.only(key, False, "its matrices have none")
    for key in ("expert_dtype", "n_group", "topk_group", "intermediate_size"):
        keys.get(key)  # what tensors say themselves; unused


def _attention(keys: JsonKeys, kind: str) -> CompressedAttention:
    heads, groups = keys.size("num_attention_heads", 64), keys.optional("o_groups", 8)
    if groups < 1 or heads % groups:
        raise ConfigError(f"{keys.where}: o_groups {groups} does not divide {heads} heads; try 8")
    return CompressedAttention(
        heads=heads,
        dim=keys.optional("head_dim", 512),
        q_rank=keys.size("q_lora_rank", 1024),
        window=keys.optional("sliding_window", 128),
        rope=_rope(keys, kind != SLIDING),
        out_groups=groups,
        out_rank=keys.optional("o_lora_rank", 1024),
        eps=epsilon(keys),
        compression=None if kind == SLIDING else _compression(keys, kind),
    )


def _compression(keys: JsonKeys, kind: str) -> Compression:
    """`compress_rates` by kind; older files have a key for each."""
    key, usual = STRIDES[kind]
    stride = keys.optional(key, keys.mapping("compress_rates").get(kind, usual))
    if type(stride) is not int or not 1 < stride <= 4096:
        raise ConfigError(f"{keys.where}: {kind} pools {stride} tokens, and must be 2 to 4096; try {usual}")
    if kind == HEAVY:
        return Compression(stride)
    heads, dim = keys.optional("index_n_heads", 64), keys.optional("index_head_dim", 128)
    return Compression(stride, True, EntryIndex(heads, dim, keys.optional("index_topk", 512)))


def _rope(keys: JsonKeys, compressed: bool) -> Rope:
    """Layers that pool turn by a base and a scaling of their own; no scaling changes the size of what turns."""
    parameters = keys.mapping("rope_parameters") or keys.mapping("rope_scaling")
    _check_nested(keys, parameters)
    nested: dict[str, Any] = parameters.get("compress" if compressed else "main", {})
    if nested:
        own = nested
    elif compressed:
        own = parameters | {"rope_theta": float(keys.optional("compress_rope_theta", 160000.0))}
    else:
        own = {"rope_theta": float(keys.optional("rope_theta", 10000.0)), "rope_type": "default"}
    keys.get("compress_rope_theta")
    rope = read_rope(
        keys.overlaid({"rope_type": None, "type": None} | own), _rotary_dims(keys, own), "neighbours"
    )
    return replace(rope, table_factor=own.get("attention_factor") or 1.0)


def _check_nested(keys: JsonKeys, parameters: dict[str, Any]) -> None:
    """As Transformers writes it: both kinds, and of YaRN that what turns keeps its size."""
    kinds = [parameters.get(kind) for kind in ("main", "compress")]
    if any(kind is not None for kind in kinds) and not all(isinstance(kind, dict) for kind in kinds):
        raise ConfigError(
            f"{keys.where}: rope_parameters must have an object for main and one for compress, or neither"
        )
    for kind in filter(None, kinds):
        if kind.get("rope_type") == "yarn" and type(kind.get("attention_factor")) not in (int, float):
            raise ConfigError(
                f"{keys.where}: rope_parameters.compress lacks 'attention_factor': add it, 1.0 in every DeepSeek-V4"
            )


def _rotary_dims(keys: JsonKeys, parameters: dict[str, Any]) -> int:
    head = keys.optional("head_dim", 512)
    share = parameters.get("partial_rotary_factor") or keys.optional("partial_rotary_factor", 0.0)
    dims = int(head * share) if share else keys.optional("qk_rope_head_dim", head // 8)
    keys.get("qk_rope_head_dim"), keys.get("partial_rotary_factor")
    smallest = min(head, keys.optional("index_head_dim", 128))
    if not 0 < dims <= smallest:
        raise ConfigError(
            f"{keys.where}: {dims} rotary channels of {smallest} do not fit; try {smallest // 2}"
        )
    return dims


def _kinds(keys: JsonKeys, count: int) -> list[str]:
    """`layer_types`, or `compress_ratios`. Neither: V4-Pro's schedule, as Transformers has it."""
    kinds, ratios = keys.get("layer_types"), keys.get("compress_ratios")
    if kinds is None and ratios is not None:
        kinds = [RATIOS.get(str(ratio)) for ratio in ratios] if isinstance(ratios, list) else ratios
    if kinds is None:
        kinds = [SPARSE if i >= 2 and i % 2 else HEAVY for i in range(count)]
    if not isinstance(kinds, list) or len(kinds) < count or not all(kind in KINDS for kind in kinds[:count]):
        raise ConfigError(
            f"{keys.where}: layer_types or compress_ratios must name one of {', '.join(KINDS)} (0, 4 or 128) for each "
            f"of {count} layers"
        )
    return kinds[:count]


def _routers(keys: JsonKeys, count: int) -> list[str]:
    kinds, hashed = keys.get("mlp_layer_types"), keys.count("num_hash_layers", HASH_LAYERS)
    if kinds is None:
        kinds = [HASHED if i < hashed else SCORED for i in range(count)]
    if (
        not isinstance(kinds, list)
        or len(kinds) < count
        or not all(kind in (HASHED, SCORED) for kind in kinds[:count])
    ):
        raise ConfigError(
            f"{keys.where}: mlp_layer_types must name {HASHED} or {SCORED} for each of {count} layers"
        )
    return kinds[:count]


def _experts(keys: JsonKeys) -> Moe:
    router = Router(
        num_experts=keys.size("n_routed_experts", 256, "num_local_experts"),
        top_k=keys.size("num_experts_per_tok", 6),
        score="sqrt_softplus",
        scale=keys.optional("routed_scaling_factor", 1.5),
        has_bias=True,
        float32_logits=True,
        epsilon=1e-20,
    )
    width = keys.size("moe_intermediate_size", 2048)
    keys.only("n_shared_experts", 1, "every layer has one")
    activation(keys)
    limit = keys.optional("swiglu_limit", 10.0)
    return moe(router, width, width).activated_by(Activation("swiglu_clamp", limit=limit))


def _with_draft(keys: JsonKeys, base: ModelConfig, drafts: Drafts) -> ModelConfig:
    """With a NextN layer, where the checkpoint has one. One that pools tokens is not run."""
    layers, ratios = keys.count("num_nextn_predict_layers", 0), keys.get("compress_ratios")
    count, base = len(base.layers), replace(base, unread_keys=keys.unread)
    behind = ratios[count:] if isinstance(ratios, list) and len(ratios) == count + layers else []
    if pooled := [ratio for ratio in behind if ratio]:
        return replace(base, draft=f"a draft layer (NextN) that pools {pooled[0]} tokens")
    return replace(base, drafts=drafts) if layers else base


DRAFTS = DraftNames(
    *("mtp.0.", "mtp.0.enorm", "mtp.0.hnorm", "mtp.0.e_proj", "mtp.0.norm"),
    hidden_projection="mtp.0.h_proj",
    streams="mtp.0.hc_head_",
)
FAMILY = Family(("deepseek_v4",), config, (Names(shared="mlp.shared_experts"),), DEEPSEEK_V4, DRAFTS)
