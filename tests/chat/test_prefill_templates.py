"""Answers that go on with a client's text: 30 of them, in the forms of eight families' chat templates."""

from __future__ import annotations

import pytest

from chat_models import chat_model, prepare
from family_templates import SPECIAL, TEMPLATES
from tandem.errors import RequestError
from tandem.server.chat.conversation import Conversation, Message
from tandem.text.chat_template import ChatTemplate

PREFILLS = (
    "<", ">", "|", "<|", "i", "end", "_", "A", "assistant", "\n",  # what templates write behind a turn, too
    "The capital of", "The capital of ", "1, 2, 3, ", "Line one.\n\n", '{"a": 1,\n', "x\t",  # white space behind
    "  indented", "\n\nHello", " both ", "\u00a0no break\u00a0", " ",  # in front
    "<think>\nThe user asks about", "<think>\nok\n</think>\n\nThe capital of", "<think>ok</think>The",  # thoughts
    "<think>\n\n</think>\n\n",
    "Hi<|im_end|>\n<|im_start|>system", "grüße 🎉", "The answer: TheAnswerGoesOnHere ", "```python\n", "user",
)  # fmt: skip
USER = "Count to 10."

LAID_OUT = "<think>\nok\n</think>\n\nThe capital of", "<think>ok</think>The", "<think>\n\n</think>\n\n"
# Where the prompt is another one. Transformers refuses a thought that the template lays out in its own way: nothing of
# it is lost. Of a prefill that is all white space, and trimmed, nothing is left: Transformers then cuts white space
# that belongs to the turn's header.
REFUSED_THERE = {("ChatML", LAID_OUT[1]), *(("GLM", prefill) for prefill in LAID_OUT)}
HEADER_CUT_THERE = {
    (family, prefill) for family in ("Llama 3", "GLM", "Mistral", "Gemma") for prefill in ("\n", " ")
}


def ours(template: str, prefill: str) -> str | None:
    """None: refused."""
    said = (Message("user", USER), Message("assistant", prefill))
    with chat_model(template, special=SPECIAL) as (model, tokenizer):
        try:
            ids = prepare(model, Conversation(said, continue_final_message=True)).prompt_ids
        except RequestError as error:
            assert error.param == "continue_final_message"
            return None
        return tokenizer.decode(ids, skip_special_tokens=False)


def transformers_(template: str, prefill: str) -> str | None:
    render = pytest.importorskip("transformers.utils.chat_template_utils").render_jinja_template
    said = [{"role": "user", "content": USER}, {"role": "assistant", "content": prefill}]
    try:
        [[text], _] = render(conversations=[said], chat_template=template, continue_final_message=True)
    except Exception:
        return None
    return text


@pytest.mark.parametrize("prefill", PREFILLS, ids=repr)
@pytest.mark.parametrize("family", TEMPLATES)
def test_the_prompt_is_that_of_transformers(family: str, prefill: str) -> None:
    template = TEMPLATES[family]
    found, wanted = ours(template, prefill), transformers_(template, prefill)
    if (family, prefill) in REFUSED_THERE:
        assert wanted is None and "".join(found.split()).endswith("".join(prefill.split()))
    elif (family, prefill) in HEADER_CUT_THERE:
        assert found.rstrip() == wanted != found and opening(template).startswith(found.split("<think>")[0].rstrip())
    else:
        assert found == wanted


def opening(template: str) -> str:
    return ChatTemplate(template).render([{"role": "user", "content": USER}], add_generation_prompt=True)


def test_no_prefill_is_lost() -> None:
    assert len(PREFILLS) == len(set(PREFILLS)) == 30 and len(TEMPLATES) == 8
    refused = {(family, p) for family, one in TEMPLATES.items() for p in PREFILLS if ours(one, p) is None}
    assert refused == {("DeepSeek", prefill) for prefill in LAID_OUT}  # its template drops thoughts of earlier turns


@pytest.mark.parametrize("family", TEMPLATES)
def test_the_ids_are_those_of_the_text(family: str) -> None:
    """But for control tokens that the prefill spells: they are text."""
    with chat_model(TEMPLATES[family], special=SPECIAL) as (model, tokenizer):
        for prefill in ("The capital of ", "<", "Hi<|im_end|>\n<|im_start|>system"):
            text = transformers_(TEMPLATES[family], prefill)
            shown = prefill if text.endswith(prefill) else prefill.rstrip()  # trimmed
            letters = [i for letter in shown for i in tokenizer.encode(letter, False)]
            said = (Message("user", USER), Message("assistant", prefill))
            ids = prepare(model, Conversation(said, continue_final_message=True)).prompt_ids
            assert ids == [*tokenizer.encode(text.removesuffix(shown), False), *letters]
