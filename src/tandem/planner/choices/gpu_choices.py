"""`gpu_choices`: every choice that only a GPU asks for."""

from __future__ import annotations

from pathlib import Path

from tandem.errors import ConfigError
from tandem.flags.engine_config import EngineConfig
from tandem.machine.gpus import Gpu
from tandem.planner.attention_backend import attention_backend
from tandem.planner.choices.decision import Decision
from tandem.planner.choices.deferral import deferred_experts
from tandem.planner.choices.live_placement import live_placement
from tandem.planner.cuda_graphs import captured_sizes, graph_reason, plain_graph_sizes
from tandem.planner.gpu_plan import MAX_PATIENCE_SECONDS, GpuPlan
from tandem.planner.memory import MemoryPlan, MemoryRequest
from tandem.planner.sizing import size_gpu
from tandem.planner.stages.chunks import chunks_at_once
from tandem.planner.stages.sized import in_stages
from tandem.spec.model_config import draft_experts


def gpu_choices(request: MemoryRequest, gpu: Gpu, log: list[Decision]) -> tuple[MemoryPlan, GpuPlan]:
    """Plan the GPU's memory and its use; the reasons go to `log`. Raises GpuTooSmall, ConfigError."""
    config, model = request.config, request.model
    m, stages = in_stages(request, size_gpu(request, gpu), log)
    everyone = model.routed_experts
    pipelined_chunks = chunks_at_once(model, m.experts, log) if stages else 1
    log.append(Decision("GPU experts", f"{m.experts} of {everyone}", m.expert_reason))
    if 0 < m.experts < everyone:
        log.append(
            Decision("placement", config.kt_expert_placement_strategy, "--kt-expert-placement-strategy")
        )
    running, gpu_drafts = request.max_running_requests, m.draft_experts or not draft_experts(model)
    if draft_experts(model):
        where = "GPU" if gpu_drafts else "CPU memory"
        log.append(Decision("draft experts", where, "all or none, after those asked for"))
    sizes = captured_sizes(config, model, running, request.draft_tokens)
    why = graph_reason(config, model, running)
    if sizes and not (gpu_drafts and m.experts == everyone) and "cuda-core" in request.machine.gpu_missing:
        sizes, why = (), "the package cuda-core is missing, which experts in CPU memory need inside graphs"
    log.append(Decision("CUDA graphs", ", ".join(map(str, sizes)) or "off", why))
    if m.prompt_sizes and sizes:
        rows = ", ".join(map(str, m.prompt_sizes))
        log.append(Decision("prompt graphs", f"{rows} rows", "Python takes longer to start kernels than they run"))
    reserved_sms = config.prefill_reserved_sms if m.prompt_sizes and sizes else 0
    if config.prefill_reserved_sms:
        why = "--prefill-reserved-sms" if reserved_sms else "prompts are not CUDA graphs here"
        log.append(Decision("reserved multiprocessors", str(reserved_sms), why))
    statistics = statistics_file(config, 0 < m.experts < everyone)
    kernels, origin = attention_backend(config, model.attentions, request.machine)
    log.append(Decision("attention", kernels, origin))
    patience = min(MAX_PATIENCE_SECONDS, config.watchdog_timeout / 3)
    strategy, foresight = config.kt_expert_placement_strategy, not config.disable_expert_foresight
    live, reason = live_placement(request, m.experts, bool(m.draft_experts))
    if config.kt_enable_dynamic_expert_update or 0 < m.experts < everyone:
        log.append(Decision("live placement", "on" if live else "off", reason))
    threshold = config.kt_gpu_prefill_token_threshold
    if m.experts < everyone:
        log.append(_streaming(threshold, m.ring_reason))
    deferred, why_late = deferred_experts(config, model, m.experts, sizes)
    if deferred:
        log.append(Decision("late experts", f"up to {deferred} of a token's {model.moe.router.top_k}", why_late))
    if not foresight:
        log.append(Decision("expert foresight", "off", "--disable-expert-foresight"))
    return m.memory, GpuPlan(
        gpu.name, m.experts, strategy, statistics, sizes, patience, live, gpu.uuid, kernels, foresight,
        threshold if m.ring_bytes else 0, m.ring_bytes, deferred, m.prompt_sizes if sizes else (), m.draft_experts,
        plain_graph_sizes(config, model, running, request.draft_tokens) if sizes else (), reserved_sms,
        m.step_tokens, m.step_reason, m.shared_tokens, request.embedding_in_ram, m.cramped, stages,
        pipelined_chunks,
    )  # fmt: skip


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
        return Decision("streamed experts", "on", "in steps where that is faster, as measured at the start")
    return Decision("streamed experts", f"from {threshold} rows", "--kt-gpu-prefill-token-threshold")
