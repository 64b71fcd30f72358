"""Deferred experts against their definition in float64: which pairs are deferred, a stack of layers, whole models, and
the hand-off of graphs with the kernels played by a thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from sessions import Session, plan, prompts
from tandem import _core
from tandem.architectures.load import load_config
from tandem.checkpoint import open_checkpoint
from tandem.engine.state.arrays import allocate
from tandem.experts import CpuExperts, RoutedExperts
from tandem.experts import mailbox as module
from tandem.experts.deferral import Deferral, DeferredExperts, DeferredSum, who_defers
from tandem.experts.feed import feed_of
from tandem.experts.handoff import Handoff
from tandem.experts.handoff_counts import HandoffSizes
from tandem.experts.hybrid_experts import HybridExperts
from tandem.kernels.cpu import PackedExperts
from tandem.kernels.cpu_ops import CpuOps
from tandem.kernels.ops import Ops, Routing
from tandem.kernels.reference import TorchOps
from tandem.models import ForwardBatch, build
from tandem.spec.activation import SILU, Activation
from tiny import VOCAB, file_tensors

EXPERTS, HIDDEN, WIDTH, TOKENS = 7, 24, 16, 5


def deferred_by_hand(weights: list[float], slots: list[int], kept: int, routed: int) -> list[bool]:
    """Whoever has `kept` stronger ones before it, one pair after the other."""
    found = []
    for k, weight in enumerate(weights):
        stronger = [w > weight or (w == weight and i < k) for i, w in enumerate(weights[:routed])]
        found.append(k < routed and sum(stronger) >= kept and slots[k] < 0)
    return found


@pytest.mark.parametrize("shared", [0, 2])
@pytest.mark.parametrize("most", [0, 1, 2, 4])
def test_the_weakest_in_cpu_memory_are_late(most: int, shared: int) -> None:
    """Weights are few numbers, so that many are equal."""
    routed, generator = 4, torch.Generator().manual_seed(most)
    weights = torch.randint(3, (200, routed + shared), generator=generator).float()
    slots = torch.randint(-1, 2, weights.shape, generator=generator, dtype=torch.int32)
    ids = torch.arange(routed + shared, dtype=torch.int32).expand(weights.shape)
    deferred = Deferral(routed - most, routed).deferred_mask(Routing(ids, weights, slots))
    rows = zip(weights.tolist(), slots.tolist(), strict=True)
    assert deferred.tolist() == [deferred_by_hand(*row, routed - most, routed) for row in rows]
    assert deferred.sum(1).max() == most


def test_who_defers() -> None:
    assert who_defers([True, True, True]) == [True, True, False]
    assert who_defers([True, False, True, True]) == [False, False, True, False]
    assert who_defers([]) == []


# -- layers and models ---


def silu_mlp(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    g = x @ gate.double().T
    return (g * torch.sigmoid(g) * (x @ up.double().T)) @ down.double().T


def layer_by_hand(
    x: Tensor, matrices: list[Any], routing: Routing, kept: int, due: Tensor | None
) -> tuple[Tensor, Tensor]:
    """In float64, a pair at a time: what this layer gives, and what it owes."""
    total, owed = torch.zeros_like(x), torch.zeros_like(x)
    for t in range(len(x)):
        weights = routing.weights[t].double()
        deferred = deferred_by_hand(weights.tolist(), [-1] * len(weights), kept, len(weights))
        for k, expert in enumerate(routing.ids[t].tolist()):
            y = weights[k] * silu_mlp(x[t], *matrices[expert])
            (owed if deferred[k] else total)[t] += y
    return total if due is None else total + due, owed


def test_layers_one_after_the_other_add_what_is_late() -> None:
    torch.manual_seed(0)
    due, owed = DeferredSum(), None
    for layer in range(4):
        matrices = [(torch.randn(WIDTH, HIDDEN), torch.randn(WIDTH, HIDDEN), torch.randn(HIDDEN, WIDTH))
                    for _ in range(EXPERTS)]  # fmt: skip
        inner = CpuExperts(TorchOps().experts(EXPERTS, HIDDEN, WIDTH, "f32"))
        experts = DeferredExperts(inner, Deferral(1, 3) if layer < 3 else None, due)
        experts.load(feed_of(EXPERTS, lambda expert, m=matrices: m[expert]))
        ids = torch.stack([torch.randperm(EXPERTS)[:3] for _ in range(TOKENS)]).int()
        x, routing = torch.randn(TOKENS, HIDDEN), Routing(ids, torch.rand(TOKENS, 3))
        got = experts.wait(experts.submit(x, routing))
        expected, owed = layer_by_hand(x.double(), matrices, routing, 1 if layer < 3 else 3, owed)
        # 3 experts of sums over 24 and 16 products in float32: some 2^-24 * sqrt(2 * 24 * 16) of the size each.
        assert (got - expected).abs().max() < 1e-5 * expected.abs().max()
    assert due.sum is None and owed is not None and owed.eq(0).all()


def with_deferred_experts(session: Session, most: int) -> Session:
    """As `kt quality` does it, all experts in CPU memory."""
    layers, due = [layer.moe for layer in session.model.layers if layer.moe is not None], DeferredSum()
    top_k = session.config.moe.router.top_k
    for moe, defers in zip(layers, who_defers([True] * len(layers)), strict=True):
        moe.experts = DeferredExperts(moe.experts, Deferral(top_k - most, top_k) if defers else None, due)
    return session


class ByHand(torch.nn.Module):
    """A MoE block of Transformers' Qwen3 in float64, from the checkpoint's own tensors."""

    def __init__(self, tensors: dict[str, Tensor], prefix: str, top_k: int, kept: int, owed: list[Any]) -> None:
        super().__init__()
        self.router = tensors[f"{prefix}gate.weight"].double()
        names = ("gate_proj", "up_proj", "down_proj")
        self.matrices = [[tensors[f"{prefix}experts.{e}.{name}.weight"] for name in names]
                         for e in range(len(self.router))]  # fmt: skip
        self.top_k, self.kept, self.owed = top_k, kept, owed

    def forward(self, hidden: Tensor) -> Tensor:
        x = hidden.flatten(0, 1)
        weights, ids = (x @ self.router.T).softmax(-1).topk(self.top_k)
        weights = weights / weights.sum(-1, keepdim=True)
        got, self.owed[0] = layer_by_hand(x, self.matrices, Routing(ids, weights), self.kept, self.owed[0])
        return got.view_as(hidden)


def exact_logits(path: Path, most: int) -> list[Tensor]:
    """Of Transformers' attention and norms with our own blocks, in float64."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, attn_implementation="eager")
    config, tensors, owed = load_config(path), file_tensors(path), [None]
    top_k, last = config.moe.router.top_k, config.moe_layers[-1]
    for index in config.moe_layers:
        kept = top_k if index == last else top_k - most
        prefix = f"model.layers.{index}.mlp."
        model.model.layers[index].mlp = ByHand(tensors, prefix, top_k, kept, owed)
    found = []
    for prompt in prompts():
        owed[0] = None
        with torch.inference_mode():
            found.append(model(torch.tensor([prompt])).logits[0].double())
    return found


VARIANTS = ["qwen3_moe", "qwen3_moe-gpu"]  # the second has a dense layer between its two with experts


@pytest.mark.parametrize("ops", [TorchOps(), CpuOps(_core.WorkerPool([-1, -1]), "scalar")], ids=["torch", "core"])
@pytest.mark.parametrize("most", [1, 3])
@pytest.mark.parametrize("variant", VARIANTS)
def test_models_equal_the_definition(tiny_models: Any, variant: str, most: int, ops: Ops) -> None:
    """The tolerance is the one of models without deferred experts (`test_models.py`)."""
    path = tiny_models[variant]
    session = with_deferred_experts(Session(path, ops=ops), most)
    got = [session.step([(s, prompt)])[0] for s, prompt in enumerate(prompts())]
    expected, plain = exact_logits(path, most), exact_logits(path, 0)
    for ours, exact, usual in zip(got, expected, plain, strict=True):
        assert (ours - exact).abs().max() < 1e-4 * exact.abs().max()
        assert (exact - usual).abs().max() > 1e-2 * exact.abs().max()


# -- graphs' hand-off ---


class PlayedMailbox(module.Mailbox):
    """The kernels, as the thread that calls them."""

    def __init__(self, sizes: HandoffSizes, layers: list[PackedExperts]) -> None:
        shape = (sizes.mailbox_tokens, sizes.hidden, sizes.top_k, sizes.deferred)
        *self._at, size = _core.mailbox_offsets(*shape)
        room = np.zeros(size + 128, dtype=np.uint8)
        self._memory = torch.from_numpy(room[-room.ctypes.data % 128 :][:size])
        self._words = self._memory.numpy()[:640].view(np.uint32)
        self.core = _core.Mailbox(self._memory.numpy(), *shape)
        self.thread = _core.PostThread(self.core)
        for layer in layers:
            self.add(layer)
        self._sizes, self._patience, self._number = sizes, 20.0, 0
        self.posted, self.rows = [], None

    def post(self, layer: int, x: Tensor, routing: Routing, slots: Tensor) -> None:
        half = self._half(len(self.posted))
        for part, values in enumerate((x, torch.where(slots >= 0, -1, routing.ids), routing.weights)):
            data = values.contiguous().flatten().view(torch.uint8)
            self._memory[self._at[part] + half :][: len(data)] = data
        self._number += 1
        self._words[1], self._words[2] = layer, len(x)
        self._words[3] = _core.SECOND_HALF if len(self.posted) % 2 else 0
        self._words[0] = self._number
        self.posted.append(layer)

    def prefetch(self, layer: int, routing: Routing) -> None:
        data = routing.ids.T.contiguous().flatten().view(torch.uint8)
        self._memory[self._at[4] :][: len(data)] = data
        self._words[129], self._words[130] = layer, routing.ids.numel()
        self._words[128] = self._number

    def collect(self, tokens: int) -> Tensor:
        until = time.monotonic() + 20
        while self._words[32] != self._number:
            assert time.monotonic() < until and not self._words[64]
            time.sleep(1e-4)
        size = tokens * self._sizes.hidden * 4
        first = self._at[3] + self._half(len(self.posted) - 1)
        return self._memory[first:][:size].view(torch.float32).view(tokens, -1).clone()


@dataclass
class AllOnCpu:
    """An `ExpertStore` of hybrids without a GPU."""

    ops: CpuOps
    handoff: Handoff
    layers: list[HybridExperts]

    def layer(self, index: int, count: int, width: int, fmt: str, activation: Activation = SILU) -> RoutedExperts:
        cpu = self.ops.experts(count, self.handoff.sizes.hidden, width, fmt, activation)
        slots = torch.full((count,), -1, dtype=torch.int32)
        self.layers.append(HybridExperts(slots, None, cpu, self.handoff))
        return self.layers[-1]


def first_step(model: Any, rows: int) -> tuple[ForwardBatch, Any]:
    states = allocate(model.config.state_layout("bfloat16", 16), rows).arrays
    each = torch.arange(rows)
    batch = ForwardBatch(
        input_ids=each * 31 % VOCAB, positions=each * 0, cache_slots=each * 16,
        query_starts=torch.arange(rows + 1, dtype=torch.int32), seq_lens=torch.ones(rows, dtype=torch.int32),
        block_tables=each.int()[:, None], logits_rows=each, slots=torch.zeros(rows, dtype=torch.int32),
    )  # fmt: skip
    return batch, states


def plainly(path: Path, most: int, rows: int, dtype: str) -> Tensor:
    """`DeferredExperts` in plain torch."""
    session = with_deferred_experts(Session(path, dtype), most) if most else Session(path, dtype)
    batch, _ = first_step(session.model, rows)
    states = allocate(session.config.state_layout(dtype, 16), rows).arrays
    with torch.inference_mode():
        return session.model.forward(batch, states)


def through_the_mailbox(path: Path, most: int, rows: int, steps: int = 1) -> Tensor:
    """The same step `steps` times; the last one's logits, bfloat16."""
    config, ops = load_config(path), CpuOps(_core.WorkerPool([-1, -1]), "scalar")
    sizes = HandoffSizes(rows, rows, config.hidden, config.moe.router.top_k, deferred=True)
    handoff, layers = Handoff(sizes, torch.device("cpu"), 20.0), list[HybridExperts]()
    model = build(config, plan("bfloat16"), open_checkpoint(path), ops, None, AllOnCpu(ops, handoff, layers))
    handoff._mailbox = mailbox = PlayedMailbox(sizes, list(handoff.layers))
    for experts, defers in zip(layers, who_defers([True] * len(layers)), strict=True):
        if defers:
            experts.defer(most)
    for number, deferral in handoff._deferring.items():
        mailbox.defer(number, deferral)
    batch, states = first_step(model, rows)
    for _ in range(steps):
        found = play(handoff, len(layers), lambda: model.forward(batch, states))
    return found


def play(handoff: Handoff, posts: int, step: Callable[[], Tensor]) -> Tensor:
    """A graph's replay: the kernels in a thread, the CPU's end here."""
    found = list[Tensor]()

    def gpu() -> None:
        with torch.inference_mode(), handoff.recording() as posted:
            found.append(step())
            assert len(posted) == posts

    thread = threading.Thread(target=gpu)
    handoff.begin(posts)
    thread.start()
    handoff.finish()
    thread.join()
    return found[0]


@pytest.mark.parametrize("steps", [1, 3])  # three layers: the second step begins with the other half's number
@pytest.mark.parametrize(("most", "rows"), [(0, 2), (1, 1), (2, 4), (3, 4)])
@pytest.mark.parametrize("variant", VARIANTS)
def test_graphs_add_deferred_experts_as_the_definition_says(
    tiny_models: Any, variant: str, most: int, rows: int, steps: int
) -> None:
    """The tolerance is what bfloat16 costs plain torch, half as much again, since rounding points differ."""
    path = tiny_models[variant]
    exact, theirs = plainly(path, most, rows, "float32"), plainly(path, most, rows, "bfloat16")
    ours = through_the_mailbox(path, most, rows, steps)
    allowed = 1.5 * float((theirs - exact).pow(2).mean().sqrt())
    assert float((ours - exact).pow(2).mean().sqrt()) < allowed
    if most:
        usual = plainly(path, 0, rows, "float32")
        assert float((usual - exact).pow(2).mean().sqrt()) > 2 * allowed  # else this would see nothing
