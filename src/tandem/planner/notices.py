"""Notices at start-up, in addition to the plan: flags, keys and GPUs that change nothing here, and why."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tandem.flags.engine_config import EngineConfig
from tandem.machine.gpus import Gpu, equals
from tandem.machine.machine import Machine
from tandem.planner.choices.expert_streaming import threshold_not_reached
from tandem.planner.choices.speculation import speculation_notices, why_one_token
from tandem.planner.cuda_graphs import GRAPH_FLAGS
from tandem.planner.gpu_plan import SHARE_FIELDS
from tandem.planner.stages.pool import gpus_of_stages
from tandem.spec.json_keys import DRAFT_LAYERS, TOWERS, VISION
from tandem.spec.model_config import ModelConfig, why_alone
from tandem.spec.state import page_tokens

HOW_FAST = "`kt plan` says how fast"


def notices(
    config: EngineConfig, model: ModelConfig, machine: Machine, gpu: Gpu | None, no_gpu: str
) -> list[str]:
    """gpu: the one that is used; no_gpu: why none is."""
    texts = [*config.notices(), *_unread(model), *_foreign(config, model), *_overridden(config), *_pages(config, model)]
    texts += [*speculation_notices(config, model), *_tables(config, model)]
    if gpu is None:
        return [*texts, *_idle_on_cpu(config, no_gpu)]
    return [*texts, *_idle_flags(config, model), *_idle_gpus(config, machine, gpu)]


def _unread(model: ModelConfig) -> Iterator[str]:
    possible = model.drafts is not None and model.drafter is None and not why_one_token(model)
    if possible and model.drafts is not None:
        name = "NEXTN" if model.drafts.block is None else "DSPARK"
        yield f"the checkpoint has a draft layer, which is not loaded; --speculative-algorithm {name} drafts with it"
    if model.draft:
        yield f"the checkpoint has {model.draft}, which stays in its files: each step decodes one token"
    for key in model.unread_keys:
        if key in DRAFT_LAYERS:
            yield f"config.json: {key}: the model's draft layers (MTP) are not loaded; each step decodes one token"
        elif key == VISION and model.tower is not None:
            continue  # the plan's line on images says what becomes of it
        elif key == VISION and model.blind:
            yield f"no images are read, text alone is served: {model.blind}"
        elif key in TOWERS:
            yield f"config.json: {key}: the part that reads images or sound is not loaded; text alone is served"
        else:
            yield f"config.json: {key} is not understood and has no effect"


def _foreign(config: EngineConfig, model: ModelConfig) -> Iterator[str]:
    if model.foreign is None:
        return
    reason = why_alone(model)
    how = "one sequence at a time, without shared prefixes" if reason else "with Tandem's attention"
    yield f"{model.model_type} runs through Transformers' modules, {how} and Tandem's experts"
    if reason:
        yield (
            f"{reason}; so each request waits for the one before, and its cache is planned as keys and values of "
            "every layer, which it may exceed"
        )
        if config.max_running_requests not in (None, 1):
            yield f"--max-running-requests {config.max_running_requests}: one runs at a time"


def _pages(config: EngineConfig, model: ModelConfig) -> Iterator[str]:
    page = page_tokens(model.states, config.page_size)
    if page != config.page_size and config.given_flags(("page_size",)):
        yield f"--page-size {config.page_size} becomes {page}: a page has whole entries, which stand for several tokens"


def _overridden(config: EngineConfig) -> Iterator[str]:
    """Flags that another flag makes meaningless, wherever the model runs."""
    most, chunk = config.max_prefill_tokens, config.chunked_prefill_size
    if most is not None and chunk is not None and 0 < chunk <= most:
        yield f"--max-prefill-tokens {most} changes nothing: --chunked-prefill-size {chunk} is not larger"


def _tables(config: EngineConfig, model: ModelConfig) -> Iterator[str]:
    if config.given_flags(("tables",)) and not model.tables:
        yield f"--tables {config.tables} changes nothing: the model has no tables that are read by row"


def _idle_on_cpu(config: EngineConfig, no_gpu: str) -> Iterator[str]:
    for flag in config.given_flags(GRAPH_FLAGS):
        yield f"{flag} changes nothing: the CPU engine has no CUDA graphs"
    if config.disable_expert_foresight:
        yield "--disable-expert-foresight changes nothing: foresight is for experts in CPU memory beside a GPU"
    if config.prefill_reserved_sms:
        yield f"--prefill-reserved-sms changes nothing: prompts are computed on the CPU ({no_gpu})"
    if config.attention_backend != "auto":
        yield (
            f"--attention-backend {config.attention_backend} changes nothing: on a CPU attention runs in Tandem's own "
            "kernel"
        )
    if config.kt_enable_dynamic_expert_update:
        yield f"--kt-enable-dynamic-expert-update changes nothing: there is no GPU to move to ({no_gpu})"
    if config.disable_dynamic_expert_update:
        yield f"--disable-dynamic-expert-update changes nothing: no expert is on a GPU ({no_gpu})"
    if config.kt_gpu_prefill_token_threshold:
        yield f"--kt-gpu-prefill-token-threshold changes nothing: there is no GPU to compute prompts ({no_gpu})"
    if config.record_kt_gpu_expert_distribution:
        yield "--record-kt-gpu-expert-distribution: no expert is on a GPU, so zeros are recorded"
    names = (*SHARE_FIELDS, "kt_expert_placement_strategy", "init_expert_location")
    for flag in config.given_flags(names):
        yield f"{flag} changes nothing: every expert is computed on the CPU ({no_gpu})"


def _idle_flags(config: EngineConfig, model: ModelConfig) -> Iterator[str]:
    if why := threshold_not_reached(config, model):
        yield f"{why}, so no prompt brings experts to the GPU: leave one of the flags out"
    strategy, experts = config.kt_expert_placement_strategy, model.moe.router.num_experts
    if config.init_expert_location != "trivial" and strategy != "frequency":
        yield (
            f"--init-expert-location changes nothing: --kt-expert-placement-strategy is {strategy}; "
            "only frequency reads statistics"
        )
    gpu_experts = config.kt_num_gpu_experts
    if config.kt_gpu_experts_ratio is not None:
        if gpu_experts is not None:
            yield "--kt-num-gpu-experts changes nothing: --kt-gpu-experts-ratio beats it"
    elif gpu_experts is not None and gpu_experts > experts:
        yield f"--kt-num-gpu-experts {gpu_experts}: the model has {experts} per layer, so all of them are meant"


def idle_gpus(gpus: Sequence[Gpu], why: str) -> str:
    """Which are not used, and why."""
    names = ", ".join(f"GPU {gpu.number} ({gpu.name})" for gpu in gpus)
    return f"{names} not used: {why}"


def _idle_gpus(config: EngineConfig, machine: Machine, used: Gpu) -> Iterator[str]:
    if config.pipeline_parallel_size > 1:
        yield from _beyond_stages(config, machine)
        return
    others = [gpu for gpu in machine.gpus if gpu is not used]
    equal = [gpu for gpu in others if equals(gpu, used)]
    if equal:
        yield idle_gpus(equal, f"one is used; --tensor-parallel-size 2 divides a model among equal GPUs, {HOW_FAST}")
    if unequal := [gpu for gpu in others if gpu not in equal]:
        why = f"one is used; --pipeline-parallel-size {len(machine.gpus)} gives unequal GPUs some layers each"
        yield idle_gpus(unequal, f"{why}, {HOW_FAST}")


def _beyond_stages(config: EngineConfig, machine: Machine) -> Iterator[str]:
    used = {gpu.number for gpu in gpus_of_stages(config, machine)}
    if others := [gpu for gpu in machine.gpus if gpu.number not in used]:
        yield idle_gpus(others, f"--pipeline-parallel-size {config.pipeline_parallel_size} uses {len(used)}")
