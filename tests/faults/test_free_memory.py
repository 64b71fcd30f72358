"""A serving process keeps what a step's arrays took: read from the system in a process of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

MEASURED = """
import ctypes, psutil
from tandem.kernels.free_memory import keep_free_memory
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_void_p], [ctypes.c_size_t]
process = psutil.Process()
if {kept}:
    keep_free_memory()
blocks = [libc.malloc(16 << 20) for _ in range(8)]
for block in blocks:
    ctypes.memset(block, 1, 16 << 20)
full = process.memory_full_info().uss
for block in blocks:
    libc.free(block)
print((full - process.memory_full_info().uss) >> 20)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc")
@pytest.mark.parametrize(("kept", "given_back"), [(True, 0), (False, 128)])
def test_a_serving_process_keeps_what_is_free(kept: bool, given_back: int) -> None:
    code = MEASURED.format(kept=kept)
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert abs(int(told.stdout) - given_back) <= 8
