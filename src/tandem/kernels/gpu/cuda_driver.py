"""`cuda_driver`: CUDA's driver by way of NVIDIA's bindings for Python, for what PyTorch does not offer."""

from __future__ import annotations

from typing import Any

from tandem.errors import EngineError


def cuda_driver() -> Any:
    """Raises EngineError where it is not installed; the hand-off of `experts.handoff` needs it as well."""
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise EngineError(
            "moving experts, and several GPUs, need cuda-bindings: pip install cuda-core cuda-bindings"
        ) from error
    return driver
