"""What was asked, what the checkpoint is, what the machine has, and one function that resolves them into a Plan."""

from tandem.config.choices.decision import Decision
from tandem.config.engine_config import EngineConfig
from tandem.config.layers import Layer
from tandem.config.machine import Machine
from tandem.config.model_config import ModelConfig
from tandem.config.norm import Norm
from tandem.config.plan import Plan
from tandem.config.planner.resolve import resolve
from tandem.config.stored import StoredFormat, StoredFormats

__all__ = [
    "Decision",
    "EngineConfig",
    "Layer",
    "Machine",
    "ModelConfig",
    "Norm",
    "Plan",
    "StoredFormat",
    "StoredFormats",
    "resolve",
]
