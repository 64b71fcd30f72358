"""Sampling values that a request leaves out come from the model's generation_config.json."""

from __future__ import annotations

import json

import pytest

from tandem.server.openai_sampling import sampling_of
from tandem.server.openai_schema import ChatRequest
from tandem.server.sampling_defaults import read_sampling_defaults


def request(**fields: float) -> ChatRequest:
    return ChatRequest(messages=[{"role": "user", "content": "hi"}], **fields)


def test_the_model_s_recommendation_fills_the_gaps_and_the_request_wins(tmp_path) -> None:
    recommended = {"do_sample": True, "temperature": 0.2, "top_p": 0.9, "eos_token_id": 2, "top_k": None}
    (tmp_path / "generation_config.json").write_text(json.dumps(recommended))
    defaults = read_sampling_defaults(tmp_path)
    assert defaults == {"temperature": 0.2, "top_p": 0.9}
    filled = sampling_of(request(), defaults)
    assert (filled.temperature, filled.top_p, filled.top_k) == (0.2, 0.9, 0)
    asked = sampling_of(request(temperature=0.0, top_p=0.5), defaults)
    assert (asked.temperature, asked.top_p) == (0.0, 0.5)


@pytest.mark.parametrize("content", [None, "{}"])
def test_without_a_recommendation_openai_s_values_hold(tmp_path, content) -> None:
    if content is not None:
        (tmp_path / "generation_config.json").write_text(content)
    assert read_sampling_defaults(tmp_path) == {}
    assert sampling_of(request(), {}).temperature == 1.0


def test_the_demo_recommends_what_its_base_does(demo_dir) -> None:
    assert read_sampling_defaults(demo_dir)["temperature"] == 0.2
