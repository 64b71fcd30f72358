"""Sampling values that a request leaves out come from the model's generation_config.json."""

from __future__ import annotations

import json

import pytest

from tandem import LLM
from tandem.engine.start.sampling_defaults import read_sampling_defaults
from tandem.errors import CheckpointError
from tandem.server.chat.openai.schema import ChatRequest
from tandem.server.openai_sampling import sampling_of


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


@pytest.mark.parametrize(
    "wrong",
    ['"do_sample": 1', '"no_repeat_ngram_size": 3', '"top_p": 7', '"temperature": NaN', '"temperature": true',
     '"top_k": 20.5', '"min_p": "0.1"'],
)  # fmt: skip
def test_a_recommendation_that_cannot_be_is_an_error_of_the_checkpoint(tmp_path, wrong) -> None:
    (tmp_path / "generation_config.json").write_text("{" + wrong + "}")
    with pytest.raises(CheckpointError, match=f"{wrong.split(chr(34))[1]}.*--sampling-defaults openai"):
        read_sampling_defaults(tmp_path)


def test_it_is_one_for_a_library_s_user_too(tmp_path) -> None:
    """Before anything is loaded; here there is nothing else to load."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "generation_config.json").write_text('{"temperature": "hot"}')
    with pytest.raises(CheckpointError, match="temperature is 'hot'"):
        LLM(str(tmp_path))


def test_whole_numbers_may_be_written_as_floats(tmp_path) -> None:
    (tmp_path / "generation_config.json").write_text('{"top_k": 20.0}')
    assert repr(read_sampling_defaults(tmp_path)) == "{'top_k': 20}"


def test_the_demo_is_greedy(demo_dir) -> None:
    assert read_sampling_defaults(demo_dir) == {"temperature": 0.0}


def test_without_do_sample_nothing_else_counts_but_the_penalty(tmp_path) -> None:
    said = {"do_sample": False, "temperature": 0.7, "top_k": 3, "repetition_penalty": 1.1}
    (tmp_path / "generation_config.json").write_text(json.dumps(said))
    assert read_sampling_defaults(tmp_path) == {"temperature": 0.0, "repetition_penalty": 1.1}
