"""The page in a real browser: Chromium, driven by Selenium, before a real server and a real engine process.

Debian: `apt-get install chromium chromium-driver`. Accessibility is checked by axe-core, where
`npm install --no-save axe-core` has put it.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from server_harness import ServerProcess, echo_code, running, spawn, spawn_echo

pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from page_browser import Browser, chromium, needs_chromium

AXE = Path(__file__).parents[2] / "node_modules" / "axe-core" / "axe.min.js"
pytestmark = needs_chromium
LONG = "a long story, " * 25  # the echo of it takes seconds, and is held where it must not end before we have looked
SHORTER = "a long story, " * 10
EVERYTHING = (
    "# Title\n\n- a list\n\n```c\nint x;\n```\n\n| a |\n| - |\n| 1 |\n\n> said\n\n[x](https://ok.example)\n\n"
    "$x$\n\n\\[" + "x + " * 100 + "y\\]"
)


@pytest.fixture(scope="module")
def driver() -> Iterator[Any]:
    with chromium() as driver:
        yield driver


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("page")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ServerProcess]:
    flags = {"expert_distribution_recorder_dir": str(folder)}
    with running(spawn_echo(folder / "log", "load_routed", **flags)) as found:
        yield found


@pytest.fixture
def held(folder: Path) -> Iterator[Path]:
    """While this file is there, answers stand still at their twentieth token."""
    (file := folder / "held").touch()
    yield file
    file.unlink(missing_ok=True)


@pytest.fixture
def browser(driver: Any, server: ServerProcess) -> Iterator[Browser]:
    driver.get_log("browser")
    browser = Browser(driver)
    browser.open(server)
    browser.up()
    yield browser
    assert not browser.complaints()


def test_a_chat_is_streamed_drawn_and_kept(browser: Browser, held: Path) -> None:
    browser.say("**bold** and `code`\n\n| a | b |\n| - | -: |\n| 1 | 2 |\n\n```py\nx = 1\n```")
    browser.until(lambda: "bold" in browser.text(".message.assistant.running > .text"))
    held.unlink()
    browser.answered()
    assert browser.text(".message.assistant strong") == "bold"
    assert browser.text(".message.assistant td") == "1\n2"
    assert browser.text(".message.assistant pre") == "x = 1" and "py" in browser.text(".code-head")
    assert "tokens/s" in browser.text(".message.assistant .foot")
    browser.one("#input").send_keys("two", Keys.SHIFT, Keys.ENTER, Keys.NULL, "lines", Keys.ENTER)
    browser.answered(2)
    assert browser.text(".message.user:nth-last-child(2) .said") == "two\nlines"
    browser.driver.refresh()
    browser.up()
    assert browser.count(".message") == 4 and browser.text(".message.assistant strong") == "bold"


def test_it_is_painted_within_a_second(browser: Browser, server: ServerProcess) -> None:
    """The best of five: the machine may be busy."""
    source = "return performance.getEntriesByName('first-contentful-paint').map((entry) => entry.startTime)[0]"
    seconds = []
    for _ in range(5):
        browser.driver.get(server.url + "/")
        browser.up()
        seconds.append(browser.until(lambda: browser.script(source)) / 1000)
    assert min(seconds) < 1.0, seconds


def test_several_conversations(browser: Browser) -> None:
    browser.say("the first")
    browser.answered()
    browser.one("body").send_keys(Keys.CONTROL, "k")
    assert browser.count(".message") == 0
    browser.say("the second")
    browser.answered()
    assert browser.text("#conversations .open") == "the second\nthe first"
    browser.driver.find_elements(By.CSS_SELECTOR, "#conversations .open")[1].click()
    assert browser.text(".message.assistant > .text") == "the first"
    browser.script("window.confirm = () => true")
    browser.one("#conversations button[aria-label='Delete the first']").click()
    assert browser.text("#conversations .open") == "the second"
    assert browser.text(".message.assistant > .text") == "the second"
    assert browser.script("return Object.keys(localStorage).filter((k) => k.startsWith('tandem.chat')).length") == 1


@pytest.mark.parametrize("how", ["escape", "button"])
def test_stop_ends_the_answer_here_and_in_the_engine(
    browser: Browser, server: ServerProcess, held: Path, how: str
) -> None:
    browser.say(LONG)
    browser.until(lambda: "a long" in browser.text(".message.assistant > .text"))
    if how == "escape":
        browser.one("#input").send_keys(Keys.ESCAPE)
    else:
        browser.one("#stop").click()
    browser.answered()
    held.unlink()
    said = browser.text(".message.assistant > .text")
    assert "stopped" in browser.text(".foot") and 0 < len(said) < len(LONG.strip())
    browser.until(lambda: server.info()["stats"]["running"] == 0)
    assert server.info()["stats"]["aborted_requests"] > 0
    browser.say("next")
    browser.answered(2)
    assert browser.text(".message:last-child > .text") == "next"


def test_nothing_that_a_model_writes_runs(browser: Browser) -> None:
    browser.say(
        "<script>pwned = 1</script><img src=x onerror='pwned = 1'>\n\n[a](javascript:pwned=1) ![b](http://x.example/y) "
        "[c](data:text/html,x) [d](https://ok.example) <a href='javascript:1'>e</a>"
    )
    browser.answered()
    links = browser.script(
        "return [...document.querySelectorAll('.text a')].map((a) => [a.href, a.rel, a.target])"
    )
    safe = ["noopener noreferrer", "_blank"]
    assert links == [["http://x.example/y", *safe], ["https://ok.example/", *safe]]
    assert browser.count(".text script, .text img, .text [onerror]") == 0
    assert browser.script("return typeof pwned") == "undefined"
    assert "<script>pwned = 1</script>" in browser.text(".message.assistant > .text")


def test_reasoning_and_tool_calls_are_shown(browser: Browser) -> None:
    """The echo writes neither, so the page is given a conversation that has them."""
    call = {"id": "call_1", "name": "weather", "arguments": '{"city": "Oslo"}'}
    said = {"role": "assistant", "content": "", "reasoning": "They want **weather**.", "calls": [call]}
    kept = {"id": "1", "title": "", "changed": 1, "messages": [{"role": "user", "content": "Oslo?"}, said]}
    browser.script("localStorage.setItem('tandem.chat.1', JSON.stringify(arguments[0]))", kept)
    browser.driver.refresh()
    browser.up()
    assert browser.count("details.reasoning:not([open])") == 1
    browser.one("details.reasoning summary").click()
    assert browser.text("details.reasoning strong") == "weather"
    assert "weather" in browser.text(".call") and '"city": "Oslo"' in browser.text(".call pre")
    browser.one(".result-form input").send_keys("rain", Keys.ENTER)
    browser.answered(2)
    assert browser.text(".message.tool .result") == "rain"
    assert browser.text(".message:last-child > .text") == "rain"


def test_settings_are_sent_and_kept(browser: Browser) -> None:
    browser.one("#open-settings").click()
    browser.one("[name=max_tokens]").send_keys("3")
    browser.one("[name=tools]").send_keys("no JSON")
    browser.one("#settings .primary").click()
    assert browser.text("#settings-error") == "The tools are no JSON list."
    browser.one("[name=tools]").clear()
    browser.one("#settings .primary").click()
    browser.say("abcdefgh")
    browser.answered()
    assert browser.text(".message.assistant > .text") == "abc"
    assert "cut at max tokens" in browser.text(".foot")
    browser.driver.refresh()
    browser.one("#open-settings").click()
    assert browser.one("[name=max_tokens]").get_property("value") == "3"
    browser.one("#settings .primary").click()


def test_the_map_shows_traffic_sides_and_exchanges(browser: Browser, server: ServerProcess) -> None:
    browser.one("#to-live").click()
    browser.script("document.getElementById('input').value = arguments[0]", LONG)
    browser.script("document.getElementById('composer').requestSubmit()")
    browser.until(lambda: "→ GPU" in browser.text("#moves") and "→ CPU" in browser.text("#moves"))
    browser.until(lambda: browser.text(".tile").count("\n") > 6)
    tiles = browser.text(".tile")
    browser.until(lambda: re.search(r"GPU computes, CPU waits \d+ %.*CPU experts \d+ %.*rest \d+ %", split(browser)))
    assert "On the GPU" in tiles and "of routed tokens" in tiles and "Exchanges" in tiles
    assert "on the GPU" in browser.text("#legend") and "in CPU memory" in browser.text("#legend")
    assert browser.script(_COLOURS) > 20  # shades of two ramps, not one flat field
    browser.one("#map").send_keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT, Keys.ARROW_DOWN)
    assert browser.text("#under").startswith("Layer 2, expert 1: ")
    assert "6 layers × 32 experts" in browser.one("#map").get_attribute("aria-label")
    browser.script("document.getElementById('stop').click()")  # a page that is left goes on in Chromium for a minute
    browser.until(lambda: server.info()["stats"]["running"] == 0)


def split(browser: Browser) -> str:
    """What a step's time was spent on, read at once: the page draws it anew each second."""
    source = "return [...document.querySelectorAll('.tile .names span')].map((each) => each.innerText).join(' ')"
    return str(browser.script(source))


def test_memory_and_plan_are_shown_with_their_reasons(browser: Browser) -> None:
    browser.one("#to-live").click()
    browser.until(lambda: "kernel tier" in browser.text("#plan"))
    assert browser.text("#plan tr").split("\t") == ["kernel tier", "avx2", "the best that this CPU has"]
    ram, vram = (each.text for each in browser.driver.find_elements(By.CSS_SELECTOR, "#memory .ledger"))
    assert ram.startswith("RAM") and "7.0 GiB of 20.0 GiB, 24.0 GiB were free" in ram
    assert "experts" in ram and "6.0 GiB" in ram and "of the CPU" in ram
    assert vram.startswith("VRAM") and "GPU experts" in vram


_COLOURS = """
const map = document.getElementById("map"), brush = map.getContext("2d"), found = new Set();
const data = brush.getImageData(0, 0, map.width, map.height).data;
for (let i = 0; i < data.length; i += 4) found.add((data[i] << 16) | (data[i + 1] << 8) | data[i + 2]);
return found.size;
"""


def test_the_page_goes_on_after_the_engine_has_died(browser: Browser, server: ServerProcess, held: Path) -> None:
    restarts = server.info()["engine_restarts"]
    browser.say(SHORTER)
    browser.until(lambda: "a long" in browser.text(".message.assistant > .text"))
    os.kill(server.engine_pid(), signal.SIGKILL)
    held.unlink()
    browser.until(lambda: "is being restarted" in browser.text(".message .error"))
    assert "a long" in browser.text(".message.assistant > .text")
    browser.until(lambda: server.healthy() and server.info()["engine_restarts"] == restarts + 1)
    browser.up()
    browser.script("document.querySelector('.foot button:last-of-type').click()")
    browser.until(lambda: browser.text(".message.assistant:not(.running) > .text").strip() == SHORTER.strip())
    assert browser.count(".message") == 2 and not browser.text(".message .error")


def test_the_key_is_asked_for_and_kept_while_the_server_is_away(driver: Any, tmp_path: Path) -> None:
    """In this tab. Another server on the same port is as after `kt serve` was started anew."""
    server = with_key(spawn_echo(tmp_path / "log", "idle_engine:load_prompts", api_key="s3cret"))
    with running(server):
        browser = Browser(driver)
        browser.open(server)
        browser.until(lambda: browser.one("#key").is_displayed())
        browser.one("[name=key]").send_keys("wrong", Keys.ENTER)
        browser.until(lambda: browser.one("#key-error").is_displayed())
        browser.one("[name=key]").send_keys("s3cret", Keys.ENTER)
        browser.up()
        browser.say("hello")
        browser.answered()
        assert browser.text(".message.assistant > .text") == "hello"
        driver.refresh()
        browser.up()
        assert not browser.one("#key").is_displayed()
        assert "s3cret" not in browser.script("return JSON.stringify(localStorage)")
        assert "s3cret" not in server.log.read_text()
    browser.until(lambda: "cannot be reached" in browser.text("#banner"))
    assert not browser.one("#send").is_enabled()
    port, log = int(server.url.rpartition(":")[2]), tmp_path / "again"
    again = spawn(["-c", echo_code("idle_engine:load_prompts", port=port, api_key="s3cret")], log)
    with running(with_key(ServerProcess(again, port, log))):
        browser.up()
        browser.until(lambda: not browser.text("#banner"))
        browser.say("back")
        browser.answered(2)
        assert browser.text(".message:last-child > .text") == "back"
    driver.get("about:blank")


def with_key(server: ServerProcess) -> ServerProcess:
    server.headers = {"Authorization": "Bearer s3cret"}
    return server


WIDE, PHONE = (1440, 900), (390, 844)


@pytest.mark.parametrize(
    ("size", "theme"),
    [
        pytest.param(WIDE, "light", id="wide-light"), pytest.param(PHONE, "dark", id="phone-dark"),
        pytest.param(WIDE, "dark", id="wide-dark", marks=pytest.mark.full),
        pytest.param(PHONE, "light", id="phone-light", marks=pytest.mark.full),
    ],
)  # fmt: skip
def test_nothing_is_in_the_way_of_anybody(browser: Browser, size: tuple[int, int], theme: str) -> None:
    """axe-core finds nothing serious, and nothing is wider than the window."""
    if not AXE.exists():
        pytest.skip("axe-core is not installed: npm install --no-save axe-core")
    browser.driver.set_window_size(*size)
    try:
        browser.script("document.documentElement.dataset.theme = arguments[0]", theme)
        browser.say(EVERYTHING)
        browser.answered()
        browser.until(lambda: browser.count(".katex") == 2)
        _check(browser)
        browser.one("#to-live").click()
        browser.until(lambda: browser.text("#plan"))
        _check(browser)
        browser.script("document.querySelector('#plan b').textContent = '1250 pages × 16 tokens = 439 MiB'")
        assert browser.script("const p = document.querySelector('#plan'); return p.scrollWidth <= p.clientWidth")
        browser.one("#open-settings").click()
        _check(browser)
        browser.one("#settings .primary").click()
    finally:
        browser.driver.set_window_size(*WIDE)


def _check(browser: Browser) -> None:
    source = "const done = arguments[0]; axe.run().then((found) => done(found.violations), (e) => done(String(e)))"
    browser.driver.execute_cdp_cmd("Page.setBypassCSP", {"enabled": True})
    browser.script(AXE.read_text() + "; window.axe = axe")
    found = browser.driver.execute_async_script(source)
    assert isinstance(found, list), found
    serious = [
        (each["id"], [node["html"][:160] for node in each["nodes"]])
        for each in found
        if each["impact"] in ("serious", "critical")
    ]
    assert not serious
    assert browser.script("return document.documentElement.scrollWidth <= innerWidth")
