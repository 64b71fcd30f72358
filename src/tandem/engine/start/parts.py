"""`EngineParts`: what an engine is made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tandem.engine.cpu_runner import StepModel
from tandem.engine.speculation.draft import Drafter
from tandem.engine.step.hooks import StepHooks
from tandem.experts.handoff import Handoff
from tandem.experts.live.live_experts import LiveExperts
from tandem.experts.usage.expert_usage import ExpertUsage
from tandem.experts.usage.recorder import DETAILED, ExpertRecorder
from tandem.models.staged import Stage
from tandem.planner.cuda_graphs import split_sizes
from tandem.planner.plan import Plan
from tandem.spec.model_config import ModelConfig
from tandem.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from tandem.engine.ranks.leader import Leader
    from tandem.kernels.gpu.ranks.gpu_group import GpuGroup


@dataclass(frozen=True, slots=True)
class EngineParts:
    """`load_parts` (engine/start/loader.py) makes them from a config; tests build them by hand."""

    plan: Plan
    model_config: ModelConfig
    model: StepModel
    tokenizer: Tokenizer | None  # None: text is the first rank's, and this is another one
    workers: Any = None  # the WorkerPool, kept alive as long as the engine
    usage: ExpertUsage | None = None  # which experts are chosen; None: nobody counts
    recorder: ExpertRecorder | None = None  # of `usage`
    live: LiveExperts | None = None  # moves experts between steps; None: they stay where they are
    handoff: Handoff | None = None  # between a GPU and the experts in CPU memory; None: no GPU
    begin_step: StepHooks | None = None  # on a GPU: what its operations prepare outside CUDA graphs
    drafter: Drafter | None = None  # who drafts, where the plan wants it; None: whom that names. A layer works anyway
    stream_seconds: float | None = None  # of a step in which all experts are streamed to the GPU; None: none is

    leader: Leader | None = None  # of other ranks; None: this process has all of the model, or is not the first rank
    group: GpuGroup | None = None  # of the GPUs of several ranks
    stages: tuple[Stage, ...] = ()  # of a model whose layers are divided among GPUs; (): they are not

    @property
    def replays_without_decodes(self) -> bool:
        """Whether prompts are replayed where nobody decodes, too: not where experts are streamed, or each token's
        choice is recorded."""
        return not self._streams and not self._detailed

    @property
    def split_prompts(self) -> tuple[int, ...]:
        """Rows of graphs of prompts where nobody decodes and experts are streamed: the CPU computes a share of them."""
        gpu = self.plan.gpu
        return () if gpu is None or not self._streams or self._detailed else split_sizes(gpu.sizes.prompt_sizes)

    @property
    def _streams(self) -> bool:
        return self.plan.gpu is not None and self.plan.gpu.streams_experts

    @property
    def _detailed(self) -> bool:
        return self.recorder is not None and self.recorder.options.mode in DETAILED
