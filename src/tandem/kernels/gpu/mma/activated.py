"""Activation between gate and up, and down, in the CUDA kernels that end in it."""

from __future__ import annotations

from tandem.kernels.gpu.mlp import activation_constants
from tandem.kernels.gpu.nvrtc import cuda_source
from tandem.spec.activation import Activation

SOURCE = cuda_source(__file__)


def activation_steps(activation: Activation) -> str:
    """The source of `activated`."""
    constants = activation_constants(activation).items()
    defined = (f"#define {name} {value}{'f' if isinstance(value, float) else ''}\n" for name, value in constants)
    return "".join(defined) + SOURCE
