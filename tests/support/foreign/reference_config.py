"""`reference_config`: a configuration of Transformers, whose models are the oracle."""

from __future__ import annotations

from typing import Any

import pytest
import transformers
from huggingface_hub.errors import StrictDataclassError
from packaging.version import Version
from transformers import AutoConfig

COMPLETE = Version("5.24")  # the first release that has every family which tests compare with


def reference_config(model_type: str, **keys: Any) -> Any:
    """As `AutoConfig.for_model`. A release before `COMPLETE` may lack the family, or one of its kinds of layers: then
    the test is skipped by name."""
    try:
        return AutoConfig.for_model(model_type, **keys)
    except (ValueError, StrictDataclassError):
        if Version(transformers.__version__) >= COMPLETE:
            raise
        pytest.skip(f"Transformers {transformers.__version__} has no {model_type}, or not all of its layers")
