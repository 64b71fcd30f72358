"""`ScriptedRouting`: which experts tokens use, whatever routers choose; neighbours share as many as wished.

Routers of made-up weights choose for each token anew, so no row of a draft token would find its experts read already.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.errors import ConfigError
from tandem.models.batch import ForwardBatch
from tandem.spec.model_config import ModelConfig

TOKENS = 1024  # of a chain, which begins anew behind them
APART = 389  # tokens between the chains of sequences whose first pages are neighbours
WINDOWS = 64  # that are looked at to count distinct experts


def chains(layers: int, experts: int, top_k: int, overlap: float, tokens: int = TOKENS) -> Tensor:
    """int32 [tokens, layers, top_k]: of each token `overlap` of the experts are among those of the token before, on
    average; the others are drawn from all that it had not. Raises ConfigError."""
    if experts < 2 * top_k:
        raise ConfigError(
            f"--overlap needs twice as many experts as a token uses; there are {experts}, {top_k} used"
        )
    generator = torch.Generator().manual_seed(0)
    now = torch.rand(layers, experts, generator=generator).topk(top_k).indices
    steps = [now]
    for _ in range(tokens - 1):
        steps.append(now := _next(now, experts, overlap, generator))
    return torch.stack(steps).int()


def _next(before: Tensor, experts: int, overlap: float, generator: torch.Generator) -> Tensor:
    """Experts of the next token, [layers, top_k]."""
    layers, top_k = before.shape
    shuffled = before.gather(1, torch.rand(before.shape, generator=generator).argsort(1))
    new_experts = torch.rand(layers, experts, generator=generator).scatter_(1, before, -1.0).topk(top_k).indices
    repeats = (overlap * top_k + torch.rand(layers, 1, generator=generator)).floor()
    return torch.where(torch.arange(top_k) < repeats, shuffled, new_experts)


def distinct(chain: Tensor, rows: int) -> float:
    """Experts of a layer that so many neighbouring tokens use, on average."""
    starts = range(0, len(chain) - rows, max(1, (len(chain) - rows) // WINDOWS))
    windows = torch.stack([chain[start : start + rows].transpose(0, 1).flatten(1) for start in starts])
    ordered = windows.sort(-1).values
    return 1.0 + float((ordered.diff(dim=-1) != 0).sum(-1).float().mean())


class ScriptedRouting:
    """`chosen` int32 [MoE layers, rows, top_k] is filled before every step, inside graphs too: kernels read it."""

    def __init__(self, model: ModelConfig, overlap: float, most_rows: int) -> None:
        """A draft layer has a chain of its own."""
        drafter = model.drafter
        self._drafts = 0 if drafter is None else len(drafter.layers)
        self._block = 1 if drafter is None or drafter.block is None else drafter.block.size
        router, layers = model.moe.router, len(model.moe_layers) + self._drafts
        self.experts = router.num_experts
        self.chain = chains(layers, router.num_experts, router.top_k, overlap)
        self.chosen = self.chain[:1].transpose(0, 1).repeat(1, most_rows, 1)
        self._table = self.chain

    def move(self, device: torch.device) -> None:
        """Before the model is built."""
        self.chosen, self._table = self.chosen.to(device), self.chain.to(device)

    def begin(self, batch: ForwardBatch) -> None:
        rows = len(batch.input_ids)
        first_pages = batch.block_tables[:, 0].long()
        if len(first_pages) != rows:
            first_pages = first_pages.repeat_interleave(batch.query_starts.diff().long())
        places = (batch.positions + first_pages * APART) % len(self._table)
        self.chosen[:, :rows].copy_(self._table.index_select(0, places).transpose(0, 1))

    def begin_drafts(self, batch: ForwardBatch) -> None:
        """Chooses experts for draft layers' rows that draft; each sequence has one, or a block."""
        places = batch.positions[batch.logits_rows]
        offsets = torch.arange(len(places), device=places.device) * APART
        rows = (places + offsets)[:, None] + torch.arange(self._block, device=places.device)
        chosen = self._table[:, -self._drafts :].index_select(0, rows.flatten() % len(self._table))
        self.chosen[-self._drafts :, : len(chosen)].copy_(chosen.transpose(0, 1))

    def distinct(self, rows: float, sequences: int) -> float:
        """Experts of a layer that `sequences` use together, each with so many neighbouring rows."""
        whole = int(rows)
        low, high = (distinct(self.chain, max(1, n)) for n in (whole, whole + 1))
        one = low + (rows - whole) * (high - low)
        return float(self.experts * (1.0 - (1.0 - one / self.experts) ** sequences))
