"""Pictures on the page, in a real browser before a real server around a tiny Qwen3-VL: pasted, dropped, chosen, sent,
kept and shown again."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pictures import encoded, png
from server_harness import ServerProcess, running, spawn_echo, spawn_real

pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
from PIL import Image

from page_browser import Browser, chromium, needs_chromium
from seeing_model import save_chatting

pytestmark = needs_chromium
PICTURE = encoded(Image.linear_gradient("L").resize((64, 48)).convert("RGB"))
GIVE = """
const [text, kind, name, how] = given;
const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
const files = new DataTransfer();
files.items.add(new File([bytes], name, { type: kind }));
const options = { bubbles: true, cancelable: true };
const pasted = () => new ClipboardEvent("paste", { ...options, clipboardData: files });
const dropped = () => new DragEvent("drop", { ...options, dataTransfer: files });
if (how === "paste") document.getElementById("input").dispatchEvent(pasted());
else document.getElementById("chat").dispatchEvent(dropped());
"""


@pytest.fixture(scope="module")
def driver() -> Iterator[Any]:
    with chromium() as driver:
        yield driver


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("page")
    save_chatting(folder / "model")
    flags = ("--dtype", "float32", "--kt-cpuinfer", "2", "--device", "cpu", "--max-total-tokens", "4096")
    with running(spawn_real(folder / "model", folder / "log", *flags)) as found:
        yield found


@pytest.fixture
def browser(driver: Any, server: ServerProcess) -> Iterator[Browser]:
    driver.get_log("browser")
    browser = Browser(driver)
    browser.open(server)
    browser.up()
    browser.until(lambda: not browser.script("return document.getElementById('attach').hidden"))
    limit = "{system: '', temperature: '0', top_p: '', max_tokens: '4', thinking: '', tools: ''}"
    browser.script(f"localStorage.setItem('tandem.settings', JSON.stringify({limit}))")
    yield browser
    assert not browser.complaints()


def give(browser: Browser, data: bytes, how: str = "paste", kind: str = "image/png", name: str = "a.png") -> None:
    browser.run(GIVE, base64.b64encode(data).decode(), kind, name, how)


def drawn(browser: Browser, selector: str, count: int) -> None:
    """The browser has decoded them."""
    sizes = f"[...document.querySelectorAll('{selector}')].map((each) => each.naturalWidth)"
    browser.until(lambda: browser.script(f"const all = {sizes}; return all.length === {count} && all.every(Boolean)"))


def test_pictures_are_pasted_dropped_and_chosen(browser: Browser, tmp_path: Path) -> None:
    (tmp_path / "c.png").write_bytes(png(32, 32))
    give(browser, PICTURE)
    give(browser, PICTURE, "drop")
    browser.until(lambda: browser.count(".attached .picture") == 2)
    browser.one("#files").send_keys(str(tmp_path / "c.png"))
    drawn(browser, ".attached .picture", 3)
    browser.one(".attached button[aria-label='Remove picture 3']").click()
    drawn(browser, ".attached .picture", 2)
    browser.say("What are these?")
    browser.answered()
    drawn(browser, ".message.user .picture", 2)
    assert browser.count(".attached .picture") == 0 and not browser.text(".message .error").strip()
    assert "4 tokens" in browser.text(".foot").replace("\u00a0", " ")


def test_a_picture_is_kept_and_goes_with_the_next_turn(browser: Browser) -> None:
    give(browser, PICTURE)
    browser.say("")  # a picture alone, and at once
    browser.answered()
    browser.driver.refresh()
    browser.up()
    drawn(browser, ".message.user .picture", 1)
    seen = browser.run(
        "const real = window.fetch; let body; window.fetch = (path, options) => {"
        "if (options.body) body = options.body; return real(path, options); };"
        "document.getElementById('input').value = 'And now?'; document.getElementById('composer').requestSubmit();"
        "while (!body) await new Promise((resolve) => setTimeout(resolve, 10)); return JSON.parse(body).messages;"
    )
    browser.answered(2)
    assert seen[0]["content"] == [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64.b64encode(PICTURE).decode()}"}}
    ]
    assert seen[-1] == {"role": "user", "content": "And now?"}
    assert browser.count(".message.user .picture") == 1 and not browser.text(".message .error").strip()


def test_a_large_picture_is_made_smaller_and_no_picture_is_named(browser: Browser) -> None:
    give(browser, encoded(Image.new("RGB", (3000, 2000), "red")))
    drawn(browser, ".attached .picture", 1)
    assert browser.script("return document.querySelector('.attached .picture').naturalWidth") == 1732
    give(browser, b"no picture", kind="text/plain", name="a.txt")
    browser.until(lambda: "a.txt is no picture that can be read." in browser.text("#banner"))
    assert browser.count(".attached .picture") == 1


def test_a_deleted_conversation_has_no_pictures_left(browser: Browser) -> None:
    give(browser, PICTURE)
    drawn(browser, ".attached .picture", 1)
    browser.say("Look")
    browser.answered()
    left = """
    const done = (asked) => new Promise((resolve) => { asked.onsuccess = () => resolve(asked.result); });
    const open = await done(indexedDB.open("tandem", 1));
    const count = await done(open.transaction("pictures").objectStore("pictures").count());
    open.close();
    return count;
    """
    before = browser.run(left)
    assert before >= 1
    browser.script("window.confirm = () => true")
    delete = "#conversations button[title='Delete']"  # which only a pointer over it shows
    browser.script("document.querySelector(arguments[0]).click()", delete)
    browser.until(lambda: browser.run(left) == before - 1)


def test_a_model_that_reads_text_alone_has_no_button(driver: Any, tmp_path: Path) -> None:
    with running(spawn_echo(tmp_path / "log")) as server:
        browser = Browser(driver)
        browser.open(server)
        browser.up()
        assert browser.script("return document.getElementById('attach').hidden")
        give(browser, PICTURE)
        browser.until(lambda: "This model reads text only." in browser.text("#banner"))
        assert browser.count(".attached .picture") == 0
