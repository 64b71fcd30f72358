"""The page in Chromium, driven by Selenium: a window that waits for what it looks for."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.wait import WebDriverWait

from quiet_clock import PATIENCE
from server_harness import ServerProcess

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
CHROMEDRIVER = shutil.which("chromedriver")
WAIT_SECONDS = PATIENCE
needs_chromium = pytest.mark.skipif(
    not (CHROMIUM and CHROMEDRIVER), reason="chromium and chromedriver are not installed"
)


@contextmanager
def chromium() -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    for flag in ("headless=new", "no-sandbox", "disable-gpu", "disable-dev-shm-usage", "window-size=1440,900"):
        options.add_argument(f"--{flag}")
    options.binary_location = CHROMIUM
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(CHROMEDRIVER))
    driver.set_script_timeout(WAIT_SECONDS)
    try:
        yield driver
    finally:
        driver.quit()


class Browser:
    """One window. It waits for what it looks for."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def until(self, true: Callable[[], Any]) -> Any:
        return WebDriverWait(self.driver, WAIT_SECONDS, 0.05).until(lambda _: true())

    def open(self, server: ServerProcess) -> None:
        """With an empty storage."""
        self.driver.get(server.url + "/page/icon.svg")
        self.script("localStorage.clear(); sessionStorage.clear()")
        self.driver.get(server.url + "/")

    def script(self, source: str, *arguments: Any) -> Any:
        return self.driver.execute_script(source, *arguments)

    def one(self, selector: str) -> Any:
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def count(self, selector: str) -> int:
        return len(self.driver.find_elements(By.CSS_SELECTOR, selector))

    def text(self, selector: str) -> str:
        """Text of all of them, read at one moment: the page draws anew while we look."""
        source = "return [...document.querySelectorAll(arguments[0])].map((n) => n.innerText).join('\\n')"
        return str(self.script(source, selector))

    def up(self) -> None:
        self.until(lambda: self.script("return document.getElementById('status').dataset.state") == "up")

    def say(self, text: str) -> None:
        self.script("document.getElementById('input').value = arguments[0]", text)
        self.one("#input").send_keys(Keys.ENTER)

    def answered(self, times: int = 1) -> None:
        self.until(lambda: self.count(".message.assistant:not(.running) .foot button") >= 1)
        self.until(lambda: self.count(".message.assistant:not(.running)") >= times)

    def run(self, source: str, *arguments: Any) -> Any:
        """Result of a function's body that may await; an error is raised here."""
        code = f"""
        const done = arguments[arguments.length - 1];
        const answer = (async (...given) => {{ {source} }})(...arguments);
        answer.then((value) => done([value]), (error) => done(String(error.stack)));
        """
        answer = self.driver.execute_async_script(code, *arguments)
        assert isinstance(answer, list), answer
        return answer[0]

    def complaints(self) -> list[str]:
        """Complaints of the page's own code and of its security policy."""
        logs = self.driver.get_log("browser")
        return [each["message"] for each in logs if each["source"] != "network"]
