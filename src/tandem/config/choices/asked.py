"""`as_asked`: a model with the parts that flags ask for, and without those that they do not."""

from __future__ import annotations

from tandem.config.choices.cached import cached_as
from tandem.config.choices.images import seeing
from tandem.config.engine_config import EngineConfig
from tandem.config.model_config import ModelConfig
from tandem.config.speculation.choice import drafting


def as_asked(config: EngineConfig, model: ModelConfig) -> ModelConfig:
    """With its draft layer, its tower and its cache's dtype. Once more, it stays the same."""
    return cached_as(config, seeing(config, drafting(config, model)))
