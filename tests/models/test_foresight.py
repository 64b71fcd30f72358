"""Which experts a layer is asked about ahead of time. What they answer stays the same, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from tandem import _core
from tandem.architectures.load import load_config
from tandem.checkpoint import open_checkpoint
from tandem.engine.state.arrays import allocate
from tandem.experts import CpuExperts, RoutedExperts
from tandem.experts.handoff import Handoff
from tandem.experts.handoff_counts import HandoffSizes
from tandem.experts.hybrid_experts import HybridExperts
from tandem.kernels.cpu_ops import CpuOps
from tandem.kernels.ops import Routing
from tandem.models import ForwardBatch, Model, build
from tandem.models.foresight import operators
from tandem.models.layers import DecoderLayer
from tandem.planner.plan import Plan
from tiny import VOCAB

ROWS, PAGE = 3, 16


class ListeningExperts:
    """Takes hints, as those of a GPU do inside graphs, and notes what was hinted and what was asked."""

    slot_of = None

    def __init__(self, experts: RoutedExperts, heard: list[tuple[str, Tensor]], listens: bool = True) -> None:
        self._experts, self.heard, self.listens = experts, heard, listens

    def takes_predictions(self, rows: int) -> bool:
        return self.listens and rows == ROWS

    def prefetch(self, routing: Routing) -> None:
        self.heard.append(("hinted", routing.ids.clone()))

    def submit(self, x: Tensor, routing: Routing) -> Any:
        self.heard.append(("asked", routing.ids.clone()))
        return self._experts.submit(x, routing)

    def wait(self, ticket: Any) -> Tensor:
        self.heard.append(("waited", torch.empty(0)))
        return self._experts.wait(ticket)


class Silent(ListeningExperts):
    """Adds nothing to the residual stream."""

    def wait(self, ticket: Any) -> Tensor:
        return torch.zeros_like(super().wait(ticket))


def made(path, kind: type[ListeningExperts] | None = None) -> tuple[Model, list[tuple[str, Tensor]]]:
    plan = Plan(
        dtype="bfloat16", expert_format="bf16", tier="scalar", cpus=(-1,), context_length=32, page_size=PAGE,
        num_pages=ROWS, max_running_requests=ROWS, max_step_tokens=ROWS, radix_cache=False, fuse_shared_experts=True,
    )  # fmt: skip
    ops = CpuOps(_core.WorkerPool([-1]), "scalar")
    model, heard = build(load_config(path), plan, open_checkpoint(path), ops), []
    for layer in model.layers if kind is not None else []:
        if layer.moe is not None:
            layer.moe.experts = cast(Any, kind(layer.moe.experts, heard))
    return model, heard


def logits(model: Model, rows: int = ROWS, *, chunk: bool = False) -> Tensor:
    """chunk: of one sequence, as a token and draft tokens behind it are; else each of its own."""
    states = allocate(model.config.state_layout("bfloat16", PAGE), ROWS, slots=1 + ROWS).arrays
    each, alone = torch.arange(rows), torch.zeros(rows, dtype=torch.int64)
    batch = ForwardBatch(
        input_ids=each * 31 % VOCAB, positions=each if chunk else alone, cache_slots=each if chunk else each * PAGE,
        query_starts=torch.tensor([0, rows] if chunk else range(rows + 1), dtype=torch.int32),
        seq_lens=torch.tensor([rows] if chunk else [1] * rows, dtype=torch.int32),
        block_tables=torch.arange(1 if chunk else rows, dtype=torch.int32)[:, None], logits_rows=each,
        slots=1 + torch.arange(1 if chunk else rows, dtype=torch.int32),
    )  # fmt: skip
    with torch.inference_mode():
        return model.forward(batch, states).clone()


@pytest.mark.parametrize("chunk", [False, True], ids=["sequences", "draft_tokens"])
@pytest.mark.parametrize("variant", ["qwen3_moe", "glm4_moe-plain", "mixtral"])
def test_every_next_layer_is_asked_between_submit_and_wait(tiny_models, variant, chunk: bool) -> None:
    model, heard = made(tiny_models[variant], ListeningExperts)
    assert torch.equal(logits(model, chunk=chunk), logits(made(tiny_models[variant])[0], chunk=chunk))
    assert [what for what, _ in heard] == ["asked", "hinted", "waited"] * 2 + ["asked", "waited"]
    top_k = model.config.moe.router.top_k  # shared experts are never hinted
    assert all(ids.shape == (ROWS, top_k) for what, ids in heard if what == "hinted")


def without_attention(layer: DecoderLayer) -> DecoderLayer:
    attention, *others = layer.blocks
    return DecoderLayer((replace(attention, operator=cast(Any, Nothing())), *others))


@pytest.mark.parametrize("variant", ["qwen3_moe", "glm4_moe-plain"])
def test_where_layers_add_nothing_hints_are_right(tiny_models, variant) -> None:
    model, heard = made(tiny_models[variant], Silent)
    first, *others = model.layers
    model.layers = [first, *map(without_attention, others)]
    model._operators = operators(model.layers)
    for layer in model.layers:
        cast(Any, layer.blocks[1].operator).shared = None
    logits(model)
    top_k, ids = model.config.moe.router.top_k, [ids for what, ids in heard if what != "waited"]
    _, prefetch, second, another, third = ids
    assert torch.equal(prefetch, second[:, :top_k]) and torch.equal(another, third[:, :top_k])
    assert not torch.equal(prefetch, another)  # each says something about its layer


class Nothing:
    def __call__(self, x: Tensor, batch: ForwardBatch, pages: Any) -> Tensor:
        return torch.zeros_like(x)

    def reads(self) -> list[Any]:
        return []


@pytest.mark.parametrize("variant", ["glm4_moe", "deepseek_v2", "deepseek_v3"])
def test_groups_of_experts_are_asked(tiny_models, variant) -> None:
    """The first layer is dense, the last one has nobody behind it."""
    model, heard = made(tiny_models[variant], ListeningExperts)
    assert torch.equal(logits(model), logits(made(tiny_models[variant])[0]))
    assert [what for what, _ in heard] == ["asked", "hinted", "waited", "asked", "waited"]


@pytest.mark.parametrize("variant", ["kimi_linear", "bailing_hybrid", "glm5_next", "qwen4_exp"])
def test_layers_with_streams_and_memories_are_asked(tiny_models, variant) -> None:
    model, heard = made(tiny_models[variant], ListeningExperts)
    assert torch.equal(logits(model), logits(made(tiny_models[variant])[0]))
    top_k = model.config.moe.router.top_k
    hinted = [ids for what, ids in heard if what == "hinted"]
    assert hinted and all(ids.shape == (ROWS, top_k) for ids in hinted)


@pytest.mark.parametrize("variant", ["qwen2_moe", "qwen2_moe-window"])
def test_dense_neighbours_are_not_asked(tiny_models, variant) -> None:
    """Every second layer is dense."""
    model, heard = made(tiny_models[variant], ListeningExperts)
    assert torch.equal(logits(model), logits(made(tiny_models[variant])[0]))
    assert heard and "hinted" not in [what for what, _ in heard]


def test_who_does_not_listen_is_not_asked(tiny_models) -> None:
    model, heard = made(tiny_models["qwen3_moe"], ListeningExperts)
    logits(model, ROWS - 1)
    assert heard and "hinted" not in [what for what, _ in heard]
    assert not any(
        layer.moe.experts.takes_predictions(1)
        for layer in made(tiny_models["qwen3_moe"])[0].layers
        if layer.moe is not None and isinstance(layer.moe.experts, CpuExperts)
    )


@pytest.mark.parametrize(
    ("on_cpu", "rows", "takes"), [(16, 1, True), (0, 4, False), (4, 1, True), (3, 1, False), (3, 2, True)]
)
def test_a_layer_with_next_to_nothing_on_the_cpu_takes_no_hints(on_cpu: int, rows: int, takes: bool) -> None:
    """3 of 16 are chosen: 0.75 of a row where 4 are in CPU memory."""
    handoff = Handoff(HandoffSizes(4, 4, 48, 3), torch.device("cpu"), 1.0)
    slots = torch.arange(16, dtype=torch.int32) - on_cpu
    cpu = CpuOps(_core.WorkerPool([-1]), "scalar").experts(16, 48, 32) if on_cpu else None
    experts = HybridExperts(slots.clamp(min=-1), None, cpu, handoff)
    assert not experts.takes_predictions(rows)
    with handoff.rehearsing():
        assert experts.takes_predictions(rows) == takes


@pytest.mark.parametrize(("on_cpu", "takes"), [(5, False), (6, True)])
def test_shared_experts_are_not_among_those_a_router_may_choose(on_cpu: int, takes: bool) -> None:
    """2 of 16 are chosen: 0.75 of a row where 6 are in CPU memory; with a shared one counted it would be 3 of 17."""
    handoff = Handoff(HandoffSizes(4, 4, 48, 3), torch.device("cpu"), 1.0)
    slots = torch.arange(17, dtype=torch.int32) - on_cpu
    cpu = CpuOps(_core.WorkerPool([-1]), "scalar").experts(17, 48, 32, cpu_slots=on_cpu)
    experts = HybridExperts(slots.clamp(min=-1), None, cpu, handoff, shared=1)
    with handoff.rehearsing():
        assert experts.takes_predictions(1) == takes
