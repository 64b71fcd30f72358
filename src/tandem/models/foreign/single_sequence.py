"""`AloneModel`: one sequence at a time, with Transformers' own cache: for layers whose state Tandem does not hold."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tandem.architectures.foreign.hooks import answering
from tandem.errors import EngineError
from tandem.models.batch import ForwardBatch
from tandem.models.foreign.experts import ForeignExperts
from tandem.models.passing import States


class AloneModel:
    """Keeps the cache of the sequence that runs; one that begins at position 0 begins a new cache.

    Many recurrent layers of Transformers take several tokens only from an empty cache. So a prompt's chunks wait until
    logits are wanted, and then run at once; later ones run token by token.
    """

    def __init__(self, module: Any, experts: dict[int, ForeignExperts]) -> None:
        """experts: by id of the module that calls them."""
        self._module, self._experts = module, experts
        self._cache: Any = None
        self._done = 0  # tokens in the cache
        self._waiting: list[int] = []

    def forward(self, batch: ForwardBatch, states: States) -> Tensor:
        """As `Model.forward`, of one sequence. Raises EngineError for several, or where tokens are missing."""
        if len(batch.seq_lens) != 1:
            raise EngineError("this model runs one sequence at a time")
        self._begin(int(batch.positions[0]))
        before = len(self._waiting)
        self._waiting += batch.input_ids.tolist()
        if not len(batch.logits_rows):
            return torch.empty((0, self._module.config.get_text_config().vocab_size))
        tokens, self._waiting = self._waiting, []
        with answering(self):
            logits = self._run(tokens, batch.input_ids.device)
        return logits[before:][batch.logits_rows]

    def _begin(self, position: int) -> None:
        if position == 0:
            self._cache, self._done, self._waiting = None, 0, []
        elif position != self._done + len(self._waiting):
            raise EngineError(
                f"tokens {self._done + len(self._waiting)} … {position - 1} of a sequence are missing"
            )

    def _run(self, tokens: list[int], device: torch.device) -> Tensor:
        """float32 logits of every token."""
        pieces = [tokens] if self._cache is None else [[token] for token in tokens]
        return torch.cat([self._piece(piece, device) for piece in pieces])

    def _piece(self, tokens: list[int], device: torch.device) -> Tensor:
        positions = torch.arange(self._done, self._done + len(tokens), device=device)[None]
        out = self._module(
            input_ids=torch.tensor([tokens], device=device), position_ids=positions, use_cache=True,
            past_key_values=self._cache,
        )  # fmt: skip
        self._cache, self._done = out.past_key_values, self._done + len(tokens)
        logits: Tensor = out.logits[0].float()
        return logits

    # -- hooks: attention is Transformers' own ---

    def experts(self, module: Any, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return self._experts[id(module)](x, ids, weights)

    def attend(
        self, module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, arguments: dict[str, Any]
    ) -> Tensor:
        raise EngineError("attention of a model that runs alone is Transformers' own")

    def mask(self, arguments: dict[str, Any]) -> None: ...
