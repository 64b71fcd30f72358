"""Where Transformers' modules call ours: its registries of attention, of masks and of experts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Protocol

from torch import Tensor

from tandem.errors import EngineError

NAME = "tandem"  # of our entry in each registry


class Hooks(Protocol):
    """Callbacks that a module of Transformers reaches while it runs."""

    def attend(
        self, module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, arguments: dict[str, Any]
    ) -> Tensor:
        """q [1, H, T, D], k [1, G, T, D], v [1, G, T, E] of the new tokens -> [1, T, H, E]. mask: what `mask` gave."""
        ...

    def mask(self, arguments: dict[str, Any]) -> Any:
        """Mask that `attend` gets, from the arguments of Transformers' mask functions."""
        ...

    def experts(self, module: Any, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """x [T, hidden], ids and weights [T, k] -> [T, hidden]."""
        ...


_answering: list[Hooks] = []


@contextmanager
def answering(hooks: Hooks) -> Iterator[None]:
    """Meanwhile `hooks` are called, in this thread's models; the innermost ones where several are given."""
    _answering.append(hooks)
    try:
        yield
    finally:
        _answering.pop()


@cache
def register() -> None:
    """Our entries. They do nothing until a model's configuration names them."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.moe import ExpertsInterface

    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _mask)
    ExpertsInterface.register(NAME, _experts)


def _current() -> Hooks:
    if not _answering:
        raise EngineError(
            "a module of Transformers ran outside a step: its attention and experts are Tandem's"
        )
    return _answering[-1]


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    **arguments: Any,
) -> tuple[Tensor, None]:
    return _current().attend(module, query, key, value, attention_mask, arguments), None


def _mask(*_: Any, **arguments: Any) -> Any:
    return _current().mask(arguments)


def _experts(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    return _current().experts(module, hidden_states, top_k_index, top_k_weights)
