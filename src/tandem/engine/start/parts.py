"""`EngineParts`: what an engine is made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tandem.config import ModelConfig, Plan
from tandem.engine.gpu_runner import BeginStep
from tandem.engine.runner import StepModel
from tandem.engine.speculation.draft import Drafter
from tandem.engine.text.tokenizer import Tokenizer
from tandem.experts.handoff import Handoff
from tandem.experts.live.live_experts import LiveExperts
from tandem.experts.usage.expert_usage import ExpertUsage
from tandem.experts.usage.recorder import ExpertRecorder


@dataclass(frozen=True, slots=True)
class EngineParts:
    """`load_parts` (engine/loader.py) makes them from a config; tests build them by hand."""

    plan: Plan
    model_config: ModelConfig
    model: StepModel
    tokenizer: Tokenizer
    workers: Any = None  # the WorkerPool, kept alive as long as the engine
    usage: ExpertUsage | None = None  # which experts are chosen; None: nobody counts
    recorder: ExpertRecorder | None = None  # of `usage`
    live: LiveExperts | None = None  # moves experts between steps; None: they stay where they are
    handoff: Handoff | None = None  # between a GPU and the experts in CPU memory; None: no GPU
    begin_step: BeginStep | None = None  # on a GPU: what its operations prepare outside CUDA graphs
    drafter: Drafter | None = None  # who guesses, where the plan wants it; None: whom that names. A layer works anyway
    stream_seconds: float | None = None  # of a step in which all experts travel to the GPU; None: none does
