"""`ModelRunner`: runs a step's chunks through the model."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from typing import Protocol

import torch
from torch import Tensor

from tandem.engine.batch_arrays import BatchArrays
from tandem.engine.sampling.logits import HostLogits
from tandem.engine.sequence import Chunk
from tandem.experts.usage.expert_usage import ExpertUsage
from tandem.models.batch import ForwardBatch


class KVLayout(Protocol):
    @property
    def layers(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def one_tensor(self) -> bool: ...


class KVModel(Protocol):
    """What the engine needs of a model."""

    @property
    def kv_layout(self) -> KVLayout: ...

    def forward(self, batch: ForwardBatch, kv: Rows[tuple[Tensor, Tensor]]) -> Tensor:
        """float32 logits [len(batch.logits_rows), vocab]."""
        ...


class ModelRunner:
    """Runs the model where this process computes."""

    def __init__(
        self,
        model: KVModel,
        layers: list[tuple[Tensor, Tensor]],
        *,
        page_size: int,
        max_step_tokens: int,
        usage: ExpertUsage | None = None,
    ) -> None:
        self._model, self._layers, self._usage = model, layers, usage
        self._arrays = BatchArrays(page_size, max_step_tokens)

    def run(self, chunks: Rows[Chunk]) -> HostLogits:
        """Logits rows of all chunks, in order; valid until the model runs again."""
        batch = self._arrays.fill(chunks)
        with torch.inference_mode():
            if self._usage is not None:
                self._usage.begin(len(batch.input_ids))
            logits = self._model.forward(batch, self._layers)
            return HostLogits(logits.to(device="cpu", dtype=torch.float32).numpy())

    def after_failure(self) -> None:
        """Nothing that a step leaves behind keeps the next one from working."""
