"""Reads safetensors and GGUF into named tensors without knowing any model; builds the demo model."""

from tandem.checkpoint.overlay.drafts import with_draft_config, with_draft_layer
from tandem.checkpoint.overlay.experts import with_experts
from tandem.checkpoint.resolve import demo_dir, resolve_model
from tandem.checkpoint.source import Checkpoint, load_model_config, open_checkpoint, read_generation

__all__ = [
    "Checkpoint",
    "demo_dir",
    "load_model_config",
    "open_checkpoint",
    "read_generation",
    "resolve_model",
    "with_draft_config",
    "with_draft_layer",
    "with_experts",
]
