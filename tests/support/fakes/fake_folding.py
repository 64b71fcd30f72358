"""A fake model that also keeps a slot of each sequence: a running hash, of which a wrong copy changes every answer."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from fake_model import FakeModel, FakeTokenizer, fake_config, fake_plan
from tandem.engine.engine import Engine
from tandem.engine.start.parts import EngineParts
from tandem.spec.layers import Block, Layer
from tandem.spec.model_config import ModelConfig
from tandem.spec.norm import Norm
from tandem.spec.state import Array, Fold, Pages

PRIME = 1_000_003


class FoldingBody:
    """Declares what a body of the model would."""

    def states(self) -> tuple[Pages | Fold, ...]:
        return (
            Pages((Array("k", (1, 1)), Array("v", (1, 1)))),
            Fold((Array("hash", (2,), "float32"), Array("length", (1,)))),
        )

    def params(self, hidden: int) -> int:
        return 0


def folding_config() -> ModelConfig:
    return replace(fake_config(), layers=(Layer((Block(FoldingBody(), Norm(1e-6)),)),))


def folded(tokens: list[int]) -> tuple[float, float]:
    """Two numbers below 2^24, so that float32 holds them exactly."""
    low = high = 1
    for token in tokens:
        low, high = (low * 31 + token + 1) % 65_521, (high * 17 + low) % 65_519
    return float(low), float(high)


class FoldingModel(FakeModel):
    """Checks that each sequence's slot says what its tokens so far have become, then folds the new ones in."""

    def forward(self, batch, states) -> torch.Tensor:
        (k_pages, v_pages), (hashes, lengths) = states
        starts = batch.query_starts.tolist()
        for s, slot in enumerate(batch.slots.tolist()):
            rows = slice(starts[s], starts[s + 1])
            before = int(batch.positions[starts[s]])
            assert slot > 0, "a sequence without a slot"
            known = [] if before == 0 else self._known(batch, k_pages, s, before)
            if before:
                assert int(lengths[slot, 0]) == before, "the slot is of another length"
                assert tuple(hashes[slot].tolist()) == folded(known), "the slot is of other tokens"
            hashes[slot] = torch.tensor(folded(known + batch.input_ids[rows].tolist()))
            lengths[slot, 0] = before + rows.stop - rows.start
        return super().forward(batch, [(k_pages, v_pages)])

    def _known(self, batch, k_pages, s: int, before: int) -> list[int]:
        page_size = k_pages.shape[1]
        pages = batch.block_tables[s, : -(-before // page_size)].long()
        return k_pages[pages].flatten()[:before].numpy().astype(np.int64).tolist()


def folding_engine(**plan) -> Engine:
    """num_slots: as the planner would, where the caller does not say."""
    running, cached = plan.get("max_running_requests", 8), plan.get("radix_cache", True)
    plan = {"num_slots": 1 + running * (3 if cached else 1)} | plan
    model, tokenizer = FoldingModel(), FakeTokenizer()
    engine = Engine.from_parts(EngineParts(fake_plan(**plan), folding_config(), model, tokenizer))
    return engine
