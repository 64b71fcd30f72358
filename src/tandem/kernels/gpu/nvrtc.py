"""CUDA kernels compiled at run time (NVRTC) and launched on PyTorch's streams, inside captures too."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from tandem.kernels.kernel_loads import kernel_loads


def available() -> bool:
    """Whether cuda-core is installed, which models whose experts have kernels in Triton can do without."""
    try:
        from cuda.core import Device, LaunchConfig, Program, Stream, launch  # noqa: F401
    except ImportError:
        return False
    return True


def cuda_source(launcher: str) -> str:
    """Source of the `.cu` file beside a Python file, which launches its kernels."""
    return Path(launcher).with_suffix(".cu").read_text(encoding="utf-8")


COMMON = cuda_source(__file__)
"""Source that every other one begins with."""


def compiled(source: str, names: Sequence[str], device_index: int | None, features: str = "") -> list[Any]:
    """The kernels of these `extern "C"` names, loaded on a device; None: the current one. Compiling may allocate and
    synchronise, so it comes before a capture. features: "a" for what this generation of GPUs alone has."""
    from cuda.core import Device, Program, ProgramOptions

    device = Device(device_index)
    device.set_current()
    kernel_loads.begin()
    program = Program(COMMON + source, "c++", options=ProgramOptions(std="c++17", arch=f"sm_{device.arch}{features}"))
    module = program.compile("cubin")
    kernels = [module.get_kernel(name) for name in names]
    kernel_loads.end("NVRTC", ", ".join(names))
    return kernels


def launch(
    kernel: Any,
    blocks: int | tuple[int, int],
    threads: int,
    stream: int,
    *arguments: Any,
    overlap: bool = False,
    shared_bytes: int = 0,
) -> None:
    """On a stream given by its handle. Python ints are pointers. overlap: the kernel may start while the one before
    runs, for which it waits itself (`overlap.py`)."""
    from cuda.core import Stream
    from cuda.core import launch as start

    start(Stream.from_handle(stream), _shape(blocks, threads, overlap, shared_bytes), kernel, *arguments)


@cache
def _shape(blocks: int | tuple[int, int], threads: int, overlap: bool, shared_bytes: int) -> Any:
    from cuda.core import LaunchConfig

    more = {}
    if overlap and hasattr(LaunchConfig, "programmatic_stream_serialization"):  # cuda.core 1.2 has it
        more["programmatic_stream_serialization"] = True
    return LaunchConfig(grid=blocks, block=threads, shmem_size=shared_bytes, **more)
