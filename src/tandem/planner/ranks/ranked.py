"""One rank's part of the model and of the machine, for `--tp`; and features that ranks do not have yet."""

from __future__ import annotations

from dataclasses import replace

from tandem.errors import ConfigError
from tandem.flags.engine_config import EngineConfig
from tandem.flags.env import ranks_share_gpus
from tandem.machine.gpus import Gpu, kinds_of
from tandem.machine.machine import Machine
from tandem.planner.choices.decision import Decision
from tandem.planner.expert_format import expert_format_of
from tandem.planner.ranks.cut import cut
from tandem.planner.ranks.rank_gpus import rank_gpus
from tandem.spec.model_config import STORED, ModelConfig
from tandem.spec.shard import RankShard
from tandem.spec.stored import StoredFormats

FIELD = ("tensor_parallel_size",)
MOST_GPU_RANKS = 8  # whose memories a kernel of kernels/gpu/ranks/lane.cu has
OWN_GROUP = 32  # weights of a group of the formats that experts are converted to


def ranked(
    config: EngineConfig, model: ModelConfig, machine: Machine, stored: StoredFormats, rank: int = 0
) -> tuple[EngineConfig, ModelConfig, Machine]:
    """Flags, model and machine that a rank is planned from. Raises ConfigError with one reason."""
    ranks = config.tensor_parallel_size
    if ranks == 1:
        return config, model, machine
    if why := _why_not(config, machine, ranks):
        raise ConfigError(f"--tensor-parallel-size {ranks}: {why}", fields=FIELD)
    own = (
        model if model.shard.ranks == ranks else cut(model, RankShard(rank, ranks), expert_unit(config, stored), stored)
    )
    config, machine = own_side(config, machine, rank)
    return config, own, machine


def own_side(config: EngineConfig, machine: Machine, rank: int = 0) -> tuple[EngineConfig, Machine]:
    """A rank's share of the threads that were asked for, and of what there is."""
    ranks, threads = config.tensor_parallel_size, config.kt_cpuinfer
    if ranks == 1 or len(machine.cores) < ranks:
        return config, machine
    machine = replace(machine, gpus=gpu_of_rank(machine, rank, ranks))
    if threads is not None:
        config = replace(config, kt_cpuinfer=max(1, threads // ranks))
    if config.kt_numa_nodes is not None and set(config.kt_numa_nodes) <= set(machine.nodes):
        machine = machine.on_nodes(config.kt_numa_nodes)
        config = replace(config, kt_numa_nodes=None)
    return config, machine.of_rank(rank, ranks)


def gpu_of_rank(machine: Machine, rank: int, ranks: int) -> tuple[Gpu, ...]:
    """The GPU of one rank, as if it had as much free memory as the one that has least: all ranks have one plan. ():
    there is none."""
    gpus = rank_gpus(machine, ranks)
    if len(gpus) < ranks:
        return ()
    no_nvlink = machine.links.no_nvlink(gpu.number for gpu in gpus)
    free = min(gpu.free_bytes for gpu in gpus) // (ranks if ranks_share_gpus() else 1)
    return (replace(gpus[rank], free_bytes=free, no_nvlink=no_nvlink),)


def _why_no_gpus(config: EngineConfig, machine: Machine, ranks: int) -> str:
    """Why these GPUs are not one for each rank; "": they are, or none is asked for."""
    if config.device == "cpu" or not machine.gpus:
        return ""
    gpus = rank_gpus(machine, ranks)
    if len(gpus) < ranks:
        count_text = "there is one" if len(gpus) == 1 else f"there are {len(gpus)}"
        return f"each rank needs a GPU, and {count_text}; leave --tp out, which uses one GPU, or add --device cpu"
    if ranks > MOST_GPU_RANKS:
        return f"sums between GPUs are of at most {MOST_GPU_RANKS} ranks; give fewer"
    if "cuda-core" in machine.gpu_missing:
        return "the package cuda-core is missing, which sums between GPUs need: pip install cuda-core cuda-bindings"
    if len(kinds_of(gpus)) > 1:
        names = " and ".join(sorted({gpu.name for gpu in gpus}))
        return (
            f"ranks compute equal parts with equal bits, on equal GPUs, not on {names}; choose equal ones with "
            "CUDA_VISIBLE_DEVICES, or leave --tp out, which uses one GPU"
        )
    return ""


def expert_unit(config: EngineConfig, stored: StoredFormats) -> int:
    """Weights of an expert's width that stay together, as they are loaded."""
    fmt = expert_format_of(config, stored)
    if fmt == STORED:
        return stored.experts.along
    return OWN_GROUP if fmt in ("int8", "int4") else 1


def _why_not(config: EngineConfig, machine: Machine, ranks: int) -> str:
    """Reason that so many ranks cannot run, and the way out; "": they can."""
    if why := _why_no_gpus(config, machine, ranks):
        return why
    if config.kt_max_deferred_experts_per_token and config.kt_enable_dynamic_expert_update:
        return (
            "an expert that moves would be deferred on one rank and not on another; leave "
            "--kt-max-deferred-experts-per-token or --kt-enable-dynamic-expert-update out"
        )
    if config.map_experts == "always":
        return "ranks hold parts of experts, which are no views of a file; leave --map-experts out"
    if len(machine.cores) < ranks:
        return f"this process may use {len(machine.cores)} cores, and each rank needs one"
    return ""


def decisions(ranks: int) -> list[Decision]:
    """The plan's line on ranks; [] for one rank."""
    if ranks == 1:
        return []
    return [Decision("ranks", str(ranks), "--tp; threads, memory and pages below are of each")]


def check_alone(config: EngineConfig) -> None:
    """Raises ConfigError where somebody else than a server is asked for ranks."""
    if config.tensor_parallel_size > 1:
        raise ConfigError(
            f"--tensor-parallel-size {config.tensor_parallel_size}: ranks are processes of `kt serve`; leave --tp out",
            fields=FIELD,
        )
