"""Image input: whether it is read, and the plan's line on it."""

from __future__ import annotations

from dataclasses import replace

from tandem.flags.engine_config import EngineConfig
from tandem.machine.machine import Machine
from tandem.planner.choices.decision import Decision
from tandem.planner.plan import Plan
from tandem.planner.vision_costs import image_seconds, image_tokens, pixel_bytes
from tandem.spec.model_config import ModelConfig

FLAG = "--disable-vision"
TEXT_ONLY = "this model reads text only"


def seeing(config: EngineConfig, model: ModelConfig) -> ModelConfig:
    """With its tower, where that is loaded."""
    return model if why_blind(config, model) else replace(model, vision=model.tower)


def why_blind(config: EngineConfig, model: ModelConfig) -> str:
    """Why no image is read; "": they are."""
    if model.tower is None:
        return model.blind or TEXT_ONLY
    if config.disable_vision:
        return f"{FLAG} was given"
    if config.tensor_parallel_size > 1:
        return "ranks read no images yet; leave --tp out"
    if config.pipeline_parallel_size > 1:
        return "stages read no images yet; leave --pipeline-parallel-size out"
    return ""


def with_images(plan: Plan, config: EngineConfig, model: ModelConfig, machine: Machine) -> Plan:
    """The plan, with what it says of images. model: of `seeing`."""
    blind, tower = why_blind(config, model), model.vision
    if model.tower is None:
        return replace(plan, blind=blind)
    if tower is None:
        return replace(plan, blind=blind, decisions=(*plan.decisions, Decision("images", "not read", blind)))
    tokens = image_tokens(config, tower, plan.gpu is not None)
    where, gpu = ("CPU", "") if plan.gpu is None else ("GPU", plan.gpu.name)
    seconds = image_seconds(tower, plan.tier, len(plan.cpus), gpu)
    reason = f"the tower is on the {where}, and takes about {seconds:.2g} s for a megapixel"
    decision = Decision("images", f"{tokens} tokens each at most", reason)
    pixels = pixel_bytes(machine.available_memory)
    return replace(plan, image_tokens=tokens, image_pixel_bytes=pixels, decisions=(*plan.decisions, decision))
