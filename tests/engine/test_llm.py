"""The offline API."""

from __future__ import annotations

import numpy as np
import pytest

from fake_model import EOS, FakeModel, FakeTokenizer, fake_engine, greedy_reference
from tandem import LLM, SamplingParams
from tandem.engine.start import progress
from tandem.engine.text.chat_template import ChatTemplate
from tandem.errors import CheckpointError, ConfigError, EngineError, RequestError

GREEDY = SamplingParams(temperature=0.0, max_tokens=6)


def letters(ids: list[int]) -> str:
    return "".join(chr(64 + i) for i in ids if i != EOS)


def test_prompts_as_text_ids_or_lists() -> None:
    llm = LLM.from_engine(fake_engine())
    expected = letters(greedy_reference([2, 3], 6))
    for prompts in ("BC", [2, 3], ["BC"], [[2, 3]]):
        [result] = llm.generate(prompts, GREEDY)
        assert result.text == expected and result.prompt_ids == [2, 3]
        assert result.finish_reason in ("stop", "length")
    assert llm.generate([], GREEDY) == []


def test_results_keep_the_order_of_prompts() -> None:
    llm = LLM.from_engine(fake_engine(max_running_requests=3))
    prompts = [[2 + i % 7, 3, 4 + i] for i in range(20)]
    params = [SamplingParams(temperature=0.0, max_tokens=1 + i % 5, logprobs=0) for i in range(20)]
    results = llm.generate(prompts, params)
    for prompt, one, result in zip(prompts, params, results, strict=True):
        assert result.token_ids == greedy_reference(prompt, one.max_tokens)
        assert len(result.logprobs) == len(result.token_ids)


def test_several_answers_per_prompt() -> None:
    llm = LLM.from_engine(fake_engine())
    [result] = llm.generate("BC", SamplingParams(n=3, max_tokens=5, seed=1, temperature=1.5))
    assert len(result.answers) == 3 and len({answer.text for answer in result.answers}) > 1


@pytest.mark.parametrize(
    "prompts",
    [{"prompt": "BC"}, ["BC", 5], [["B"]], [[1.5]], [None], None, b"BC", [{"prompt_token_ids": [2]}], [True]],
)
def test_what_is_no_prompt_is_refused(prompts) -> None:
    with pytest.raises(RequestError, match="a prompt is a text or a list of token ids"):
        LLM.from_engine(fake_engine()).generate(prompts, GREEDY)


def test_token_ids_may_be_numpys() -> None:
    llm = LLM.from_engine(fake_engine())
    for prompts in (np.array([2, 3]), [np.array([2, 3])], [(np.int32(2), 3)]):
        assert llm.generate(prompts, GREEDY)[0].prompt_ids == [2, 3]


def test_a_stop_string_may_come_alone_or_in_a_list() -> None:
    llm = LLM.from_engine(fake_engine())
    text = llm.generate("BC", SamplingParams(temperature=0, max_tokens=12))[0].text
    stop = text[4:6]
    for given in (stop, [stop], (stop,)):
        [result] = llm.generate("BC", SamplingParams(temperature=0, max_tokens=12, stop=given))
        assert result.text == text[: text.index(stop)] and result.answers[0].stop_match == stop


@pytest.mark.parametrize("wrong", [{"temperature": "hot"}, {"top_k": 20.5}, {"stop": 5}, {"n": None}, None])
def test_sampling_of_a_wrong_type_is_refused_and_leaves_nothing_behind(wrong) -> None:
    llm = LLM.from_engine(fake_engine())
    bad = {"max_tokens": 3} if wrong is None else SamplingParams(**wrong)
    with pytest.raises(RequestError, match="SamplingParams"):
        llm.generate(["BC", "BC"], [GREEDY, bad])
    assert llm.generate("BC", SamplingParams(temperature=np.float32(0), max_tokens=6)) == llm.generate(
        "BC", GREEDY
    )


def test_a_bug_while_adding_leaves_nothing_behind(monkeypatch) -> None:
    llm = LLM.from_engine(fake_engine())
    monkeypatch.setattr("tandem.engine.engine.check_prompt_ids", lambda ids, vocab: 1 // (3 - len(ids)))
    with pytest.raises(ZeroDivisionError):
        llm.generate(["BC", "BCD"], GREEDY)
    assert [result.prompt for result in llm.generate("BC", GREEDY)] == ["BC"]


@pytest.mark.parametrize("messages", ["hi", {"role": "user", "content": "x"}, [["x"]], ["x"]])
def test_what_is_no_conversation_is_refused(messages) -> None:
    with pytest.raises(RequestError, match="messages are dicts"):
        LLM.from_engine(fake_engine()).chat(messages)


def test_chat_renders_the_template() -> None:
    engine = fake_engine()
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}D")
    tokenizer = FakeTokenizer()
    tokenizer.apply_chat_template = template.render
    engine.tokenizer = tokenizer
    llm = LLM.from_engine(engine)
    message = {"role": "user", "content": "BC"}
    for messages in ([message], [[message]]):
        [result] = llm.chat(messages, GREEDY)
        assert result.prompt == "BCD" and result.text == letters(greedy_reference([2, 3, 4], 6))
    with pytest.raises(RequestError, match="conversation"):
        llm.chat([message, [message]], GREEDY)


def test_an_impossible_prompt_leaves_the_engine_usable() -> None:
    llm = LLM.from_engine(fake_engine())
    with pytest.raises(RequestError, match="empty"):
        llm.generate([[2, 3], []], GREEDY)
    with pytest.raises(RequestError, match="SamplingParams"):
        llm.generate([[2], [3]], [GREEDY])
    assert llm.generate([2, 3], GREEDY)[0].token_ids == greedy_reference([2, 3], 6)


def test_a_failing_model_raises_and_leaves_the_engine_usable() -> None:
    model = FakeModel()
    model.fail_on = {9}
    llm = LLM.from_engine(fake_engine(model))
    with pytest.raises(EngineError, match="told to fail"):
        llm.generate([[9, 9], [2, 3]], GREEDY)
    assert llm.generate([2, 3], GREEDY)[0].token_ids == greedy_reference([2, 3], 6)
    assert llm.engine.stats().running == 0


def test_unknown_keywords_name_the_nearest() -> None:
    with pytest.raises(ConfigError, match="max_running_requests"):
        LLM("demo", max_runing_requests=4)


def test_flags_that_change_nothing_are_named(tmp_path) -> None:
    with (
        pytest.warns(UserWarning, match="--trust-remote-code changes nothing"),
        pytest.raises(CheckpointError),
    ):
        LLM(str(tmp_path), trust_remote_code=True)  # there is no model


def test_progress_shows_on_a_terminal_only(monkeypatch, capsys) -> None:
    monkeypatch.setattr(progress, "SHOW_AFTER_SECONDS", 0.0)
    llm = LLM.from_engine(fake_engine())
    llm.generate([[2, 3]] * 4, GREEDY)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(progress.sys.stderr, "isatty", lambda: True)
    llm.generate([[2, 3]] * 4, GREEDY, progress=False)
    assert capsys.readouterr().err == ""
    llm.generate([[2, 3]] * 4, GREEDY)
    assert "4/4" in capsys.readouterr().err
