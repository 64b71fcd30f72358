"""The plan for a model, before a weight is loaded: on this machine or on another."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from tandem.architectures.load import config_from_dict
from tandem.checkpoint import (
    demo_dir,
    load_model_config,
    open_checkpoint,
    resolve_model,
    with_draft_config,
    with_draft_layer,
    with_experts,
)
from tandem.checkpoint.demo_text import CONFIG
from tandem.checkpoint.metadata.from_names import IndexNames, formats_from_names
from tandem.checkpoint.overlay.drafts import draft_directory
from tandem.engine.expert_statistics import expert_placement
from tandem.errors import ConfigError
from tandem.flags.engine_config import EngineConfig
from tandem.kernels.this_machine import this_machine
from tandem.machine.machine import Machine
from tandem.models import with_stored_drafts, with_stored_tower
from tandem.planner.in_place import stored_in
from tandem.planner.memory import prefill_tokens
from tandem.planner.plan import Plan
from tandem.planner.resolve import machine_refusals, resolve
from tandem.planner.ways import choose_way
from tandem.spec.model_config import ModelConfig
from tandem.spec.stored import StoredFormat, StoredFormats
from tandem.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Planned:
    """A model as it is stored, and what would be done with it."""

    model: ModelConfig
    stored: StoredFormats
    plan: Plan


def plan_of(config: EngineConfig) -> Plan:
    """Plan for this model on this machine, without loading a weight.

    A directory without weights counts as what its config.json and index say. Raises ConfigError with every reason.
    """
    return planned(config, this_machine()).plan


def planned(config: EngineConfig, machine: Machine, path: Path | None = None) -> Planned:
    """As `plan_of`, for any machine, and for as many GPUs as a server would take. path: where the model's files are;
    None: where `config.model` says."""
    path = resolve_model(config.model) if path is None else path
    try:
        model = model_as_stored(path, config)
    except ConfigError as error:
        raise ConfigError(*error.reasons, *machine_refusals(config, machine)) from error
    try:
        stored = stored_at(path, model, config.kt_weight_path)
    except ConfigError as error:
        raise ConfigError(*error.reasons, *_other_refusals(config, machine, path, model)) from error
    choice = choose_way(config, model, machine, stored)
    plan = choice.told(resolve(choice.config, model, machine, stored))
    check_statistics(plan, model)
    return Planned(model, stored, plan)


def check_statistics(plan: Plan, model: ModelConfig) -> None:
    """Raises ConfigError where the file that places experts is no such file, or another model's."""
    if plan.gpu is not None and plan.gpu.statistics is not None:
        expert_placement(plan.gpu, model)


def check_tokenizer(config: EngineConfig) -> None:
    """Raises CheckpointError where a start would: the weights are there, and what reads text is not, or is damaged."""
    path = resolve_model(config.model)
    if path.exists() and has_weights(path):
        Tokenizer.load(path)


def model_as_stored(path: Path, config: EngineConfig) -> ModelConfig:
    """The model of config.json, without a draft layer that the files lack. Raises ConfigError if that is asked for."""
    model = with_draft_config(model_at(path), config)
    algorithm = config.speculative_algorithm
    if has_weights(path):
        checkpoint = with_draft_layer(open_checkpoint(path), config)
        return with_stored_tower(with_stored_drafts(model, checkpoint, algorithm), checkpoint)
    names = IndexNames.of(path)
    if not names.names:
        return model
    model = with_stored_tower(model, names)
    return with_stored_drafts(model, names, algorithm) if draft_directory(config) is None else model


def has_weights(path: Path) -> bool:
    """Whether more than the configuration is there."""
    return path.is_file() or any(path.glob("*.safetensors"))


def _other_refusals(
    config: EngineConfig, machine: Machine, path: Path, model: ModelConfig
) -> tuple[str, ...]:
    """Other reasons for a refusal, where the experts' own directory cannot be taken."""
    config = config.without(("kt_weight_path",))
    try:
        resolve(config, model, machine, stored_at(path, model, None))
    except ConfigError as error:
        return error.reasons
    return ()


def model_of(config: EngineConfig) -> ModelConfig:
    """Model config by config.json; the demo model need not have been built."""
    return with_draft_config(model_at(resolve_model(config.model)), config)


def model_at(path: Path) -> ModelConfig:
    built = path != demo_dir() or (path / "config.json").is_file()
    return load_model_config(path) if built else config_from_dict(CONFIG)


def stored_at(path: Path, model: ModelConfig, experts: str | None) -> StoredFormats:
    """From the files' headers, or from names where the weights are not there. experts: --kt-weight-path."""
    theirs = None if experts is None else resolve_model(experts)
    if has_weights(path) and (theirs is None or has_weights(theirs)):
        checkpoint = with_experts(open_checkpoint(path), experts, model)
        return stored_in(checkpoint.formats(), *checkpoint.expert_files())
    if theirs is not None:  # neither may be fetched yet, and where they are decides nothing then
        return replace(stored_at(path, model, None), experts=_stored_experts(theirs, model))
    return formats_from_names(path, model) if (path / "config.json").is_file() else StoredFormats()


def _stored_experts(path: Path, model: ModelConfig) -> StoredFormat:
    if path.is_dir() and (path / "config.json").is_file() and not has_weights(path):
        return stored_at(path, model, None).experts
    return open_checkpoint(path).formats().experts  # raises CheckpointError where nothing is there

def without_streams(config: EngineConfig, plan: Plan) -> Plan:
    """The same where experts cannot be streamed to the GPU after all: long steps would take seconds on the CPU."""
    explicit = config.chunked_prefill_size is not None or config.max_prefill_tokens is not None
    most = max(prefill_tokens(gpu=True), plan.max_running_requests)
    if explicit or plan.gpu is None or not plan.gpu.streams_experts or plan.max_step_tokens <= most:
        return plan
    return replace(plan, max_step_tokens=most)
