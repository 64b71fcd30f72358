"""`kernel_loads`: which GPU kernels were compiled, or read from Triton's cache, and which of them too late.

Compiling one keeps its step waiting, and the driver may load its code only when the GPU has nothing to do.
"""

from __future__ import annotations

import logging
from threading import local
from time import perf_counter

SHOWN_SECONDS = 5.0  # between two lines while kernels are compiled before the start

_log = logging.getLogger(__name__)


class KernelLoads:
    """Counts since the process began. The log names each kernel that comes after `ready`."""

    def __init__(self) -> None:
        self.count = self.late = 0
        self.seconds = 0.0  # in Triton's compiler
        self._is_ready = False
        self._shown = perf_counter()
        self._threads = local()  # a step's and a prompt's may compile at the same time

    def ready(self) -> None:
        """The engine takes requests from now on."""
        self._is_ready = True
        if self.seconds > SHOWN_SECONDS:
            print(f"compiled {self.count} kinds of GPU kernels in {self.seconds:.0f} s", flush=True)

    def begin(self) -> None:
        self._threads.began = perf_counter()

    def end(self, compiler: str, name: str) -> None:
        """A compilation has ended that `begin` began in this thread."""
        self.count += 1
        now = perf_counter()
        self.seconds += now - getattr(self._threads, "began", now)
        if self._is_ready:
            self.late += 1
            _log.warning("the kernel %s was compiled or loaded late, by %s, while serving", name, compiler)
        elif now - self._shown > SHOWN_SECONDS:
            self._shown = now
            print(f"compiling GPU kernels: {self.count} in {self.seconds:.0f} s, the last is {name}", flush=True)


kernel_loads = KernelLoads()
"""The counts of this process."""


def watch_triton() -> None:
    """From now on Triton's kernels are counted. Without Triton, or with one that has no such hooks, none is."""
    try:
        from triton import knobs
    except ImportError:
        return

    def begin(**what: object) -> None:
        kernel_loads.begin()

    def end(**what: object) -> None:
        kernel_loads.end("Triton", str(getattr(what.get("fn"), "name", "?")))

    knobs.runtime.jit_cache_hook = begin
    knobs.runtime.jit_post_compile_hook = end
