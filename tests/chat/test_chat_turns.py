"""Turns that a chat template refuses or would not show are given to it in a way that it takes."""

from __future__ import annotations

from typing import Any

import pytest

from agent_turns import AGENTS, CALL, texts_in
from tandem.server.chat.conversation import Message
from tandem.server.chat.template_fit import Render, TemplateFit
from tandem.server.chat.turns import TurnOrders, as_taken, fit_turns
from tandem.text.chat_template import ChatTemplate

_NO_MORE = "{% if message.role == 'system' and not loop.first %}{{ raise_exception('only first') }}{% endif %}"
_ONLY_FIRST = "{% if message.role != 'system' or loop.first %}"
_ALTERNATE = (
    "{% if message.role in ('system', 'tool') or message.tool_calls %}"
    "{% elif (message.role == 'user') != (ns.turn % 2 == 0) %}{{ raise_exception('they must alternate') }}"
    "{% else %}{% set ns.turn = ns.turn + 1 %}{% endif %}"
)
_TURN = "<|turn|>{{ message.role }}\n{{ message.content }}<|done|>\n"


def template(before: str = "", after: str = "") -> str:
    loop = f"{{% for message in messages %}}{before}{_TURN}{after}{{% endfor %}}"
    return f"{{% set ns = namespace(turn=0) %}}{loop}"


TEMPLATES = {
    "all": (template(), TurnOrders()),
    "one that refuses more system messages": (template(_NO_MORE), TurnOrders(more_system=False)),
    "one that shows one": (template(_ONLY_FIRST, "{% endif %}"), TurnOrders(more_system=False)),
    "one without any": (template(_NO_MORE.replace("not loop.first", "true")), TurnOrders(False, False)),
    "one with alternating roles": (template(_NO_MORE + _ALTERNATE), TurnOrders(True, False, False, False)),
    "one that refuses everything": ("{{ raise_exception('no') }}", TurnOrders()),
}


def renderer(source: str) -> Render:
    one = ChatTemplate(source, {})

    def render(messages: list[dict[str, Any]], add_generation_prompt: bool = True, **variables: Any) -> str:
        return one.render(messages, add_generation_prompt=add_generation_prompt, **variables)

    return render


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_a_template_takes_is_found(name):
    source, expected = TEMPLATES[name]
    assert fit_turns(renderer(source)) == expected


@pytest.mark.parametrize("name", list(TEMPLATES)[:-1])
def test_no_text_of_an_agent_is_refused_or_lost(name):
    places = texts_in(renderer(TEMPLATES[name][0]), TemplateFit())
    assert min(places) >= 0 and places == sorted(places)


def test_what_it_takes_is_left_alone():
    assert as_taken(AGENTS, TurnOrders()) == AGENTS
    roles = [message.role for message in as_taken(AGENTS, TurnOrders(more_system=False))]
    assert roles == "system user user user assistant tool user assistant assistant user user".split()
    roles = [message.role for message in as_taken(AGENTS, TurnOrders(True, False, False, False))]
    assert roles == "system user assistant tool assistant user".split()


def test_neighbours_keep_calls_reasoning_and_names():
    said = [
        Message("user", "One.", name="Ann"),
        Message("user", "Two.", name="Bob"),
        Message("assistant", "Hm.", reasoning="So."),
        Message("assistant", "", reasoning="Well.", tool_calls=(CALL,)),
    ]
    user, assistant = as_taken(said, TurnOrders(repeated=False))
    assert (user.content, user.name) == ("One.\n\nTwo.", None)
    assert (assistant.content, assistant.reasoning, assistant.tool_calls) == ("Hm.", "So.\n\nWell.", (CALL,))
