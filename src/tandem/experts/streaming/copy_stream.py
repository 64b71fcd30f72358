"""`CopyStream`: copies from CPU memory to the GPU on a stream of their own, in their order; `CudaCopyStream` does
it."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from tandem import _core
from tandem.errors import EngineError
from tandem.experts.live.copies import CudaCopies, driver_functions


class CopyStream(Protocol):
    """A mark is a moment in what one side was given to do; None: the beginning."""

    def copy(self, source: int, target: int, nbytes: int) -> None:
        """Addresses, in CPU memory that CUDA knows and on the GPU. Raises EngineError if it cannot begin."""
        ...

    def copies_given(self) -> Any:
        """A mark after all copies until now."""
        ...

    def computing_given(self) -> Any:
        """A mark after all that the GPU has been given to compute until now."""
        ...

    def compute_after(self, copies: Any) -> None:
        """Work that the GPU is given from now on begins after that mark."""
        ...

    def copy_after(self, computing: Any) -> None:
        """Copies given from now on begin after that mark."""
        ...

    def finish(self) -> None:
        """Waits for all copies."""
        ...


class CudaCopyStream:
    """DMA beside the GPU's kernels."""

    def __init__(self, device: torch.device, held: CudaCopies | None = None, copy: int = 0) -> None:
        """held: keeps CPU memory registered as long as this lives, and until its copies have ended. copy: address of
        `cuMemcpyAsync`, or of what stands for it in a test."""
        self._held, self._copy = held, copy or driver_functions()[0]
        self._device = device
        self._stream = torch.cuda.Stream(device) if held is None else held.new_stream()

    def copy(self, source: int, target: int, nbytes: int) -> None:
        error = _core.copy_async(self._copy, source, target, nbytes, self._stream.cuda_stream)
        if error:
            raise EngineError(f"a copy of {nbytes} bytes of experts to the GPU failed with CUDA's error {error}")

    def copies_given(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        self._stream.record_event(event)
        return event

    def computing_given(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        torch.cuda.current_stream(self._device).record_event(event)
        return event

    def compute_after(self, copies: torch.cuda.Event | None) -> None:
        if copies is not None:
            torch.cuda.current_stream(self._device).wait_event(copies)

    def copy_after(self, computing: torch.cuda.Event | None) -> None:
        if computing is not None:
            self._stream.wait_event(computing)

    def finish(self) -> None:
        self._stream.synchronize()
