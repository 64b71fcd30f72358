"""The processes of a server's ranks."""

from __future__ import annotations

import psutil

from server_harness import ServerProcess

NAMES = ("server.engine_process", "server.ranks.process")


def processes_of_ranks(server: ServerProcess) -> list[psutil.Process]:
    """Process of each of two ranks."""
    children = psutil.Process(server.process.pid).children()
    found = [[each for each in children if any(name in word for word in each.cmdline())] for name in NAMES]
    assert [len(each) for each in found] == [1, 1], children
    return [each[0] for each in found]
