"""The page before a front of several models: a choice of the model, in Chromium."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from fronts import Front, entry, front

pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
from selenium.webdriver.support.ui import Select

from page_browser import Browser, chromium, needs_chromium

pytestmark = needs_chromium


@pytest.fixture(scope="module")
def served() -> Iterator[Front]:
    """In a thread of its own: the browser's calls wait."""
    begun, ends = threading.Event(), asyncio.Event()
    found, loops = list[Front](), list[asyncio.AbstractEventLoop]()

    async def serve() -> None:
        async with front(entry("first"), entry("second")) as at:
            found.append(at)
            loops.append(asyncio.get_running_loop())
            begun.set()
            await ends.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert begun.wait(60)
    yield found[0]
    loops[0].call_soon_threadsafe(ends.set)
    thread.join()


def test_the_chosen_model_is_asked_and_is_kept(served: Front) -> None:
    with chromium() as driver:
        browser = Browser(driver)
        url = str(served.client.base_url).rstrip("/")
        driver.get(url + "/")
        browser.until(lambda: browser.count("#model select"))
        choice = Select(browser.one("#model select"))
        assert [option.text for option in choice.options] == ["first", "second"]
        assert choice.first_selected_option.text == "first" and not served.models.loaded()  # looking loads nothing
        choice.select_by_visible_text("second")
        browser.say("hello")
        browser.until(lambda: [child.name for child in served.models.loaded()] == ["second"])
        driver.refresh()
        browser.until(lambda: browser.count("#model select"))
        assert Select(browser.one("#model select")).first_selected_option.text == "second"
        assert [child.name for child in served.models.loaded()] == ["second"]
