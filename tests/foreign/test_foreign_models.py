"""Families of Transformers through its own modules, with our experts and pages: logits against Transformers alone."""

from __future__ import annotations

import pytest

from foreign_models import PAGED, ForeignModels
from sessions import Session, ours, prompts, reference, worst
from tandem import _core
from tandem.checkpoint import load_model_config
from tandem.kernels.cpu_ops import CpuOps


@pytest.fixture(scope="session")
def foreign_models(tmp_path_factory):
    return ForeignModels(tmp_path_factory.mktemp("foreign"))


@pytest.fixture(scope="module")
def ops():
    return CpuOps(_core.WorkerPool([-1, -1]), _core.supported_tiers()[-1])


@pytest.mark.parametrize("model_type", PAGED)
def test_packed_pages_equal_transformers(foreign_models, ops, model_type):
    """Prefill in chunks beside others, then cached decode of three sequences at once."""
    path = foreign_models[model_type]
    config = load_model_config(path)
    assert config.foreign is not None and config.foreign.why_single == ""
    assert worst(ours(Session(path, ops=ops)), reference(path)) < 1e-4


@pytest.mark.parametrize("model_type", PAGED)
def test_prefill_at_once_equals_transformers(foreign_models, ops, model_type):
    session = Session(foreign_models[model_type], ops=ops)
    got = [session.step([(s, prompt)])[0] for s, prompt in enumerate(prompts())]
    assert worst(got, reference(foreign_models[model_type])) < 1e-4
