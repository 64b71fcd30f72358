"""Reads safetensors into named tensors without knowing any model; builds the demo model."""

from tandem.checkpoint.checkpoint import Checkpoint, open_checkpoint
from tandem.checkpoint.resolve import demo_dir, resolve_model

__all__ = ["Checkpoint", "demo_dir", "open_checkpoint", "resolve_model"]
