"""The processes of a server's ranks."""

from __future__ import annotations

import psutil

from server_harness import ServerProcess, command_line

NAMES = ("server.engine_process", "server.ranks.process")


def processes_of_ranks(server: ServerProcess) -> list[psutil.Process]:
    """A process for each of two ranks."""
    children = psutil.Process(server.process.pid).children()
    found = [[each for each in children if name in command_line(each)] for name in NAMES]
    assert [len(each) for each in found] == [1, 1], children
    return [each[0] for each in found]
