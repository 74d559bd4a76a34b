"""The page in a real headless Chromium, driven through chromedriver's WebDriver protocol. Skipped where there is none."""

from __future__ import annotations

import base64
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from .conftest import ServerProcess

ENTER = "\ue007"
pytestmark = pytest.mark.skipif(
    not (shutil.which("chromedriver") and shutil.which("chromium")), reason="needs chromium and chromedriver (Debian: chromium-driver)"
)


class Browser:
    """The few WebDriver commands that are needed."""

    def __init__(self, url: str) -> None:
        arguments = ["--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1100,700", "--disable-dev-shm-usage"]
        options = {"args": arguments, "binary": shutil.which("chromium")}
        capabilities = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        answer = httpx.post(f"{url}/session", json={"capabilities": {"alwaysMatch": capabilities}}, timeout=60)
        assert answer.status_code == 200, answer.text
        self._session = f"{url}/session/{answer.json()['value']['sessionId']}"

    def command(self, method: str, path: str, body: Any = None) -> Any:
        answer = httpx.request(method, self._session + path, json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        return answer.json()["value"]

    def script(self, source: str) -> Any:
        return self.command("POST", "/execute/sync", {"script": source, "args": []})

    def type(self, selector: str, text: str) -> None:
        element = self.command("POST", "/element", {"using": "css selector", "value": selector})
        self.command("POST", f"/element/{next(iter(element.values()))}/value", {"text": text})

    def wait_for(self, condition: str) -> None:
        deadline = time.monotonic() + 30
        while not self.script(f"return {condition}"):
            assert time.monotonic() < deadline, f"{condition} never became true:\n{self.script('return document.body.innerText')}"
            time.sleep(0.05)


@pytest.fixture
def browser() -> Iterator[Browser]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    driver = subprocess.Popen(["chromedriver", f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            httpx.get(f"{url}/status", timeout=5)
            break
        except httpx.TransportError:
            time.sleep(0.05)
    made = Browser(url)
    yield made
    made.command("DELETE", "")
    driver.terminate()
    driver.wait(10)


def test_the_page_answers_shows_timings_and_live_numbers(server: ServerProcess, browser: Browser, tmp_path):
    browser.command("POST", "/url", {"url": server.url + "/"})
    browser.wait_for("document.getElementById('state').textContent === 'ready'")
    browser.type("#temperature", "0")
    browser.type("#text", "On which continent is Nepal?" + ENTER)
    browser.wait_for("[...document.querySelectorAll('.note')].some(n => n.textContent.includes('tokens in'))")
    assert browser.script("return document.querySelector('.turn.assistant .text').textContent") == "Nepal is in Asia."
    note = browser.script("return document.querySelector('.note').textContent")
    for part in ("17 tokens in", "8 out", "prefill", "decode", "rows 8 of "):
        assert part in note
    browser.type("#text", "And what is the opposite of strong?" + ENTER)
    browser.wait_for("document.querySelectorAll('.turn.assistant .note')[1]?.textContent.includes('out')")
    browser.wait_for("document.getElementById('rows').textContent !== '0 %'")
    assert browser.script("return document.getElementById('model').textContent") == "tiny-e"
    (tmp_path / "page.png").write_bytes(base64.b64decode(browser.command("GET", "/screenshot")))
    errors = [entry for entry in browser.command("POST", "/se/log", {"type": "browser"}) if entry["level"] == "SEVERE"]
    assert not errors


def test_the_page_shows_an_error_in_words(server: ServerProcess, browser: Browser):
    browser.command("POST", "/url", {"url": server.url + "/"})
    browser.type("#max", "1")
    browser.script("document.getElementById('max').value = -5")
    browser.type("#text", "hello" + ENTER)
    browser.wait_for("document.querySelector('.error')?.textContent.includes('max_tokens')")
