"""Operations of attention: products of queries with keys, and of weights with values."""

from __future__ import annotations

from tandem.mechanisms.cost import cost_of
from tandem.spec.model_config import ModelConfig


def attention_flops(model: ModelConfig, rows: int, before: int, per_head: bool) -> float:
    """Operations of attention for `rows` causal rows after `before` tokens, in all layers.

    per_head: as a GPU computes prompts of latent attention, with each head's keys and values; else all in absorbed
    form. A memory of constant size counts as it is.
    """
    return sum(cost_of(mixer).flops(rows, before, per_head) for mixer in model.mixers)
