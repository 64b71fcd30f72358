"""DSpark, the draft of DeepSeek-V4's checkpoints since July 2026: three layers that draft five tokens at once."""

from __future__ import annotations

from dataclasses import replace

from tandem.spec.drafts import DraftBlockShape, Drafts
from tandem.spec.json_keys import DRAFT_LAYERS, JsonKeys
from tandem.spec.model_config import ModelConfig

KEYS = "dspark_"
BLOCK_SIZE = f"{KEYS}block_size"
MOST_DRAFT_TOKENS = 63  # as the flags have it


def with_block(keys: JsonKeys, model: ModelConfig, drafts: Drafts) -> ModelConfig:
    """With layers like that of `drafts` where their keys are understood; else `draft` says what is not."""
    for key in (*DRAFT_LAYERS, "n_mtp_layers", *(key for key in keys if key.startswith(KEYS))):
        keys.get(key)  # the checkpoints have one NextN layer in their keys, and none in their files
    model = replace(model, unread_keys=keys.unread)
    size, reads = keys.count(BLOCK_SIZE, 0, most=MOST_DRAFT_TOKENS), keys.integers(f"{KEYS}target_layer_ids")
    unknown, rank = keys.optional(f"{KEYS}noise_token_id", -1), keys.count(f"{KEYS}markov_rank", 0)
    layers = keys.count("n_mtp_layers", 0) or len(reads)  # none of the hub's keys says how many there are
    why = _why_not(keys, model, reads, layers)
    why = why or (not 0 <= unknown < model.vocab and f"whose {KEYS}noise_token_id is no token") or ""
    why = why or (not rank and f"without {KEYS}markov_rank") or ""
    if why:
        return replace(model, draft=f"a DSpark draft of {layers} layers for blocks of {size} tokens, {why}")
    return replace(model, drafts=replace(drafts, block=DraftBlockShape(size, layers, unknown, reads, rank)))


def _why_not(keys: JsonKeys, model: ModelConfig, reads: tuple[int, ...], layers: int) -> str:
    """Reason that the layers that draft a block are not computed here; "": they are."""
    count, ratios = len(model.layers), keys.get("compress_ratios")
    if not reads or list(reads) != sorted({*reads}) or not 0 <= reads[0] <= reads[-1] < count:
        return f"whose {KEYS}target_layer_ids {list(reads)} name no layers of the model in their order"
    behind = ratios[count:] if isinstance(ratios, list) and len(ratios) == count + layers else []
    if pooled := [ratio for ratio in behind if ratio]:
        return f"which pools {pooled[0]} tokens"
    experts, used = model.moe.router.num_experts, model.moe.router.top_k
    own = keys.optional(f"{KEYS}n_routed_experts", experts), keys.optional(f"{KEYS}num_experts_per_tok", used)
    return "" if own == (experts, used) else f"with {own[0]} experts of its own, {own[1]} of which a token uses"
