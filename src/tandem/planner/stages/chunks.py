"""`chunks_at_once`: whether stages compute chunks of one prompt one behind the other, or take turns."""

from __future__ import annotations

from tandem.planner.choices.decision import Decision, Decisions
from tandem.spec.model_config import ModelConfig

BORDER_BUFFERS = 2  # chunks that a stage has room for beside its own work: one that is read, one that comes
MOST_CHUNKS = 8  # of a step, which nobody is added to; who comes waits for as many as are under way
BY_HOST = "experts in CPU memory: the host waits for each layer's rows, and streamed ones come once a chunk"


def chunks_at_once(model: ModelConfig, experts: int) -> tuple[int, Decisions]:
    """Chunks of a step, in a model with stages. experts: on the GPUs."""
    if experts < model.routed_experts:
        return 1, (Decision("prompts", "stages take turns", BY_HOST),)
    why = f"each computes another chunk of a prompt that is alone, up to {MOST_CHUNKS} in a step"
    return MOST_CHUNKS, (Decision("prompts", "pipelined over stages", why),)


def border_bytes(model: ModelConfig, rows: int) -> int:
    """Bytes of a GPU for chunks of so many rows that come from the stage before, in bfloat16: the residual, what is to
    be added to it, and a shared expert's result."""
    tensors = 3 if model.moe_layers and model.moe.shared is not None else 2
    return BORDER_BUFFERS * tensors * rows * model.hidden * 2
