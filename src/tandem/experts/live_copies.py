"""`Copies`: how bytes get from pinned CPU memory to the GPU and back beside the GPU's steps; `CudaCopies` does it."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Mark(Protocol):
    """A point in the order of copies."""

    def passed(self) -> bool:
        """Whether every copy given before it has arrived. Raises what has gone wrong with one."""
        ...


class Copies(Protocol):
    """Uploads keep their order, downloads keep theirs, and each waits for nothing but `follow`. All memory is uint8."""

    def pinned(self, nbytes: int) -> Tensor:
        """CPU memory that copies read and write at full speed."""
        ...

    def there(self, nbytes: int) -> Tensor:
        """GPU memory."""
        ...

    def follow(self) -> None:
        """Copies given from now on begin after what the GPU has been given to compute until now."""
        ...

    def upload(self, source: Tensor, target: Tensor) -> None: ...

    def download(self, source: Tensor, target: Tensor) -> None: ...

    def mark(self) -> Mark: ...


class _Events:
    def __init__(self, streams: tuple[torch.cuda.Stream, ...]) -> None:
        self._events = [torch.cuda.Event() for _ in streams]
        for event, stream in zip(self._events, streams, strict=True):
            event.record(stream)

    def passed(self) -> bool:
        return all(event.query() for event in self._events)


class CudaCopies:
    """DMA on two streams of its own, one for each direction: PCIe carries both at the same time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._up, self._down = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def pinned(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def there(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def follow(self) -> None:
        computing = torch.cuda.current_stream(self._device)
        self._up.wait_stream(computing)
        self._down.wait_stream(computing)

    def upload(self, source: Tensor, target: Tensor) -> None:
        with torch.cuda.stream(self._up):
            target.copy_(source, non_blocking=True)

    def download(self, source: Tensor, target: Tensor) -> None:
        with torch.cuda.stream(self._down):
            target.copy_(source, non_blocking=True)

    def mark(self) -> Mark:
        return _Events((self._up, self._down))
