"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) and its YaRN rotation: their keys of `config.json`."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tandem.config.json_keys import JsonKeys
from tandem.errors import ConfigError


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """Keys and values of all heads are made from one latent per token; only it and one rotary key are cached."""

    q_rank: int  # queries are made from a latent of this width; 0: straight from the hidden state
    kv_rank: int
    nope_dim: int  # of a query and key head: channels that are not turned …
    rope_dim: int  # … and that are, in pairs of neighbours; the key's are shared by all heads
    value_dim: int  # of a head

    @property
    def qk_dim(self) -> int:
        return self.nope_dim + self.rope_dim

    def params(self, hidden: int, heads: int) -> int:
        """Weights of the attention of one layer."""
        q = hidden * self.q_rank + (self.q_rank or hidden) * heads * self.qk_dim
        kv = hidden * (self.kv_rank + self.rope_dim) + self.kv_rank * heads * (self.nope_dim + self.value_dim)
        return q + kv + heads * self.value_dim * hidden


@dataclass(frozen=True, slots=True)
class YarnConfig:
    """YaRN (arXiv 2309.00071): fast channels turn as trained, slow ones `factor` times slower, a ramp between."""

    factor: float
    original_positions: int
    beta_fast: float
    beta_slow: float
    truncate: bool  # the ramp's ends are rounded to whole channels
    table_factor: float  # cos and sin are multiplied by it
    softmax_factor: float  # and the softmax scale by this

    def frequencies(self, theta: float, dim: int) -> list[float]:
        """Radians per position of each of the dim / 2 pairs."""
        low, high = self._channel(self.beta_fast, theta, dim), self._channel(self.beta_slow, theta, dim)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        high += 0.001 if low == high else 0
        slow = [min(1.0, max(0.0, (i - low) / (high - low))) for i in range(dim // 2)]
        plain = [theta ** (-2 * i / dim) for i in range(dim // 2)]
        return [f * (1 - s) + f / self.factor * s for f, s in zip(plain, slow, strict=True)]

    def _channel(self, turns: float, theta: float, dim: int) -> float:
        """The pair that turns so often within the original context."""
        return dim * math.log(self.original_positions / (turns * 2 * math.pi)) / (2 * math.log(theta))


def latent_config(keys: JsonKeys) -> LatentConfig:
    latent = LatentConfig(
        q_rank=keys.optional("q_lora_rank", 0),
        kv_rank=keys.size("kv_lora_rank", 512),
        nope_dim=keys.size("qk_nope_head_dim", 128),
        rope_dim=keys.size("qk_rope_head_dim", 64),
        value_dim=keys.size("v_head_dim", 128),
    )
    keys.get("qk_head_dim"), keys.get("head_dim")  # sums of the above
    if latent.q_rank < 0 or latent.rope_dim % 2:
        raise ConfigError(
            f"config.json: q_lora_rank {latent.q_rank} must be null or positive, "
            f"qk_rope_head_dim {latent.rope_dim} even; try 1536 and 64"
        )
    return latent


def latent_rope(keys: JsonKeys) -> tuple[float, YarnConfig | None]:
    """(theta, YaRN where it is on) from `rope_parameters` (transformers 5) or `rope_theta` + `rope_scaling`."""
    rope = keys.mapping("rope_parameters") or keys.mapping("rope_scaling")
    kind = rope.get("rope_type", rope.get("type", "default"))
    merged = keys.overlaid(rope)
    theta = merged.need("rope_theta", 10000.0)
    if kind == "default":
        return theta, None
    if kind != "yarn":
        raise ConfigError(f"config.json: rope type {kind!r} is not supported here; 'default' and 'yarn' are")
    return theta, _yarn(merged)


def _yarn(rope: JsonKeys) -> YarnConfig:
    factor = rope.need("factor", 40.0)
    original = rope.size("original_max_position_embeddings", 4096)
    if factor < 1:
        raise ConfigError(f"config.json: rope scaling factor {factor} must be at least 1; try 40")
    mscale, all_dim = rope.optional("mscale", 0.0), rope.optional("mscale_all_dim", 0.0)
    table = _mscale(factor, mscale) / _mscale(factor, all_dim) if mscale and all_dim else _mscale(factor, 1.0)
    return YarnConfig(
        factor=factor,
        original_positions=original,
        beta_fast=rope.optional("beta_fast", 32.0) or 32.0,
        beta_slow=rope.optional("beta_slow", 1.0) or 1.0,
        truncate=rope.optional("truncate", True),
        table_factor=rope.optional("attention_factor", table),
        softmax_factor=_mscale(factor, all_dim) ** 2 if all_dim else 1.0,
    )


def _mscale(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0
