"""Draft layers with made-up weights, as benches have them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hub_copies import keys_of
from plans import GIB, machine, with_gpu
from sessions import Session, plan, prompts
from tandem.architectures.load import config_from_dict
from tandem.bench.architectures import named_config
from tandem.bench.synthetic import SyntheticCheckpoint
from tandem.engine.state.arrays import allocate
from tandem.flags.engine_config import EngineConfig
from tandem.kernels.reference import TorchOps
from tandem.models import build
from tandem.planner.resolve import resolve


@pytest.mark.parametrize("variant", ["glm5_next", "bailing_hybrid", "qwen4_exp"])
def test_they_draft(tiny_models, variant: str) -> None:
    keys = keys_of(tiny_models[variant]) | {"num_nextn_predict_layers": 1, "mtp_num_hidden_layers": 1}
    config = config_from_dict(keys)
    config, session = replace(config, drafter=config.drafts), Session(tiny_models[variant])
    model = build(config, plan(), SyntheticCheckpoint(), TorchOps())  # type: ignore[arg-type]
    states = allocate(config.state_layout("float32", session.page), 3 * session.pages, slots=4).arrays
    batch = session.batch([(0, prompts()[0])])
    with torch.inference_mode():
        model.forward(batch, states)
        tokens, _ = model.draft(None, replace(batch, logits_rows=batch.logits_rows[-1:]), states)
    assert config.drafter is not None and 0 <= int(tokens[0]) < config.vocab


@pytest.mark.parametrize("name", ["ling-3.0-flash", "glm-5.3-flash", "qwen3.8-flash-next"])
def test_they_are_planned_by_name(name: str) -> None:
    """On either side; without the flag they stay in their files."""
    config = EngineConfig.from_keywords("m", kt_method="INT4", context_length=4096, speculative_algorithm="NEXTN")
    for each in (machine(free=800 * GIB), replace(with_gpu(80 * GIB), available_memory=800 * GIB)):
        assert resolve(config, named_config(name, None), each).draft_tokens == 3
