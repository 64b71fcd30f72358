"""Tandem: a serving system for Mixture-of-Experts models that are larger than the GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tandem.engine.llm import LLM
    from tandem.engine.offline.input import SamplingParams

__version__ = "0.2.0"
__all__ = ["LLM", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    """LLM and SamplingParams on first use: `import tandem` and `kt --help` must not wait for torch."""
    if name == "LLM":
        from tandem.engine.llm import LLM

        return LLM
    if name == "SamplingParams":
        from tandem.engine.offline.input import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'tandem' has no attribute {name!r}")
