"""Fixtures that several test files share."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("fuzz", max_examples=1500, deadline=None)  # `make fuzz`


@pytest.fixture(scope="session")
def demo_dir() -> Path:
    """The demo model, built in the user's cache as `make serve` does (half a minute, once per machine)."""
    from tandem.checkpoint import resolve_model
    from tandem.checkpoint.demo import build_demo

    return build_demo(resolve_model("demo"))


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory):
    """`tiny_models["glm4_moe"]` is a directory with a tiny random model of that family and a byte tokenizer."""
    from tiny import TinyModels

    return TinyModels(tmp_path_factory.mktemp("tiny"))
