"""Answers of a job of the compiling process: whole, or nothing.

It lies in memory of its own. One byte carries that memory's descriptor. A job may be ended at any moment. The reader of
a stream might have a part by then, and would take other words for the rest.
"""

from __future__ import annotations

import os
import socket


def send_answer(to: socket.socket, data: bytes) -> None:
    """Raises OSError where nobody reads it."""
    with open(os.memfd_create("answer"), "wb", buffering=0) as memory:
        left = memoryview(data)
        while left:
            left = left[memory.write(left) :]
        socket.send_fds(to, [data[:1]], [memory.fileno()])


def receive_answer(of: socket.socket) -> bytes:
    """The first of them. Raises EOFError where there will be none, TimeoutError."""
    _, descriptors, *_ = socket.recv_fds(of, 1, 1, socket.MSG_CMSG_CLOEXEC)
    if not descriptors:
        raise EOFError("the connection was closed")
    with open(descriptors[0], "rb") as memory:
        memory.seek(0)  # it is where the writer's is
        return memory.read()
