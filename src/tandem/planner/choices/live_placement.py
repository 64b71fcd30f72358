"""`live_placement`: experts change places while the model serves where that was asked for, or where it pays."""

from __future__ import annotations

from tandem.errors import ConfigError
from tandem.flags.engine_config import EngineConfig
from tandem.planner.choices.left_to_ram import expert_bytes, ram_budget, ram_needed
from tandem.planner.gpu_plan import GpuMemory
from tandem.planner.memory import MemoryRequest
from tandem.spec.gpu_scratch import EXCHANGE_BYTES

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


def live_placement(request: MemoryRequest, memory: GpuMemory) -> tuple[bool, str]:
    """True where experts move while serving; and the reason, for it or against it."""
    config, model = request.config, request.model
    if config.disable_dynamic_expert_update:
        return False, OFF
    if memory.experts == 0:
        return False, "no expert is on the GPU, so there is no slot to move into"
    if memory.experts >= model.routed_experts:
        return False, "every expert is on the GPU already"
    if config.kt_enable_dynamic_expert_update:
        return True, f"{ON}; {LAST_BITS}"
    if why := _why_still(request, memory):
        return False, why
    return True, f"where it pays; {LAST_BITS}"


def _why_still(request: MemoryRequest, memory: GpuMemory) -> str:
    """Reason that experts stay where nobody asked for moving; "": they may move."""
    if request.config.enable_deterministic_inference:
        return "--enable-deterministic-inference: an expert's side decides its last bits"
    if request.experts_in_place:
        return "experts are used where the checkpoint has them"
    if request.config.packed_cache is not None and memory.ring_bytes == 0:  # else they are copied anyway
        return "experts are used where --packed-cache has them"
    if request.model.shard.ranks > 1:
        return "each rank would move its own experts, and all wait for the slowest"
    if request.config.pipeline_parallel_size > 1:
        return "experts do not move between stages' memories yet"
    if "cuda-core" in request.machine.gpu_missing:
        return "the package cuda-core is missing"
    if 2 * expert_bytes(request) > EXCHANGE_BYTES:
        return f"two of its experts do not fit {EXCHANGE_BYTES >> 20} MiB of GPU memory, on their way there"
    needed = ram_needed(request, memory.experts, memory.draft_experts, live=True)
    if not request.spare_places or needed > ram_budget(request):
        return "CPU memory has no room for a spare place in each layer"
    return ""
