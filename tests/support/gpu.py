"""Where the tests of the GPU kernels run: on a GPU, or, with TRITON_INTERPRET=1, in Triton's interpreter on the CPU."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.nn.attention import varlen

from tandem.experts.feed import ExpertFeed, LayerFeed

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HAS_TRITON = importlib.util.find_spec("triton") is not None
AVAILABLE = HAS_TRITON and (INTERPRETED or torch.cuda.is_available())
READS_PAGES = "block_table" in inspect.signature(varlen.varlen_attn).parameters  # PyTorch 2.13 or newer
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

needs_triton = pytest.mark.skipif(not AVAILABLE, reason="no NVIDIA GPU (or Triton is not installed)")
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")


def keep_masks_masks() -> None:
    """Triton 3.9's interpreter spreads a number over a block as the type that it was compared in: `mask & (slot > 0)`
    is no mask then, and is refused."""
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    builder = interpreter.InterpreterBuilder
    spread = builder.create_splat

    def splat(self: Any, kind: Any, number: Any) -> Any:
        made = spread(self, kind, number)
        made.data = made.data.astype(number.data.dtype)
        return made

    builder.create_splat = splat


if INTERPRETED and HAS_TRITON:
    keep_masks_masks()


def fed(count: int, matrices: Callable[[int], Any]) -> LayerFeed:
    """A layer's experts, as loading gives them."""
    return ExpertFeed([0]).layer(0, count, lambda _layer: matrices)


def pretend_cuda_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if cuda-core and a GPU of capability 9.0 were there, for what only asks whether they are."""
    core = ModuleType("cuda.core")
    for name in ("Device", "LaunchConfig", "Program", "Stream", "launch"):
        setattr(core, name, None)
    monkeypatch.setitem(sys.modules, "cuda", ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.core", core)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
