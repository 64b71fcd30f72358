"""A host's GPU side: a share of the experts there, and posts to the CPU that nobody counts.

`kt serve` knows how many posts a step has. Another engine replays its graphs by itself, so a thread answers whatever is
posted until the process ends. Batches outside graphs are posted, too: nothing waits on the engine's thread.
"""

from __future__ import annotations

import logging
import os
import threading

import torch
from torch import Tensor

from tandem import _core
from tandem.backends.host import Host
from tandem.experts import ExpertStore
from tandem.experts.handoff import Handoff
from tandem.experts.handoff_counts import HandoffSizes
from tandem.experts.hybrid_experts import HybridExperts
from tandem.experts.hybrid_store import HybridStore
from tandem.experts.mailbox import Mailbox
from tandem.experts.placement import ExpertPlacement, load_counts, place
from tandem.flags.engine_config import EngineConfig
from tandem.kernels.cpu_ops import CpuOps
from tandem.kernels.gpu.ops import GpuOps
from tandem.kernels.ops import Routing
from tandem.spec.activation import SILU, Activation
from tandem.spec.model_config import ModelConfig

_log = logging.getLogger(__name__)
FAILED = 3  # exit status of an engine whose experts have failed


class PostingHandoff(Handoff):
    """Every batch goes through the mailbox, in graphs and outside. The first one, outside, begins the answers."""

    def post(self, layer: int, x: Tensor, routing: Routing, slots: Tensor) -> None:
        mailbox = self._answered()
        mailbox.posted = []  # numbers of graphs: nothing is late here, so all posts lie in the first half
        mailbox.post(layer, x, routing, slots)

    def collect(self, tokens: int) -> Tensor:
        return self._answered().collect(tokens)

    def _answered(self) -> Mailbox:
        if self._mailbox is None:
            self._mailbox = Mailbox(self.sizes, self.device, self._layers, self.patience_seconds)
            self._mailbox.thread.begin(_core.UNTIL_STOPPED, self.patience_seconds)
            threading.Thread(target=_watch, args=(self._mailbox,), name="tandem-watch", daemon=True).start()
        return self._mailbox


def _watch(mailbox: Mailbox) -> None:
    """Ends the process when answers fail: the GPU then goes on with sums that are no numbers, which
    must reach nobody."""
    try:
        mailbox.thread.finish()
    except Exception:
        _log.exception("the experts in CPU memory failed: this process ends")
        os._exit(FAILED)


class OwnHybrids:
    """A store of layers whose first experts are the engine's own, on its GPU: here they have slots, and no weights."""

    def __init__(self, cpu: CpuOps, hidden: int, skipped: int, handoff: Handoff) -> None:
        self._cpu, self._hidden, self._skipped, self._handoff = cpu, hidden, skipped, handoff

    def layer(self, index: int, count: int, width: int, fmt: str, activation: Activation = SILU) -> HybridExperts:
        own = torch.arange(count, dtype=torch.int32)
        packed = self._cpu.experts(count, self._hidden, width, fmt, activation, cpu_slots=count - self._skipped)
        return HybridExperts(torch.where(own < self._skipped, own, -1), None, packed, self._handoff)


def gpu_store(config: EngineConfig, model: ModelConfig, host: Host, cpu: CpuOps, gpu_experts: int) -> ExpertStore:
    """Where experts live beside a host's GPU. gpu_experts: (layer, expert) pairs there. Raises ConfigError for
    statistics of another model."""
    sizes = HandoffSizes(host.most_rows, host.most_rows, model.expert_channels, model.moe.router.top_k)
    handoff = PostingHandoff(sizes, host.device, host.patience_seconds, foresight=False)
    if host.skipped:
        return OwnHybrids(cpu, model.expert_channels, host.skipped, handoff)
    ops = GpuOps(torch.device(host.device.type, host.device.index or 0), cpu)
    return HybridStore(ops, _placement(config, model, gpu_experts), handoff, model.expert_channels)


def _placement(config: EngineConfig, model: ModelConfig, gpu_experts: int) -> ExpertPlacement:
    layers, experts, counts = len(model.moe_layers), model.moe.router.num_experts, None
    if config.init_expert_location != "trivial":
        counts = load_counts(config.init_expert_location, layers, experts, model.moe_layers, len(model.layers))
    return place(config.kt_expert_placement_strategy, layers, experts, gpu_experts, counts)
