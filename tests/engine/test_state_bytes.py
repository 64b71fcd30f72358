"""What plans say that states take, beside what is allocated for them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from plans import GIB, machine, with_gpu
from tandem.architectures.load import load_config
from tandem.bench.architectures import CONFIGS, named_config
from tandem.engine.state.arrays import allocate
from tandem.flags.engine_config import EngineConfig
from tandem.machine.machine import Machine
from tandem.planner.choices.cached import cached_as
from tandem.planner.choices.speculation import drafting
from tandem.planner.resolve import resolve
from tandem.spec.model_config import ModelConfig
from tandem.spec.state import Pages
from tiny import VARIANTS

ROOM = 4096 * GIB
HOST = replace(machine(free=ROOM), total_memory=ROOM)
ON_GPU = replace(HOST, gpus=with_gpu(2048 * GIB).gpus)
SHARE = 0.01


def taken(model: ModelConfig, where: Machine, **flags: object) -> tuple[int, int]:
    """Bytes as planned, and as allocated: zeros that take no memory before they are used."""
    config = EngineConfig.from_keywords("m", **{"max_total_tokens": 2000, "max_running_requests": 3} | flags)
    plan = resolve(config, model, where)
    entries = {entry.name: entry.nbytes for entry in plan.ledgers[0].entries}
    layout = cached_as(config, drafting(config, model)).state_layout(plan.dtype, plan.page_size, plan.draft_tokens)
    made = allocate(layout, plan.num_pages, None, plan.num_slots, plan.num_window_pages)
    pages = [rows for state, rows in zip(layout.states, made.arrays, strict=True) if isinstance(state, Pages)]
    allocated = made.slots.nbytes + sum(array.nbytes for rows in pages for array in rows)
    return entries.get("KV cache", 0) + entries.get("states", 0), allocated


@pytest.mark.parametrize("where", [HOST, ON_GPU], ids=["cpu", "gpu"])
@pytest.mark.parametrize("flags", [{}, {"speculative_algorithm": "NGRAM"}, {"max_total_tokens": 40000}], ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_states_of_named_models_take_what_is_planned(name: str, flags: dict[str, object], where: Machine) -> None:
    config = {"context_length": 2000, "chunked_prefill_size": 128}
    planned, allocated = taken(named_config(name, None), where, **config | flags)
    assert planned == pytest.approx(allocated, rel=SHARE)


@pytest.mark.parametrize("variant", VARIANTS)
def test_states_of_every_family_take_what_is_planned(variant: str, tiny_models) -> None:
    planned, allocated = taken(load_config(tiny_models[variant]), HOST)
    assert planned == pytest.approx(allocated, rel=SHARE)


def test_a_draft_layers_states_take_what_is_planned() -> None:
    for name in ("deepseek-v3", "deepseek-v4-flash", "deepseek-v4-flash-0731", "glm-4.5-air"):
        planned, allocated = taken(named_config(name, None), HOST, speculative_algorithm="NEXTN", context_length=2000)
        assert planned == pytest.approx(allocated, rel=SHARE)
