"""Routers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tandem.errors import ConfigError
from tandem.mechanisms.router.scores import SCORES


@dataclass(frozen=True, slots=True)
class Router:
    """How gate logits become experts and weights.

    `score` names one of `SCORES`. With `has_bias`, experts are chosen by score + bias, but weighted by the score alone
    (DeepSeek-V3). With `num_groups` > 1 only the best
    `top_groups` groups stay in the race; a group counts as its two best biased scores added (DeepSeek-V3, GLM-4.5), or
    with `group_score="max"` as its best (DeepSeek-V2). table: each token's id names its experts, and scores weigh them.
    """

    num_experts: int
    top_k: int
    score: str = "softmax"
    normalize: bool = True  # divide the chosen weights by their sum
    scale: float = 1.0  # routed_scaling_factor, applied last
    num_groups: int = 1
    top_groups: int = 1
    group_score: Literal["top2", "max"] = "top2"
    epsilon: float = 0.0  # added to the sum before dividing (1e-20 in DeepSeek and GLM)
    least_sum: float = 0.0  # the sum is at least this before dividing
    has_bias: bool = False  # the checkpoint has a selection bias per expert
    logits_bias: bool = False  # is added to the logits
    float32_logits: bool = False  # logits are computed in f32; else in the activations' dtype
    table: bool = False
    expert_scale: bool = False  # a chosen weight times a number of the expert, last

    def __post_init__(self) -> None:
        if self.score not in SCORES:
            raise ConfigError(f"a router's score is {self.score!r}, and must be one of: {', '.join(SCORES)}")
        if self.group_score not in ("top2", "max"):
            raise ConfigError(f"a group of experts counts as {self.group_score!r}, and must as 'top2' or 'max'")
