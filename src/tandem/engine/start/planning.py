"""The plan for a model on this machine, before a weight is loaded."""

from __future__ import annotations

from tandem.checkpoint import demo_dir, load_model_config, open_checkpoint, resolve_model, with_experts
from tandem.checkpoint.demo_text import CONFIG
from tandem.config import EngineConfig, ModelConfig, Plan, StoredFormats, resolve
from tandem.config.in_place import stored_in
from tandem.kernels.this_machine import this_machine


def plan_of(config: EngineConfig) -> Plan:
    """What would be done with this model on this machine, without loading a weight. A directory without weights counts
    as one of bfloat16 ones."""

    path, model = resolve_model(config.model), model_of(config)
    if not path.is_file() and not any(path.glob("*.safetensors")):
        return resolve(config, model, this_machine(), StoredFormats())
    checkpoint = with_experts(open_checkpoint(path), config.kt_weight_path, model)
    stored = stored_in(checkpoint.formats(), *checkpoint.expert_files())
    return resolve(config, model, this_machine(), stored)


def model_of(config: EngineConfig) -> ModelConfig:
    """What config.json says; the demo model need not have been built."""

    path = resolve_model(config.model)
    built = path != demo_dir() or (path / "config.json").is_file()
    return load_model_config(path) if built else ModelConfig.from_dict(CONFIG)
