"""Chat templates that come with a model: none of them stops the server. Real processes."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from quiet_clock import PATIENCE, QuietClock
from tandem.errors import CheckpointError, RequestError
from tandem.server.errors import ApiError
from tandem.server.prompts import template_process
from tandem.server.prompts.template_process import TemplateProcess
from tandem.text.chat_template import MAX_TEMPLATE_CHARS, ChatTemplate

ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
HOSTILE = {
    "endless loop": ENDLESS,
    "large text": "{{ messages[0].content.center(3000000000) }}",
    "large number": "{{ messages[0].content|length ** (10 ** 9) }}",
    "doubling": "{% set n = namespace(x='abcdefgh') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
}
GOOD = (
    "{% if messages[0].content == 'endless' %}"
    + ENDLESS
    + "{% endif %}{{ bos_token }}{{ messages[0].content }}"
)


def said(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def run(template: ChatTemplate, scenario: Callable[[TemplateProcess], Coroutine[Any, Any, None]]) -> None:
    process = TemplateProcess(template)
    try:
        asyncio.run(scenario(process))
    finally:
        process.close()


@pytest.fixture
def short(monkeypatch) -> None:
    """Patience, in this process; the other's own limit is the usual one."""
    monkeypatch.setattr(template_process, "TEMPLATE_SECONDS", 1.0)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_costs_its_prompt_and_nothing_else(name: str, monkeypatch) -> None:
    async def scenario(process: TemplateProcess) -> None:
        process.start()  # with the usual patience: a busy machine takes seconds
        monkeypatch.setattr(template_process, "TEMPLATE_SECONDS", 1.0)
        ticks, clock = 0, QuietClock()
        rendering = asyncio.create_task(process.render(said("x" * 10)))
        while not rendering.done():
            await asyncio.sleep(0.01)
            ticks += 1
        with pytest.raises((ApiError, RequestError), match="chat template"):
            await rendering
        assert clock.seconds() < 8 and ticks >= min(20, clock.seconds() / 0.05)

    run(ChatTemplate(HOSTILE[name]), scenario)


def test_a_process_that_starts_late_takes_none_of_the_template_s_time(tmp_path: Path, monkeypatch) -> None:
    """A busy machine, or a slow disk, is no fault of the template."""
    gate, late, here = tmp_path / "gate", tmp_path / "python", sys.executable
    late.write_text(f'#!/bin/sh\nwhile [ ! -e {gate} ]; do sleep 0.05; done\nexec {here} "$@"\n')
    late.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(late))
    monkeypatch.setattr(template_process, "TEMPLATE_SECONDS", 0.05)
    process = TemplateProcess(ChatTemplate(GOOD))
    with ThreadPoolExecutor(1) as pool:
        starting = pool.submit(process.start)
        time.sleep(0.3)
        monkeypatch.setattr(template_process, "TEMPLATE_SECONDS", PATIENCE)
        gate.touch()
        starting.result()
    process.close()


@pytest.mark.parametrize("source", ["{{ 10 ** (10 ** 9) }}", "{{ x|no_such_filter }}"])
def test_a_template_that_cannot_be_compiled_is_refused_at_the_start(source: str, short) -> None:
    process = TemplateProcess(ChatTemplate(source))
    with pytest.raises(CheckpointError, match="chat template"):
        process.start()
    process.close()


def test_a_process_that_does_not_begin_is_not_the_templates_fault(monkeypatch) -> None:
    def nothing_comes(_of: object) -> bytes:
        raise TimeoutError

    monkeypatch.setattr(template_process, "receive_frame", nothing_comes)
    process = TemplateProcess(ChatTemplate("x"))
    with pytest.raises(CheckpointError, match=r"did not begin within 60 s .*; the machine may be too busy"):
        process.start()
    process.close()


@pytest.mark.parametrize(
    "source", ["{{ " + "(" * 5_000 + "1" + ")" * 5_000 + " }}", "x" * (MAX_TEMPLATE_CHARS + 1)]
)
def test_templates_that_are_too_deep_or_too_long_are_named(source: str) -> None:
    with pytest.raises(CheckpointError, match="chat template"):
        ChatTemplate(source).compile()


def test_after_a_prompt_that_hung_the_next_is_rendered(monkeypatch) -> None:
    async def scenario(process: TemplateProcess) -> None:
        assert await process.render(said("é\u0000" * 3)) == "<s>" + "é\u0000" * 3
        with monkeypatch.context() as patch, pytest.raises(ApiError, match="did not render"):
            patch.setattr(template_process, "TEMPLATE_SECONDS", 1.0)
            await process.render(said("endless"))
        assert await process.render(said("x" * 5_000_000)) == "<s>" + "x" * 5_000_000

    run(ChatTemplate(GOOD, {"bos_token": "<s>"}), scenario)


def test_a_template_process_that_died_is_replaced() -> None:
    async def scenario(process: TemplateProcess) -> None:
        await process.render(said("a"))
        os.kill(process._process.pid, signal.SIGKILL)
        with pytest.raises(ApiError, match="its process ended"):
            await process.render(said("b"))
        assert await process.render(said("c")) == "c"

    run(ChatTemplate(GOOD), scenario)


def test_complaints_of_a_template_are_the_client_s() -> None:
    async def scenario(process: TemplateProcess) -> None:
        for _ in range(2):
            with pytest.raises(RequestError, match="roles must alternate"):
                await process.render(said("a"))

    run(ChatTemplate("{{ raise_exception('roles must alternate') }}"), scenario)


def test_the_template_for_tools_is_rendered_there_too() -> None:
    async def scenario(process: TemplateProcess) -> None:
        assert await process.render(said("a")) == "plain"
        assert await process.render(said("a"), tools=[{"name": "x"}]) == "x"

    run(ChatTemplate("plain", with_tools="{{ tools[0].name }}"), scenario)


def test_closing_does_not_wait_for_a_prompt_that_hangs() -> None:
    async def scenario(process: TemplateProcess) -> None:
        process.start()
        rendering = asyncio.create_task(process.render(said("endless")))
        await asyncio.sleep(0.1)
        clock = QuietClock()
        process.close()
        with pytest.raises(ApiError):
            await rendering
        assert clock.seconds() < 5

    run(ChatTemplate(GOOD), scenario)


def test_a_prompt_whose_turn_comes_after_the_close_starts_no_process() -> None:
    async def scenario(process: TemplateProcess) -> None:
        process.start()
        turn = threading.Event()
        process._thread.submit(turn.wait, PATIENCE)
        rendering = asyncio.create_task(process.render(said("endless")))
        await asyncio.sleep(0)  # it waits behind the other
        process.close()
        turn.set()
        with pytest.raises(ApiError, match="its process ended"):
            await rendering
        assert process._process is None

    run(ChatTemplate(GOOD), scenario)
