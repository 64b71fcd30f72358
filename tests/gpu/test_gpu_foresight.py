"""Foresight from the router's kernels to the CPU's caches, without a GPU: a thread runs the model in Triton's
interpreter and plays the three CUDA kernels of the hand-off, while the CPU's end serves it as a graph's."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gpu import AVAILABLE, DEVICE, needs_triton
from plans import gpu_plan
from tandem import _core
from tandem.architectures.load import load_config
from tandem.checkpoint import open_checkpoint
from tandem.engine.state.arrays import allocate
from tandem.experts import mailbox as module
from tandem.experts.handoff import Handoff
from tandem.experts.handoff_counts import HandoffSizes, PrefetchCounts
from tandem.experts.mailbox_kernels import GAVE_UP
from tandem.experts.placement import place
from tandem.kernels.cpu_ops import CpuOps
from tandem.kernels.ops import Routing
from tandem.models import ForwardBatch, build
from tandem.planner.plan import Plan
from tiny import VOCAB

if AVAILABLE:
    from tandem.experts.hybrid_store import HybridStore
    from tandem.kernels.gpu.ops import GpuOps

pytestmark = [
    pytest.mark.gpu,
    needs_triton,
    pytest.mark.skipif(DEVICE.type == "cuda", reason="real kernels do it in test_gpu_engine.py"),
]
ROWS, PAGE, WORDS = 2, 16, 160
POSTED, LAYER, COUNT, DONE, HINTED, HINT_LAYER, HINT_IDS = 0, 1, 2, 32, 128, 129, 130
PATIENCE = 60.0


class PlayedMailbox(module.Mailbox):
    """The kernels, as the thread that calls them."""

    def __init__(self, sizes: HandoffSizes, layers: list[Any]) -> None:
        shape = sizes.mailbox_tokens, sizes.hidden, sizes.top_k
        *self._at, size = _core.mailbox_offsets(*shape)
        room = np.zeros(size + 128, dtype=np.uint8)
        self._memory = torch.from_numpy(room[-room.ctypes.data % 128 :][:size])
        self._words = self._memory.numpy()[: 4 * WORDS].view(np.uint32)
        self.core = _core.Mailbox(self._memory.numpy(), *shape)
        self.thread = _core.PostThread(self.core)
        for layer in layers:
            self.add(layer)
        self._sizes, self._patience, self._number = sizes, PATIENCE, 0
        self.posted, self.rows = [], None

    def _put(self, part: int, values: Tensor) -> None:
        data = values.contiguous().flatten().view(torch.uint8)
        self._memory[self._at[part] : self._at[part] + len(data)] = data

    def post(self, layer: int, x: Tensor, routing: Routing, slots: Tensor) -> None:
        for part, values in enumerate((x, torch.where(slots >= 0, -1, routing.ids), routing.weights)):
            self._put(part, values)
        self._number += 1
        self._words[LAYER], self._words[COUNT] = layer, len(x)
        self._words[POSTED] = self._number

    def prefetch(self, layer: int, routing: Routing) -> None:
        assert routing.slots is not None
        self._put(4, torch.where(routing.slots >= 0, -1, routing.ids).T)
        self._words[HINT_LAYER], self._words[HINT_IDS] = layer, routing.ids.numel()
        self._words[HINTED] = self._number

    def collect(self, tokens: int) -> Tensor:
        until = time.monotonic() + PATIENCE
        while self._words[DONE] != self._number:
            assert time.monotonic() < until and not self._words[GAVE_UP]
            time.sleep(1e-4)
        size = tokens * self._sizes.hidden * 4
        return self._memory[self._at[3] :][:size].view(torch.float32).view(tokens, -1).clone()


def decoded(path, share: float, foresight: bool) -> tuple[Tensor, PrefetchCounts]:
    """Logits of a first decode step."""
    config = load_config(path)
    experts = config.routed_experts
    plan = Plan(
        dtype="bfloat16", expert_format="bf16", tier="scalar", cpus=(-1, -1), context_length=32, page_size=PAGE,
        num_pages=ROWS, max_running_requests=ROWS, max_step_tokens=ROWS, radix_cache=False, fuse_shared_experts=True,
        gpu=gpu_plan(round(share * experts), (ROWS,), patience_seconds=PATIENCE),
    )  # fmt: skip
    ops = GpuOps(DEVICE, CpuOps(_core.WorkerPool([-1, -1]), "scalar"))
    router = config.moe.router
    placement = place("uniform", len(config.moe_layers), router.num_experts, round(share * experts), None)
    sizes = HandoffSizes(ROWS, ROWS, config.hidden, router.top_k + config.moe.fusible_shared)
    handoff = Handoff(sizes, DEVICE, PATIENCE, foresight)
    model = build(
        config, plan, open_checkpoint(path), ops, None, HybridStore(ops, placement, handoff, config.hidden)
    )
    handoff._mailbox = PlayedMailbox(sizes, list(handoff.layers))
    return run(model, handoff), handoff.hints()


def run(model: Any, handoff: Handoff) -> Tensor:
    states = allocate(model.config.state_layout("bfloat16", PAGE), ROWS).arrays
    rows, found = torch.arange(ROWS), list[Tensor]()
    batch = ForwardBatch(
        input_ids=rows * 31 % VOCAB, positions=rows * 0, cache_slots=rows * PAGE,
        query_starts=torch.arange(ROWS + 1, dtype=torch.int32), seq_lens=torch.ones(ROWS, dtype=torch.int32),
        block_tables=rows.int()[:, None], logits_rows=rows, slots=torch.zeros(ROWS, dtype=torch.int32),
    )  # fmt: skip

    def gpu() -> None:
        with torch.inference_mode(), handoff.recording():
            found.append(model.forward(batch, states))

    thread = threading.Thread(target=gpu)
    handoff.begin(len(model.config.moe_layers))
    thread.start()
    handoff.finish()
    thread.join(PATIENCE)
    return found[0]


@pytest.mark.parametrize("share", [0.0, 0.5])
@pytest.mark.parametrize("variant", ["qwen3_moe", "glm4_moe-plain"])
def test_what_is_foreseen_changes_no_bit(tiny_models, variant: str, share: float) -> None:
    (plainly, none), (ahead, hints) = (decoded(tiny_models[variant], share, on) for on in (False, True))
    assert torch.equal(plainly, ahead)
    assert none == PrefetchCounts()
    assert 0 < hints.hits <= hints.hinted and hints.nbytes > 0
