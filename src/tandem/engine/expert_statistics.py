"""Counts and records of an engine's routed experts, and the use that it makes of earlier records."""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from time import monotonic

import msgspec
import torch
from torch import Tensor

from tandem.engine.protocol import ExpertsRecorded, ExpertStats, ExpertTraffic
from tandem.engine.step.step import SequenceOutput
from tandem.errors import RequestError
from tandem.experts.handoff import Handoff
from tandem.experts.handoff_counts import HandoffTimes, PrefetchCounts
from tandem.experts.live.live_experts import LiveExperts
from tandem.experts.placement import ExpertPlacement, load_counts, place
from tandem.experts.usage.expert_usage import ExpertUsage
from tandem.experts.usage.recorder import ExpertRecorder, RecordedRows, RecorderOptions
from tandem.flags.engine_config import EngineConfig
from tandem.flags.env import recorder_dir
from tandem.planner.gpu_plan import GpuPlan
from tandem.planner.plan import Plan
from tandem.spec.model_config import ModelConfig

READ_SECONDS = 1.0


def expert_usage(
    config: EngineConfig,
    plan: Plan,
    model: ModelConfig,
    device: torch.device | None = None,
    gpu_experts: Tensor | None = None,
) -> ExpertUsage | None:
    """device: the GPU, gpu_experts: its experts, bool [MoE layers, experts], of the layers that are counted. None for a
    dense model."""
    if not model.moe_layers:
        return None
    router, layers = model.moe.router, len(model.moe_layers if gpu_experts is None else gpu_experts)
    # Rows of rejected draft tokens are taken back by their ids.
    by_row = config.expert_distribution_recorder_mode == "per_token" or plan.speculation is not None
    graphs = () if plan.gpu is None else plan.gpu.graph_sizes
    chosen = (max(plan.max_step_tokens, *graphs, 0), router.top_k) if by_row else None
    return ExpertUsage(
        layers, router.num_experts, device=device, padded=device is not None, gpu_experts=gpu_experts, chosen=chosen
    )


def expert_placement(gpu: GpuPlan, model: ModelConfig) -> ExpertPlacement:
    """By the plan's strategy and statistics. Raises ConfigError when those do not fit the model."""
    moe, counts = model.moe, None
    layers, experts = len(model.moe_layers), moe.router.num_experts
    if gpu.statistics is not None:
        counts = load_counts(gpu.statistics, layers, experts, model.moe_layers, len(model.layers))
    return replace(place(gpu.placement, layers, experts, gpu.sizes.experts, counts), drafts=gpu.sizes.draft_experts)


def expert_recorder(
    config: EngineConfig, model: ModelConfig, usage: ExpertUsage | None
) -> ExpertRecorder | None:
    if usage is None:
        return None
    directory, buffer_size = (
        config.expert_distribution_recorder_dir,
        config.expert_distribution_recorder_buffer_size,
    )
    options = RecorderOptions(
        recorder_dir() if directory is None else Path(directory).expanduser(),
        config.expert_distribution_recorder_mode or "stat",
        None if buffer_size < 0 else buffer_size,
        config.record_kt_gpu_expert_distribution,
    )
    return ExpertRecorder(
        usage, model.moe_layers, options, config.served_model_name or Path(config.model).name
    )


class ExpertMeter:
    """`ExpertStats` for whoever asks. Counts on a GPU are read once a second at most while it works."""

    def __init__(
        self,
        usage: ExpertUsage,
        layers: Sequence[int],
        handoff: Handoff | None,
        live: LiveExperts | None = None,
    ) -> None:
        self._usage, self._layers, self._handoff, self._live = usage, list(layers), handoff, live
        self._read_at = -math.inf

    def traffic(self, idle: bool) -> ExpertTraffic:
        """By the same readings as `stats`."""
        self._read(idle)
        tokens = self._usage.tokens.numpy().astype("<i8", copy=False)
        gpu_experts = self._usage.gpu_experts.numpy().astype("u1", copy=False)
        return ExpertTraffic(
            layers=self._layers, experts=tokens.shape[1], tokens=tokens.tobytes(), gpu_experts=gpu_experts.tobytes()
        )

    def take_back(self, rows: list[int]) -> None:
        """Takes rows of the last step out of the counts: they turned out to be no tokens."""
        self._usage.take_back(rows)

    def _read(self, idle: bool) -> None:
        now = monotonic()
        if idle or self._handoff is None or now - self._read_at >= READ_SECONDS:
            self._read_at = now
            self._usage.read()

    def stats(self, idle: bool) -> ExpertStats:
        """idle: no step is to come, so this is the last reading for a while."""
        self._read(idle)
        sides = self._usage.sides()
        times = HandoffTimes() if self._handoff is None else self._handoff.times()
        moving = None if self._live is None else self._live.times()
        hints = PrefetchCounts() if self._handoff is None else self._handoff.hints()
        return ExpertStats(
            layers=self._layers,
            gpu_tokens=sides.gpu_tokens.tolist(),
            cpu_tokens=sides.cpu_tokens.tolist(),
            gpu_bytes=sides.gpu_bytes.tolist(),
            cpu_bytes=sides.cpu_bytes.tolist(),
            hit_rate=sides.hit_rate,
            swaps=self._usage.swaps,
            swap_rests=self._usage.swap_rests,
            swap_seconds=0.0 if moving is None else moving.seconds + moving.overlapped_seconds,
            swap_wait_seconds=0.0 if moving is None else moving.waited,
            handoff_posts=times.posts,
            handoff_wait_seconds=times.wait_seconds,
            handoff_serve_seconds=times.serve_seconds,
            hinted=hints.hinted,
            hint_hits=hints.hits,
            hint_bytes=hints.nbytes,
        )


def count_step(meter: ExpertMeter | None, recorder: ExpertRecorder | None, turns: Sequence[SequenceOutput]) -> None:
    """After a step. Rows of rejected draft tokens were never tokens: the model has counted them; they are taken
    back."""
    wrong = [row for turn in turns if turn.chunk.draft_tokens for row in turn.rejected]
    if wrong and meter is not None:
        meter.take_back(wrong)
    if recorder is not None:
        rows = [RecordedRows(turn.sequence.arrival[0], turn.first_position, turn.rows) for turn in turns]
        recorder.after_step(rows, wrong)


def perform(recorder: ExpertRecorder | None, action: str) -> Future[ExpertsRecorded]:
    """action: of `protocol.RecordExperts`. The future has what `ExpertRecorder` raises instead."""
    done: Future[ExpertsRecorded] = Future()
    try:
        if recorder is None:
            raise RequestError("this model has no routed experts, so there is nothing to record")
        if action == "dump":
            return _dumped(recorder, done)
        recorder.start() if action == "start" else recorder.stop()
        done.set_result(_state(recorder))
    except Exception as error:
        done.set_exception(error)
    return done


def _state(recorder: ExpertRecorder) -> ExpertsRecorded:
    passes, tokens = recorder.extent
    mode = recorder.options.mode
    return ExpertsRecorded(recording=recorder.recording, mode=mode, passes=passes, tokens=tokens)


def _dumped(recorder: ExpertRecorder, done: Future[ExpertsRecorded]) -> Future[ExpertsRecorded]:
    """Resolved on the recorder's thread."""
    state = _state(recorder)

    def settle(written: Future[Path]) -> None:
        error = written.exception()
        if error is None:
            done.set_result(msgspec.structs.replace(state, file=str(written.result())))
        else:
            done.set_exception(error)

    recorder.dump().add_done_callback(settle)
    return done
