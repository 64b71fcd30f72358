"""Operations of attention: products of queries with keys, and of weights with values."""

from __future__ import annotations

from tandem.config.forecast.memories import memory_flops
from tandem.config.model_config import ModelConfig
from tandem.mechanisms.delta_net.shape import DeltaRule
from tandem.mechanisms.grouped_query.shape import Gqa
from tandem.mechanisms.latent.shape import Latent
from tandem.mechanisms.shared_kv.shape import SharedKv


def attention_flops(model: ModelConfig, rows: int, before: int, per_head: bool) -> float:
    """Of `rows` causal rows after `before` tokens, in all layers. per_head: as a GPU computes prompts of latent
    attention, with each head's keys and values; else all in absorbed form. A memory of constant size counts as it is.
    """
    return sum(_of_mixer(mixer, rows, before, per_head) for mixer in model.mixers)


def _of_mixer(mixer: object, rows: int, before: int, per_head: bool) -> float:
    if isinstance(mixer, DeltaRule):
        return 6.0 * rows * mixer.v_heads * mixer.k_dim * mixer.v_dim
    if isinstance(mixer, Latent):
        return _of_latent(mixer, rows, before, per_head)
    if isinstance(mixer, SharedKv):  # of the middle row
        middle = before + rows // 2
        looked = 2.0 * mixer.keys_seen(middle) * mixer.heads * mixer.dim
        return 2.0 * rows * (looked + mixer.scored_products(middle))
    if isinstance(mixer, Gqa):
        channels = mixer.heads * (mixer.head_dim + mixer.value_dim)
        return 2.0 * pairs(rows, before, mixer.window or before + rows) * channels
    return memory_flops(mixer, rows, chunked=per_head)


def _of_latent(mixer: Latent, rows: int, before: int, per_head: bool) -> float:
    """Rows that choose among the tokens before them are always in absorbed form."""
    end = before + rows
    absorbed = mixer.cached_dim + mixer.kv_rank
    whole = mixer.qk_dim + mixer.value_dim if per_head else absorbed
    plain = max(0, min(rows, mixer.seen(end) - before))  # rows that see all tokens before them
    seen = pairs(plain, before, end) * whole + (rows - plain) * mixer.seen(end) * absorbed
    return 2.0 * (seen * mixer.heads + pairs(rows, before, end) * mixer.scored_channels)


def pairs(rows: int, before: int, most: int) -> float:
    """Keys that all rows see: each its own and those before it, `most` at most."""
    growing = max(0, min(rows, most - before))
    return growing * before + growing * (growing + 1) / 2 + (rows - growing) * most
