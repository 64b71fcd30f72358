"""Bytes of tensors that live at a time, on any device."""

from __future__ import annotations

from typing import Any
from weakref import finalize

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts what PyTorch allocates inside of it. most: bytes that lived at once, at most."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.most = self._live = 0
        self._known = set[int]()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        before = {self._key(tensor) for tensor in _tensors((args, kwargs))}
        result = func(*args, **kwargs or {})
        for tensor in _tensors(result):
            if self._key(tensor) not in before | self._known:
                self._add(tensor.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, nbytes = storage._cdata, storage.nbytes()
        self._known.add(key)
        self._live += nbytes
        self.most = max(self.most, self._live)
        finalize(storage, self._forget, key, nbytes)

    def _forget(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self._live -= nbytes

    @staticmethod
    def _key(tensor: torch.Tensor) -> int:
        return tensor.untyped_storage()._cdata


def _tensors(values: Any) -> list[torch.Tensor]:
    return [each for each in tree_leaves(values) if isinstance(each, torch.Tensor)]
