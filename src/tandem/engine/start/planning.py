"""The plan for a model, before a weight is loaded: on this machine or on another."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from tandem.checkpoint import (
    demo_dir,
    load_model_config,
    open_checkpoint,
    resolve_model,
    with_draft_config,
    with_experts,
)
from tandem.checkpoint.demo_text import CONFIG
from tandem.checkpoint.glance.from_names import formats_from_names
from tandem.config import EngineConfig, Machine, ModelConfig, Plan, StoredFormats, resolve
from tandem.config.in_place import stored_in
from tandem.config.memory import prefill_tokens
from tandem.config.plan import machine_refusals
from tandem.errors import ConfigError
from tandem.kernels.this_machine import this_machine


@dataclass(frozen=True, slots=True)
class Planned:
    """A model as it is stored, and what would be done with it."""

    model: ModelConfig
    stored: StoredFormats
    plan: Plan


def plan_of(config: EngineConfig) -> Plan:
    """What would be done with this model on this machine, without loading a weight.

    A directory without weights counts as what its config.json and index say. Raises ConfigError with every reason.
    """
    return planned(config, this_machine()).plan


def planned(config: EngineConfig, machine: Machine, path: Path | None = None) -> Planned:
    """As `plan_of`, for any machine. path: where the model's files are; None: where `config.model` says."""
    path = resolve_model(config.model) if path is None else path
    try:
        model = with_draft_config(model_at(path), config)
    except ConfigError as error:
        raise ConfigError(*error.reasons, *machine_refusals(config, machine)) from error
    try:
        stored = stored_at(path, model, config.kt_weight_path)
    except ConfigError as error:
        raise ConfigError(*error.reasons, *_other_refusals(config, machine, path, model)) from error
    return Planned(model, stored, resolve(config, model, machine, stored))


def _other_refusals(
    config: EngineConfig, machine: Machine, path: Path, model: ModelConfig
) -> tuple[str, ...]:
    """What else stands in the way, where the experts' own directory cannot be taken."""
    config = config.without(("kt_weight_path",))
    try:
        resolve(config, model, machine, stored_at(path, model, None))
    except ConfigError as error:
        return error.reasons
    return ()


def model_of(config: EngineConfig) -> ModelConfig:
    """What config.json says; the demo model need not have been built."""
    return with_draft_config(model_at(resolve_model(config.model)), config)


def model_at(path: Path) -> ModelConfig:
    built = path != demo_dir() or (path / "config.json").is_file()
    return load_model_config(path) if built else ModelConfig.from_dict(CONFIG)


def stored_at(path: Path, model: ModelConfig, experts: str | None) -> StoredFormats:
    """From the files' headers, or from names where the weights are not there. experts: --kt-weight-path."""
    if path.is_file() or any(path.glob("*.safetensors")):
        checkpoint = with_experts(open_checkpoint(path), experts, model)
        return stored_in(checkpoint.formats(), *checkpoint.expert_files())
    stored = formats_from_names(path, model) if (path / "config.json").is_file() else StoredFormats()
    if experts is None:
        return stored
    return replace(stored, experts=open_checkpoint(resolve_model(experts)).formats().experts)

def without_streams(config: EngineConfig, plan: Plan) -> Plan:
    """The same where experts turn out not to travel to the GPU: long steps would take seconds on the CPU."""
    asked = config.chunked_prefill_size is not None or config.max_prefill_tokens is not None
    most = max(prefill_tokens(on_gpu=True), plan.max_running_requests)
    if asked or plan.gpu is None or not plan.gpu.ring_bytes or plan.max_step_tokens <= most:
        return plan
    return replace(plan, max_step_tokens=most)
