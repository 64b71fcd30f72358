"""`as_asked`: a model with the parts that flags ask for, and without those that they do not."""

from __future__ import annotations

from tandem.flags.engine_config import EngineConfig
from tandem.planner.choices.cached import cached_as
from tandem.planner.choices.images import seeing
from tandem.planner.choices.speculation import drafting
from tandem.spec.model_config import ModelConfig


def as_asked(config: EngineConfig, model: ModelConfig) -> ModelConfig:
    """With its draft layer, its tower and its cache's dtype. Once more, it stays the same."""
    return cached_as(config, seeing(config, drafting(config, model)))
