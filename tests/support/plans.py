"""A made-up model and made-up machines, and what `resolve` plans for them."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from tandem.flags.engine_config import EngineConfig
from tandem.machine.gpus import Gpu
from tandem.machine.machine import TIERS, Core, Machine
from tandem.mechanisms.dense.shape import Dense
from tandem.mechanisms.experts.shape import Experts, Moe
from tandem.mechanisms.grouped_query.shape import Gqa
from tandem.mechanisms.router.shape import Router
from tandem.planner.gpu_plan import GpuMemory, GpuPlan
from tandem.planner.memory import MemoryPlan
from tandem.planner.plan import Plan
from tandem.planner.resolve import resolve
from tandem.spec.layers import pre_norm
from tandem.spec.model_config import ModelConfig
from tandem.spec.norm import Norm
from tandem.spec.rope import Rope
from tandem.spec.stored import StoredFormat

GIB = 1 << 30
NORM = Norm(1e-5)
ATTENTION = Gqa(9, 3, 64, Rope(1e4, 32))
MOE = Moe(Router(num_experts=32, top_k=8), Experts(32, 192), Dense(192))


def model_of(moe: Moe) -> ModelConfig:
    layers = (pre_norm(ATTENTION, moe, NORM),) * 30
    return ModelConfig("glm4_moe", 576, 49152, layers, NORM, True, 8192)


MODEL = model_of(MOE)


def machine(cores: int = 4, nodes: int = 1, free: int = 16 * GIB, quota: float | None = None) -> Machine:
    per_node = cores // nodes
    made = tuple(Core(cpu, cpu // per_node, cpu // per_node) for cpu in range(cores))
    return Machine("Test CPU", made, TIERS[:2], 2 * free, free, quota)


def plan(machine: Machine, model: ModelConfig = MODEL, **flags: object) -> Plan:
    return resolve(EngineConfig(model="demo", **flags), model, machine)  # type: ignore[arg-type]


def gpu_plan(experts: int = 0, graph_sizes: tuple[int, ...] = (), **others: Any) -> GpuPlan:
    """A GPU's plan with so many experts and other fields, its own or of its memory, which is not counted."""
    sizes = {field.name: others.pop(field.name) for field in fields(GpuMemory) if field.name in others}
    memory = MemoryPlan(0, 0, 0, 0, "", "")
    own = {"name": "GPU", "placement": "uniform", "statistics": None, "patience_seconds": 1.0} | others
    division = GpuMemory(experts=experts, expert_reason="", memory=memory, **sizes)
    return GpuPlan(sizes=division, graph_sizes=graph_sizes, **own)


def reason(plan: Plan, name: str) -> str:
    return next(d.reason for d in plan.decisions if d.name == name)


INT4 = StoredFormat("int4 g32", True, 0.5625, ("RAWINT4", "INT4", "AMXINT4"), 32)


def with_gpu(free: int = 16 * GIB, missing: tuple[str, ...] = ()) -> Machine:
    return replace(machine(), gpus=(Gpu("H100", 2 * free, free, "gen5 x16"),), gpu_missing=missing)
