"""`live_placement`: experts change places while the model serves where that was asked for, or where it pays."""

from __future__ import annotations

from tandem.errors import ConfigError
from tandem.flags.engine_config import EngineConfig
from tandem.planner.choices.left_to_ram import expert_bytes, ram_budget, ram_needed
from tandem.planner.memory import MemoryRequest
from tandem.spec.gpu_scratch import EXCHANGE_BYTES

WHERE_IT_PAYS = False  # whether experts move where neither flag is given and nothing speaks against it
ON, OFF = "--kt-enable-dynamic-expert-update", "--disable-dynamic-expert-update"
LAST_BITS = (
    "an expert's side decides its last bits, so the same request may end otherwise later; "
    "--enable-deterministic-inference and --disable-dynamic-expert-update keep experts still"
)


def check_wish(config: EngineConfig) -> None:
    """Raises ConfigError where both flags are given."""
    if config.kt_enable_dynamic_expert_update and config.disable_dynamic_expert_update:
        fields = ("kt_enable_dynamic_expert_update", "disable_dynamic_expert_update")
        raise ConfigError(f"{ON} and {OFF} are opposites; leave one of the two out", fields=fields)


def live_placement(request: MemoryRequest, gpu_experts: int, drafts_there: bool) -> tuple[bool, str]:
    """Whether experts move while serving, and why (not). drafts_there: a draft layer's experts are on the GPU."""
    config, model = request.config, request.model
    if config.disable_dynamic_expert_update:
        return False, OFF
    if not config.kt_enable_dynamic_expert_update and not WHERE_IT_PAYS:
        return False, f"{ON} is not given"
    if gpu_experts == 0:
        return False, "no expert is on the GPU, so there is no slot to move into"
    if gpu_experts >= model.routed_experts:
        return False, "every expert is on the GPU already"
    if config.kt_enable_dynamic_expert_update:
        return True, f"{ON}; {LAST_BITS}"
    if why := _why_still(request, gpu_experts, drafts_there):
        return False, why
    return True, f"where it pays; {LAST_BITS}"


def _why_still(request: MemoryRequest, gpu_experts: int, drafts_there: bool) -> str:
    """Reason that experts stay where nobody asked for moving; "": they may move."""
    if request.config.enable_deterministic_inference:
        return "--enable-deterministic-inference: an expert's side decides its last bits"
    if request.experts_in_place:
        return "experts are used where the checkpoint has them"
    if request.model.shard.ranks > 1:
        return "ranks would have to move experts in the same step"
    if request.config.pipeline_parallel_size > 1:
        return "experts do not move between stages' memories yet"
    if "cuda-core" in request.machine.gpu_missing:
        return "the package cuda-core is missing"
    if 2 * expert_bytes(request) > EXCHANGE_BYTES:
        return f"two of its experts do not fit {EXCHANGE_BYTES >> 20} MiB of GPU memory, on their way there"
    if ram_needed(request, gpu_experts, drafts_there, live=True) > ram_budget(request):
        return "CPU memory has no room for a spare place in each layer"
    return ""
