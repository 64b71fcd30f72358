"""`ExchangeCopies`: how bytes get from CPU memory to the GPU and back beside the GPU's steps; `CudaCopies` does it.

Memory is named by its address, and CUDA's driver is called directly. A copy between PyTorch's tensors on a stream of
its own takes 25 us of the calling thread (measured on an H200).
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import Any, Protocol

import torch
from torch import Tensor

from tandem import _core
from tandem.errors import EngineError
from tandem.kernels.gpu.cuda_driver import cuda_driver
from tandem.kernels.packed.experts import PackedExperts

_log = logging.getLogger(__name__)


class ExchangeCopies(Protocol):
    """Uploads keep their order, downloads keep theirs, and both wait for nothing but `follow`."""

    def hold(self, owner: object, address: int, nbytes: int) -> None:
        """Makes CPU memory such that copies run at full speed beside everything else. The owner is kept as long as
        that lasts. Raises EngineError where it cannot be; copies then take longer, and the caller waits for them."""
        ...

    def device_buffer(self, nbytes: int) -> Tensor:
        """GPU memory, uint8."""
        ...

    def follow(self) -> None:
        """Uploads and downloads given from now on begin after what the GPU has been given to compute until now."""
        ...

    @property
    def functions(self) -> tuple[int, int]:
        """Addresses of `cuMemcpyAsync` (target, source, bytes, stream) and of `cuStreamQuery` (stream). The first
        returns 0 or an error. The second returns 0 where everything given has arrived, 600 where it has not, or an
        error."""
        ...

    @property
    def directions(self) -> tuple[int, int]:
        """Streams of uploads and of downloads."""
        ...

    def computing(self) -> int:
        """The stream that the GPU computes on."""
        ...

    def in_order(self, source: int, target: int, nbytes: int) -> None:
        """To GPU memory, between what the GPU has been given to compute until now and what it will be."""
        ...


class CudaCopies:
    """DMA on two streams of its own, one for each direction: PCIe carries both at the same time."""

    def __init__(
        self, device: torch.device, driver: Any = None, functions: tuple[int, int] | None = None
    ) -> None:
        """driver: `cuda.bindings.driver`, functions: addresses of its own; or what stands for them in a test."""
        self._held: dict[int, object] = {}
        self._driver, self._device = driver or cuda_driver(), device
        self._success = self._driver.CUresult.CUDA_SUCCESS
        self.functions = functions or driver_functions()
        self._streams: list[torch.cuda.Stream] = []  # whose copies read or write what is held
        self._up, self._down = self.new_stream(), self.new_stream()
        self.directions = self._up.cuda_stream, self._down.cuda_stream
        self.computing = _current_stream(device)
        self._copied = torch.cuda.Event()

    def new_stream(self) -> torch.cuda.Stream:
        """For more copies of what is held. `close` waits for it, whoever has it: in a cycle of references, what gives
        copies may be finalized after what holds their memory."""
        self._streams.append(torch.cuda.Stream(self._device))
        return self._streams[-1]

    def hold(self, owner: object, address: int, nbytes: int) -> None:
        (status,) = self._driver.cuMemHostRegister(address, nbytes, 0)
        if status != self._success:
            raise EngineError(f"CUDA does not register {nbytes / 2**30:.1f} GiB of CPU memory: {status.name}")
        self._held[address] = owner

    def device_buffer(self, nbytes: int) -> Tensor:
        memory = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        memory.record_stream(self._up)  # whoever gets this memory next waits for copies into it
        return memory

    def follow(self) -> None:
        self._copied.record(torch.cuda.current_stream(self._device))
        self._up.wait_event(self._copied)
        self._down.wait_event(self._copied)

    def in_order(self, source: int, target: int, nbytes: int) -> None:
        error = _core.copy_async(self.functions[0], source, target, nbytes, self.computing())
        if error:
            raise EngineError(
                f"a copy of {nbytes} bytes between CPU and GPU failed with CUDA's error {error}"
            )

    def close(self) -> None:
        """Waits for what is under way, and gives back what was held."""
        for stream in self._streams:
            stream.synchronize()
        while self._held:
            address, _ = self._held.popitem()
            self._driver.cuMemHostUnregister(address)

    def __del__(self) -> None:
        try:
            self.close()
        except Exception:  # the GPU is gone, and with it whatever it held
            _log.debug("copies between CPU and GPU ended with an error", exc_info=True)


def _current_stream(device: torch.device) -> Callable[[], int]:
    """Its handle, as Triton's launcher asks for it, in a tenth of the time that the public way takes."""
    raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    if raw_stream is None:
        return lambda: int(torch.cuda.current_stream(device).cuda_stream)
    return partial(raw_stream, torch.cuda.current_device() if device.index is None else device.index)


def driver_functions() -> tuple[int, int]:
    """Addresses of the driver's cuMemcpyAsync and cuStreamQuery, from the library that PyTorch has loaded. A call by
    way of Python's bindings takes 5 us (measured on an H200)."""
    library = ctypes.CDLL("libcuda.so.1")
    copy, query = (ctypes.cast(f, ctypes.c_void_p) for f in (library.cuMemcpyAsync, library.cuStreamQuery))
    return copy.value or 0, query.value or 0


def hold_all(
    layers: Sequence[PackedExperts], copies: ExchangeCopies, progress: Callable[[str, int, int], None] | None = None
) -> bool:
    """Lets DMA read and write the memory of all layers' experts; progress(what, bytes done, bytes in all). Where the
    system refuses, the answer is False. Experts would be copied through the driver's own buffers then, for which steps
    wait: so they move only where that was asked for, and live placement rests where it does not pay."""
    memory = [layer.own_memory() for layer in layers]
    total, done, started = sum(nbytes for _, nbytes in memory), 0, perf_counter()
    for layer, (address, nbytes) in zip(layers, memory, strict=True):
        try:
            copies.hold(layer, address, nbytes)
        except EngineError as error:
            _log.warning(
                "%s; experts are not streamed for long prompts, and move slowly, if that was asked for, or not at all. "
                "Raise the limit of locked memory (ulimit -l)",
                error,
            )
            return False
        done += nbytes
        if progress is not None:
            progress("registering experts with CUDA", done, total)
    _log.info("registered %.1f GiB of experts with CUDA in %.1f s", total / 2**30, perf_counter() - started)
    return True
