"""Frames between processes of ours: four bytes of length, then the data, over a stream socket."""

from __future__ import annotations

import socket
import struct

_LENGTH = struct.Struct(">I")


def send_frame(to: socket.socket, data: bytes) -> None:
    to.sendall(_LENGTH.pack(len(data)) + data)


def receive_frame(of: socket.socket) -> bytes:
    """Raises EOFError when the other side has gone, TimeoutError."""
    [length] = _LENGTH.unpack(_receive(of, _LENGTH.size))
    return bytes(_receive(of, length))


def _receive(of: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    view, done = memoryview(data), 0
    while done < size:
        count = of.recv_into(view[done:])
        if count == 0:
            raise EOFError("the connection was closed")
        done += count
    return data
