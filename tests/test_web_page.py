"""The web page in a real browser: Chromium, headless, over WebDriver (https://www.w3.org/TR/webdriver2/)."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from server_kit import Running, ScriptedLLM, demo_llm, running

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    not (CHROMIUM and DRIVER), reason="Chromium and chromedriver are not installed (Debian: chromium, chromium-driver)"
)
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
ENTER = "\ue007"
ARGUMENTS = [
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-dev-shm-usage",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip


class Browser:
    def __init__(self, port: int, profile: Path) -> None:
        self._http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60)
        self._wait(lambda: self._http.get("/status").json()["value"]["ready"])
        options = {"binary": CHROMIUM, "args": [*ARGUMENTS, f"--user-data-dir={profile}"]}
        log = {"goog:loggingPrefs": {"browser": "ALL"}}
        capabilities = {"alwaysMatch": {"browserName": "chrome", "goog:chromeOptions": options, **log}}
        answer = self._http.post("/session", json={"capabilities": capabilities}).json()["value"]
        self._session = f"/session/{answer['sessionId']}"

    def _wait(self, condition: Callable[[], Any]) -> Any:
        deadline = time.monotonic() + 30
        while True:
            try:
                if value := condition():
                    return value
            except (httpx.TransportError, LookupError):
                pass
            assert time.monotonic() < deadline, "the browser does not get there"
            time.sleep(0.02)

    def call(self, path: str, **body: Any) -> Any:
        answer = self._http.post(self._session + path, json=body).json()["value"]
        if isinstance(answer, dict) and "error" in answer:
            raise LookupError(answer["message"])
        return answer

    def open(self, url: str) -> None:
        self.call("/url", url=url)

    def run(self, script: str) -> Any:
        return self.call("/execute/sync", script=script, args=[])

    def until(self, script: str) -> Any:
        return self._wait(lambda: self.run(f"return {script}"))

    def text(self, selector: str) -> str:
        return self.run(f"return document.querySelector({selector!r})?.textContent")

    def visible(self, selector: str) -> bool:
        return self.run(f"return document.querySelector({selector!r})?.checkVisibility() ?? false")

    def click(self, selector: str) -> None:
        element = self.call("/element", using="css selector", value=selector)[ELEMENT]
        self.call(f"/element/{element}/click")

    def type(self, selector: str, text: str) -> None:
        element = self.call("/element", using="css selector", value=selector)[ELEMENT]
        self.call(f"/element/{element}/value", text=text)

    def complaints(self) -> list[str]:
        """Errors on the page's console: of scripts, of the network, of the content security policy."""
        return [entry["message"] for entry in self.call("/se/log", type="browser") if entry["level"] == "SEVERE"]

    def close(self) -> None:
        self._http.delete(self._session)
        self._http.close()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    driver = subprocess.Popen([DRIVER or "", f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        one = Browser(port, tmp_path_factory.mktemp("profile"))
        yield one
        one.close()
    finally:
        driver.terminate()
        driver.wait(20)


def test_a_chat_with_the_demo_model(browser: Browser) -> None:
    with running(demo_llm()) as server, server.client() as client:
        browser.open(server.url)
        browser.until("document.getElementById('model').textContent === 'demo'")
        assert not browser.visible("#settings") and not browser.visible("#stop")
        browser.click("#show-settings")
        assert browser.visible("#settings")
        browser.type("#temperature", "0")
        question = "What is 3 + 4?"
        browser.type("#input", question + ENTER)
        browser.until("document.querySelector('.note')?.textContent.includes('tokens')")
        body = {"messages": [{"role": "user", "content": question}], "temperature": 0}
        body |= {"chat_template_kwargs": {"enable_thinking": True}}
        expected = client.post("/v1/chat/completions", json=body).json()
        assert browser.text(".assistant .text") == expected["choices"][0]["message"]["content"]
        assert browser.text(".user") == question
        assert browser.text(".note") == f"{expected['usage']['completion_tokens']} tokens"
        assert "tok/s" in browser.text("#speed") and browser.text("#kv-text").endswith("%")
        assert browser.visible("#send") and not browser.visible("#stop")
        # The second turn knows the first; without thinking, the template closes the block.
        browser.click("#thinking")
        browser.type("#input", "And 4 + 4?" + ENTER)
        browser.until(
            "document.querySelectorAll('.note').length === 2 && document.querySelectorAll('.note')[1].textContent"
        )
        browser.click("#reset")
        assert browser.run("return document.querySelectorAll('.message').length") == 0
        assert browser.complaints() == []


def scripted(browser: Browser, llm: ScriptedLLM, server: Running, text: str = "hi") -> None:
    browser.open(server.url)
    browser.until("document.getElementById('model').textContent === 'demo'")
    browser.type("#input", text + ENTER)


def test_thinking_is_folded_away_and_html_stays_text(browser: Browser) -> None:
    evil = "<img src=x onerror=\"document.title='broken in'\"> **bold**\n\n1 < 2"
    llm = ScriptedLLM(lambda prompt, i: f"<think>\nHm, <b>so</b>.\n</think>\n\n{evil}")
    with running(llm) as server:
        scripted(browser, llm, server)
        browser.until("document.querySelector('.note')?.textContent.includes('tokens')")
        assert browser.text(".assistant .text") == evil and browser.run("return document.title") == "nanoinfer"
        assert browser.text(".thinking") == "Hm, <b>so</b>." and browser.text("summary") == "Thoughts"
        assert browser.run("return document.querySelector('details').open") is False
        browser.click("summary")
        assert browser.run("return document.querySelector('details').open") is True
        assert browser.complaints() == []
        # What is sent back has the answer, and not the thoughts.
        browser.type("#input", "more" + ENTER)
        browser.until(
            "document.querySelectorAll('.note').length === 2 && document.querySelectorAll('.note')[1].textContent"
        )
        assert "1 < 2" in llm.requests[1][0]["prompt"] and "Hm," not in llm.requests[1][0]["prompt"]


def test_stop_ends_the_request_and_keeps_what_there_is(browser: Browser) -> None:
    llm = ScriptedLLM(lambda prompt, i: "word " * 1000)
    llm.pause = 0.02
    with running(llm) as server:
        scripted(browser, llm, server)
        browser.until("document.querySelector('.assistant .text')?.textContent.length > 20")
        assert browser.visible("#stop") and not browser.visible("#send")
        browser.click("#stop")
        browser.until("document.querySelector('.note').textContent === 'stopped'")
        assert browser.text(".assistant .text").startswith("word word") and browser.visible("#send")
        browser._wait(lambda: llm.num_closed == 1)


def test_what_goes_wrong_is_shown(browser: Browser) -> None:
    llm = ScriptedLLM(lambda prompt, i: ["Well, ", RuntimeError("boom")])
    with running(llm) as server:
        scripted(browser, llm, server)
        browser.until("document.querySelector('.error')")
        assert "internal error" in browser.text(".error") and browser.text(".assistant .text").startswith("Well")
        llm.error = ValueError("the engine does not like this")
        browser.type("#input", "x" + ENTER)
        browser.until("document.querySelectorAll('.error').length === 2")
        assert "does not like this" in browser.run("return document.querySelectorAll('.error')[1].textContent")


def test_the_browsers_password_dialog_lets_the_page_in(browser: Browser) -> None:
    llm = ScriptedLLM(lambda prompt, i: "Hello.")
    with running(llm, api_key=["secret"]) as server:
        browser.open(server.url.replace("://", "://user:secret@"))
        browser.until("document.getElementById('model').textContent === 'demo'")
        browser.type("#input", "hi" + ENTER)
        browser.until("document.querySelector('.assistant .text')?.textContent === 'Hello.'")
