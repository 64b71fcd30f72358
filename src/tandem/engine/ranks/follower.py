"""`Follower`: another rank than the first: its part of the model, and the steps that it is told."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import torch

from tandem import models
from tandem.checkpoint import load_model_config, open_checkpoint, with_experts
from tandem.config.choices.cached import cached_as
from tandem.config.choices.threads import plan_threads
from tandem.config.in_place import stored_in
from tandem.config.ranks.ranked import own_side, ranked
from tandem.engine.batch_arrays import BatchArrays
from tandem.engine.ranks.lists import Mirror
from tandem.engine.ranks.messages import StartRank, StepList
from tandem.engine.sequence import Chunk
from tandem.engine.start.loader import for_loading, model_directory, use_one_torch_thread
from tandem.engine.state.arrays import allocate
from tandem.kernels.cpu_ops import CpuOps
from tandem.kernels.ranks.gloo import GlooGroup
from tandem.kernels.this_machine import these_cpus
from tandem.kernels.workers import planned_pool


class Follower:
    """Reads its shard when it is made. Not thread-safe."""

    @for_loading()
    def __init__(self, start: StartRank, rank: int) -> None:
        use_one_torch_thread()
        config, directory, machine = start.config, model_directory(start.config.model), these_cpus()
        whole = cached_as(config, load_model_config(directory))
        checkpoint = with_experts(open_checkpoint(directory), config.kt_weight_path, whole)
        stored = stored_in(checkpoint.formats(), *checkpoint.expert_files())
        _, model, _ = ranked(config, whole, machine, stored, rank)
        threads = plan_threads(*own_side(config, machine, rank))
        plan = replace(start.plan, cpus=threads.cpus, parts=threads.parts, part_nodes=threads.part_nodes)
        ops = CpuOps(planned_pool(threads), plan.tier, plan.int8_activations, deterministic=plan.deterministic)
        ops.group = GlooGroup(rank, config.tensor_parallel_size, start.file)
        self._model = models.build(model, plan, checkpoint, ops)
        layout = model.state_layout(plan.dtype, plan.page_size, plan.guesses)
        self._states = allocate(layout, plan.num_pages, None, plan.num_slots, plan.num_window_pages)
        self._arrays = BatchArrays(plan.page_size, plan.max_step_tokens, windowed=plan.num_window_pages > 0)
        self._mirror = Mirror(-(-plan.context_length // plan.page_size))
        self.cpu = plan.cpus[0]

    def step(self, step: StepList) -> None:
        for source, target in step.copies:
            self._states.slots[target].copy_(self._states.slots[source])
        chunks = cast(list[Chunk], self._mirror.chunks(step))  # as far as a batch asks
        with torch.inference_mode():
            self._model.forward(self._arrays.fill(chunks), self._states.arrays)
