"""The plan of a model's routed experts alone: all else is another engine's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tandem.backends.host import CPU, Host
from tandem.errors import ConfigError, DoesNotFit
from tandem.flags.engine_config import EngineConfig
from tandem.machine.machine import Machine
from tandem.planner.choices.threads import ThreadPlan, plan_threads
from tandem.planner.expert_format import dense_choice, dtype_of, stored_or_asked
from tandem.planner.memory import gib
from tandem.planner.one_plan import kernel_tier
from tandem.planner.plan import Plan
from tandem.planner.ranks.ranked import own_side
from tandem.spec.model_config import STORED, ModelConfig
from tandem.spec.stored import StoredFormats

LEAST_SPARED = 8  # threads, of which one is left to the engine


def check_model(model: ModelConfig) -> None:
    """Raises ConfigError for a model whose experts cannot be asked for alone."""
    if not model.moe_layers:
        raise ConfigError(f"{model.model_type} has no routed experts: run the engine without this option")
    if model.foreign is not None:
        raise ConfigError(
            f"{model.model_type} runs through Transformers' modules here, whose experts are no layers of their own: "
            "run the engine without this option, or `kt serve`"
        )


def share_of(config: EngineConfig, machine: Machine, host: Host) -> tuple[EngineConfig, Machine]:
    """The rank's own threads, cores and memory."""
    if host.own_cpus:
        return config, replace(machine, available_memory=machine.available_memory // host.shard.ranks)
    return own_side(replace(config, tensor_parallel_size=host.shard.ranks), machine, host.shard.rank)


def with_spare_core(config: EngineConfig, machine: Machine, host: Host) -> EngineConfig:
    """Leaves a core to the engine's own threads where there are many, unless `kt_cpuinfer` says how many are ours.
    Beside a GPU both work at the same time: a step whose kernels are given late waits for as long, on every layer in
    piecewise graphs (measured with 16). Of few cores one would be too large a part."""
    threads = len(plan_threads(config, machine).cpus)
    if config.kt_cpuinfer is not None or host.device.type == CPU.type or threads < LEAST_SPARED:
        return config
    return replace(config, kt_cpuinfer=threads - 1)


def experts_plan(
    config: EngineConfig, model: ModelConfig, machine: Machine, stored: StoredFormats, on_cpu: int
) -> Plan:
    """model, config and machine: a rank's. on_cpu: experts in CPU memory, of all layers. Raises ConfigError."""
    dtype, threads = dtype_of(config), plan_threads(config, machine)
    expert_format, _ = stored_or_asked(config, dtype, stored)
    nbytes = on_cpu * model.expert_bytes(expert_format, stored.experts)
    if nbytes > machine.available_memory and config.packed_cache is None:
        name = stored.experts.name if expert_format == STORED else expert_format
        raise DoesNotFit(
            f"{on_cpu} experts in {name} take {gib(nbytes)} of CPU memory, and {gib(machine.available_memory)} are "
            "free: give kt_method INT4, or put more of them on the GPU (kt_gpu_experts_ratio)"
        )
    return Plan(
        dtype=dtype, expert_format=expert_format, tier=kernel_tier(config, machine)[0], cpus=threads.cpus,
        parts=threads.parts, part_nodes=threads.part_nodes, context_length=1, page_size=1, num_pages=1,
        max_running_requests=1, max_step_tokens=1, radix_cache=False, fuse_shared_experts=False,
        dense_codes=dense_choice(dtype, stored, False)[0], int8_activations=config.kt_int8_activations,
    )  # fmt: skip


def beginning_at(threads: ThreadPlan | Plan, cpu: int) -> tuple[int, ...]:
    """The threads' CPUs, the one of the calling thread first if it is among its part's: worker 0 is the caller."""
    cpus = list(threads.cpus)
    if cpu in cpus and (not threads.parts or threads.parts[cpus.index(cpu)] == threads.parts[0]):
        at = cpus.index(cpu)
        cpus[0], cpus[at] = cpus[at], cpus[0]
    return tuple(cpus)


def threads_text(cpus: Sequence[int]) -> str:
    """For the log."""
    pinned = [cpu for cpu in cpus if cpu >= 0]
    where = f"on CPUs {', '.join(map(str, pinned))}" if pinned else "not pinned"
    return f"{len(cpus)} threads, {where}"
