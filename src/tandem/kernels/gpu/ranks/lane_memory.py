"""`LaneMemory`: the receiving memories of all ranks as one rank's GPU sees them.

peer: each lies on its rank's GPU, and the others write to it through NVLink or PCIe (CUDA IPC). host: each lies in CPU
memory that all GPUs have mapped, for cards without peer access, and for containers and systems that forbid IPC.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import Any

from tandem.errors import EngineError
from tandem.kernels.gpu.cuda_driver import cuda_driver
from tandem.kernels.ranks.meeting import Meeting

LANES = ("peer", "host")
_mapped_memory: list[object] = []
"""CPU memory that CUDA has mapped, until the process ends: others may still write to it, and CUDA fails to allocate
where it is unmapped behind its back."""


class LaneMemory:
    """Zeros at first. Stays until the process ends."""

    def __init__(self, lane: str, nbytes: int, meeting: Meeting) -> None:
        """Raises EngineError on every rank where any rank cannot have it."""
        self.lane, self.nbytes, self._meeting, self._driver = lane, nbytes, meeting, cuda_driver()
        failure = ""
        try:
            handle = self._own_on_gpu() if lane == "peer" else self._own_in_ram()
        except (EngineError, OSError) as error:
            handle, failure = b"", str(error)
        handles = meeting.share(f"{lane}-handle", handle)
        if all(handles):
            try:
                self.addresses = [self._address(rank, handles[rank]) for rank in range(meeting.ranks)]
            except (EngineError, OSError) as error:
                failure = str(error)
        if not meeting.agree(f"{lane}-opened", all(handles) and not failure):
            raise EngineError(failure or "another rank cannot")

    def _own_on_gpu(self) -> bytes:
        self._own = int(self._call("cuMemAlloc", self.nbytes))
        self._call("cuMemsetD8", self._own, 0, self.nbytes)
        self._call("cuCtxSynchronize")
        return bytes(self._call("cuIpcGetMemHandle", self._own).reserved)

    def _own_in_ram(self) -> bytes:
        descriptor = os.memfd_create("tandem-rank")
        os.ftruncate(descriptor, self.nbytes)
        _mapped_memory.append(descriptor)
        return f"/proc/{os.getpid()}/fd/{descriptor}".encode()

    def _address(self, rank: int, handle: bytes) -> int:
        if self.lane == "host":
            return self._mapped(handle.decode())
        if rank == self._meeting.rank:
            return self._own
        driver = self._driver
        ipc_handle = driver.CUipcMemHandle()
        ipc_handle.reserved = handle
        lazy_flag = driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
        return int(self._call("cuIpcOpenMemHandle", ipc_handle, lazy_flag.value))

    def _mapped(self, path: str) -> int:
        with open(path, "r+b") as file:
            memory = mmap.mmap(file.fileno(), self.nbytes)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        _mapped_memory.append(memory)
        flags = self._driver.CU_MEMHOSTREGISTER_PORTABLE | self._driver.CU_MEMHOSTREGISTER_DEVICEMAP
        self._call("cuMemHostRegister", address, self.nbytes, flags)
        return int(self._call("cuMemHostGetDevicePointer", address, 0))

    def _call(self, name: str, *arguments: Any) -> Any:
        status, *values = getattr(self._driver, name)(*arguments)
        if status != self._driver.CUresult.CUDA_SUCCESS:
            raise EngineError(f"{name}: {status.name}")
        return values[0] if values else None
