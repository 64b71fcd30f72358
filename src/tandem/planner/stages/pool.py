"""`pool_of`: the GPUs that `--pipeline-parallel-size` asks for, as one that has the memory of all, or why not."""

from __future__ import annotations

from dataclasses import replace

from tandem.errors import ConfigError
from tandem.flags.engine_config import EngineConfig
from tandem.flags.env import ranks_share_gpus
from tandem.machine.gpus import Gpu, is_new_enough
from tandem.machine.machine import Machine
from tandem.mechanisms.cost import cost_of
from tandem.spec.model_config import ModelConfig

FIELD = ("pipeline_parallel_size",)


def gpus_of_stages(config: EngineConfig, machine: Machine) -> tuple[Gpu, ...]:
    """One for each stage, in the machine's order; (): there are fewer. Tests let stages share one."""
    count, gpus = config.pipeline_parallel_size, tuple(filter(is_new_enough, machine.gpus))
    if gpus and ranks_share_gpus():
        each = -(-count // len(gpus))
        return tuple(
            replace(gpus[number % len(gpus)], free_bytes=gpus[number % len(gpus)].free_bytes // each)
            for number in range(count)
        )
    return gpus[:count] if len(gpus) >= count else ()


def pool_of(config: EngineConfig, model: ModelConfig, machine: Machine) -> Gpu | None:
    """All of them as one, with kernels for the smallest; None: one GPU is asked for. Raises ConfigError."""
    count = config.pipeline_parallel_size
    if count == 1:
        return None
    gpus = gpus_of_stages(config, machine)
    if why := _why_no_gpus(config, machine, gpus) or _why_not(config, model):
        raise ConfigError(f"--pipeline-parallel-size {count}: {why}", fields=FIELD)
    known = [gpu.capability for gpu in gpus if gpu.capability is not None]
    return replace(
        gpus[0], name=_name(gpus), uuid="", capability=min(known, default=None),
        free_bytes=sum(gpu.free_bytes for gpu in gpus), memory_bytes=min(gpu.memory_bytes for gpu in gpus),
    )  # fmt: skip


def _name(gpus: tuple[Gpu, ...]) -> str:
    names = [gpu.name for gpu in gpus]
    return f"{len(names)} × {names[0]}" if len(set(names)) == 1 else " + ".join(names)


def _why_no_gpus(config: EngineConfig, machine: Machine, gpus: tuple[Gpu, ...]) -> str:
    if config.tensor_parallel_size > 1:
        return "ranks have no stages yet; leave --tp out, or this flag"
    if config.device == "cpu":
        return "stages are on GPUs; leave --device cpu out, or this flag"
    if not gpus:
        count = len([gpu for gpu in machine.gpus if is_new_enough(gpu)])
        text = {0: "there is none", 1: "there is one"}.get(count, f"there are {count}")
        return f"each stage needs a GPU, and {text}; give as many, or leave it out"
    return ""


def _why_not(config: EngineConfig, model: ModelConfig) -> str:
    """Reason that stages cannot do it yet, and the way out; "": nothing of it is wanted."""
    if config.pipeline_parallel_size > len(model.layers):
        return f"the model has {len(model.layers)} layers; give at most that"
    for flag, (wish, why) in _missing(config).items():
        if wish:
            return f"{why}; leave {flag} out"
    return _why_no_model(model)


def _missing(config: EngineConfig) -> dict[str, tuple[object, str]]:
    """Flags whose work one GPU alone does, and why."""
    attention = config.attention_backend not in ("auto", "triton")
    strategy = config.kt_expert_placement_strategy != "uniform"
    return {
        "--speculative-algorithm": (config.speculative_algorithm, "stages compute no draft tokens yet"),
        "--kt-enable-dynamic-expert-update": (
            config.kt_enable_dynamic_expert_update, "experts do not move between stages' memories yet"
        ),
        "--kt-max-deferred-experts-per-token": (
            config.kt_max_deferred_experts_per_token, "experts are not deferred across stages"
        ),
        "--kt-expert-placement-strategy": (strategy, "stages are planned for as many experts in each layer"),
        "--enable-deterministic-inference": (
            config.enable_deterministic_inference, "the same bits in every batch were not shown for stages"
        ),
        "--prefill-reserved-sms": (config.prefill_reserved_sms, "prompts of stages do not run beside steps"),
        "--attention-backend": (attention, "stages attend by Triton's kernels"),
        "--packed-cache": (config.packed_cache, "stages keep no packed experts yet"),
    }  # fmt: skip


def _why_no_model(model: ModelConfig) -> str:
    if model.foreign is not None:
        return "a model that runs through Transformers' modules is not divided; leave it out"
    if any(layer.hyper is not None for layer in model.layers):
        return "several residual streams are not carried between GPUs yet; leave it out"
    if any(cost_of(mixer).chosen_by is not None for mixer in model.mixers):
        return "layers take the tokens that others chose, which are not carried between GPUs yet; leave it out"
    return ""
