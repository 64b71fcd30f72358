"""CUDA kernels compiled at run time (NVRTC) and launched on PyTorch's streams, inside captures too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def compiled(source: str, names: Sequence[str], device_index: int | None) -> list[Any]:
    """The kernels of these `extern "C"` names, loaded on a device; None: the current one. Compiling may allocate and
    synchronise, so it comes before a capture."""
    from cuda.core import Device, Program, ProgramOptions

    device = Device(device_index)
    device.set_current()
    program = Program(source, "c++", options=ProgramOptions(std="c++17", arch=f"sm_{device.arch}"))
    module = program.compile("cubin")
    return [module.get_kernel(name) for name in names]


def launch(kernel: Any, blocks: int | tuple[int, int], threads: int, stream: int, *arguments: Any) -> None:
    """On a stream given by its handle. Python ints are pointers."""
    from cuda.core import LaunchConfig, Stream
    from cuda.core import launch as start

    start(Stream.from_handle(stream), LaunchConfig(grid=blocks, block=threads), kernel, *arguments)
