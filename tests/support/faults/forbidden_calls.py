"""A seccomp filter as Docker's profile is: a system call that is forbidden answers EPERM."""

from __future__ import annotations

import ctypes
import errno
import platform

MBIND = {"x86_64": 237, "aarch64": 235}.get(platform.machine(), -1)
PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2
LOAD_WORD, JUMP_IF_EQUAL, RETURN = 0x20, 0x15, 0x06  # of classic BPF
ALLOW, EPERM, KILL = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x80000000


class _Instruction(ctypes.Structure):
    _fields_ = (
        ("code", ctypes.c_uint16), ("if_true", ctypes.c_uint8), ("if_false", ctypes.c_uint8), ("k", ctypes.c_uint32),
    )  # fmt: skip


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_uint16), ("instructions", ctypes.POINTER(_Instruction)))


def forbid(call: int, answer: int = EPERM) -> None:
    """From here on, for this thread and those that it starts. It cannot be taken back: call it in a child."""
    filter_ = (_Instruction * 4)(
        (LOAD_WORD, 0, 0, 0),  # the call's number
        (JUMP_IF_EQUAL, 0, 1, call),
        (RETURN, 0, 0, answer),
        (RETURN, 0, 0, ALLOW),
    )
    libc = ctypes.CDLL(None, use_errno=True)
    program = _Program(len(filter_), filter_)
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(
        PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0
    ):
        raise OSError(ctypes.get_errno(), "seccomp")
