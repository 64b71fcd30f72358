"""`gpu_choices`: every choice that only a GPU asks for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tandem.errors import ConfigError
from tandem.flags.engine_config import EngineConfig
from tandem.machine.gpus import Gpu
from tandem.planner.attention_backend import attention_backend
from tandem.planner.choices.decision import Decision, Decisions
from tandem.planner.choices.deferral import deferred_experts
from tandem.planner.cuda_graphs import captured_sizes, graph_reason, plain_graph_sizes
from tandem.planner.gpu_plan import MAX_PATIENCE_SECONDS, GpuMemory, GpuPlan
from tandem.planner.memory import MemoryRequest
from tandem.planner.sizing import size_gpu
from tandem.planner.stages.chunks import chunks_at_once
from tandem.planner.stages.sized import in_stages
from tandem.spec.activation import SILU
from tandem.spec.gpu_scratch import HOPPER
from tandem.spec.model_config import ModelConfig, draft_experts


def gpu_choices(request: MemoryRequest, gpu: Gpu) -> tuple[GpuPlan, Decisions]:
    """The GPU's memory and its use, with reasons. Raises GpuTooSmall, ConfigError."""
    config, model = request.config, request.model
    sizes, stages, about_stages = in_stages(request, size_gpu(request, gpu))
    chunks, about_chunks = chunks_at_once(model, sizes.experts) if stages else (1, ())
    some = 0 < sizes.experts < model.routed_experts
    graphs, about_graphs = _graphs(request, sizes)
    sizes = sizes if graphs else replace(sizes, prompt_sizes=())
    reserved_sms, about_prompts = _prompt_graphs(config, sizes)
    statistics = statistics_file(config, some)
    attention, why_attention = attention_backend(config, model.attentions, request.machine)
    live, why_live = sizes.exchange_bytes > 0, sizes.exchange_reason
    deferred, why_deferred = deferred_experts(config, model, sizes.experts, graphs)
    threshold, foresight = config.kt_gpu_prefill_token_threshold, not config.disable_expert_foresight
    plan = GpuPlan(
        name=gpu.name,
        sizes=sizes,
        placement=config.kt_expert_placement_strategy,
        statistics=statistics,
        graph_sizes=graphs,
        patience_seconds=min(MAX_PATIENCE_SECONDS, config.watchdog_timeout / 3),
        live=live,
        uuid=gpu.uuid,
        no_nvlink=gpu.no_nvlink,
        attention=attention,
        foresight=foresight,
        stream_from=threshold if sizes.ring_bytes else 0,
        deferred=deferred,
        plain_graph_sizes=_plain_graphs(request) if graphs else (),
        reserved_sms=reserved_sms,
        embedding_in_ram=request.embedding_in_ram,
        stages=stages,
        pipelined_chunks=chunks,
        has_wgmma=gpu.capability == HOPPER and _ends_in_plain_silu(model),
    )
    most_deferred = f"up to {deferred} of a token's {model.moe.router.top_k}"
    lines = (
        *(*about_stages, *about_chunks, *_places(request, sizes), *about_graphs, *about_prompts),
        Decision("attention", attention, why_attention),
        *_if(some or config.kt_enable_dynamic_expert_update, "live placement", "on" if live else "off", why_live),
        *([_streaming(threshold, sizes.ring_reason)] if sizes.experts < model.routed_experts else []),
        *_if(deferred > 0, "deferred experts", most_deferred, why_deferred),
        *_if(not foresight, "expert foresight", "off", "--disable-expert-foresight"),
    )
    return plan, lines


def _ends_in_plain_silu(model: ModelConfig) -> bool:
    """True where products of whole warpgroups end in the experts' activation (`products.ran_by_warpgroups`)."""
    return model.moe.experts.activation == SILU and model.expert_bias_bytes == 0


def _if(shown: bool, name: str, value: str, reason: str) -> Decisions:
    return (Decision(name, value, reason),) if shown else ()


def _places(request: MemoryRequest, sizes: GpuMemory) -> Decisions:
    """Where experts are."""
    everyone, strategy = request.model.routed_experts, request.config.kt_expert_placement_strategy
    drafts = "GPU" if sizes.draft_experts else "CPU memory"
    return (
        Decision("GPU experts", f"{sizes.experts} of {everyone}", sizes.expert_reason),
        *_if(0 < sizes.experts < everyone, "placement", strategy, _why_placed(request.config)),
        *_if(draft_experts(request.model) > 0, "draft experts", drafts, "all or none, after those asked for"),
    )


def _why_placed(config: EngineConfig) -> str:
    flag = "--kt-expert-placement-strategy"
    if config.given_flags(("kt_expert_placement_strategy",)):
        return flag
    return f"default: as many of each layer; {flag} frequency takes those that are used most"


def _graphs(request: MemoryRequest, memory: GpuMemory) -> tuple[tuple[int, ...], Decisions]:
    """Rows of steps that are CUDA graphs."""
    config, model, running = request.config, request.model, request.max_running_requests
    sizes = captured_sizes(config, model, running, request.draft_tokens, request.step_tokens)
    why = graph_reason(config, model, running)
    whole = memory.experts == model.routed_experts and (memory.draft_experts or not draft_experts(model))
    if sizes and not whole and "cuda-core" in request.machine.gpu_missing:
        sizes, why = (), "the package cuda-core is missing, which experts in CPU memory need inside graphs"
    return sizes, (Decision("CUDA graphs", ", ".join(map(str, sizes)) or "off", why),)


def _plain_graphs(request: MemoryRequest) -> tuple[int, ...]:
    return plain_graph_sizes(
        request.config, request.model, request.max_running_requests, request.draft_tokens
    )


def _prompt_graphs(config: EngineConfig, sizes: GpuMemory) -> tuple[int, Decisions]:
    """Multiprocessors that graphs of prompts leave to steps."""
    rows, wanted_sms = ", ".join(map(str, sizes.prompt_sizes)), config.prefill_reserved_sms
    reserved_sms = wanted_sms if sizes.prompt_sizes else 0
    why = "--prefill-reserved-sms" if reserved_sms else "prompts are not CUDA graphs here"
    return reserved_sms, (
        *_if(rows != "", "prompt graphs", f"{rows} rows", "Python takes longer to start kernels than they run"),
        *_if(wanted_sms > 0, "reserved multiprocessors", str(reserved_sms), why),
    )


def statistics_file(config: EngineConfig, needed: bool) -> str | None:
    """The file that says which experts are used most. Raises ConfigError where the strategy lacks it."""
    file = None if config.init_expert_location == "trivial" else config.init_expert_location
    if config.kt_expert_placement_strategy != "frequency":
        return None
    fields = ("kt_expert_placement_strategy", "init_expert_location")
    if file is None and needed:
        raise ConfigError(
            "--kt-expert-placement-strategy frequency needs activation statistics: give --init-expert-location FILE, "
            "which /dump_expert_distribution_record writes, or take uniform",
            fields=fields,
        )
    if file is not None and not Path(file).expanduser().is_file():
        raise ConfigError(
            f"--init-expert-location {file} does not exist; give a file of statistics", fields=fields
        )
    return file


def _streaming(threshold: int | None, why_not: str) -> Decision:
    """The plan's line on streaming experts from CPU memory. threshold: rows of a step; None: as measured."""
    if why_not:
        return Decision("streamed experts", "off", why_not)
    if threshold is None:
        why = "copied to the GPU for long prompts where that is faster, as measured at the start"
        return Decision("streamed experts", "on", why)
    return Decision("streamed experts", f"from {threshold} rows", "--kt-gpu-prefill-token-threshold")
