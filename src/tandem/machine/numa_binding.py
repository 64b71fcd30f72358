"""Permission to bind memory to NUMA nodes. Docker's seccomp profile forbids mbind without CAP_SYS_NICE."""

from __future__ import annotations

import ctypes
import mmap
import os
import platform

_MBIND = {"x86_64": 237, "aarch64": 235}  # numbers of the system call
_MPOL_DEFAULT = 0


def mbind_error() -> str:
    """The system's error for an mbind that changes nothing, of a page of our own; "": it is allowed."""
    number = _MBIND.get(platform.machine())
    if number is None:
        return ""
    libc = ctypes.CDLL(None, use_errno=True)
    with mmap.mmap(-1, mmap.PAGESIZE) as page:
        held = ctypes.c_char.from_buffer(page)
        arguments = (ctypes.addressof(held), mmap.PAGESIZE, _MPOL_DEFAULT, 0, 0, 0)
        failed = libc.syscall(*map(ctypes.c_long, (number, *arguments)))
        error = ctypes.get_errno()
        del held  # the page cannot be closed while something points into it
    return os.strerror(error) if failed else ""


def binding_notice(error: str, nodes: tuple[int, ...]) -> str:
    """error: of `mbind_error`. nodes: those that weights are divided among. "": nothing is to be said."""
    if not error or len(nodes) < 2:
        return ""
    return (
        f"memory cannot be bound to NUMA nodes (mbind: {error}): weights lie where they are first touched. "
        "In a container: docker run --cap-add SYS_NICE"
    )
