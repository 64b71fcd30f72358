"""What was asked, what the checkpoint is, what the machine has, and one function that resolves them into a Plan."""

from tandem.config.engine_config import EngineConfig
from tandem.config.machine import Machine
from tandem.config.model_config import AttentionConfig, ModelConfig, MoEConfig, RouterConfig
from tandem.config.plan import Decision, Plan, resolve
from tandem.config.stored import StoredFormat, StoredFormats

__all__ = [
    "AttentionConfig",
    "Decision",
    "EngineConfig",
    "Machine",
    "MoEConfig",
    "ModelConfig",
    "Plan",
    "RouterConfig",
    "StoredFormat",
    "StoredFormats",
    "resolve",
]
