"""Chromium, used through its DevTools protocol by tests of pages.

https://chromedevtools.github.io/devtools-protocol/, over a pipe: messages are JSON that ends in a
zero byte, read by the browser from file 3 and written to file 4.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
BROWSED = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium to open the page in")


class Browser:
    """A headless browser with one page."""

    def __init__(self, profile: Path) -> None:
        to_browser, self._out = os.pipe()
        self._in, from_browser = os.pipe()

        def connect() -> None:
            # Copies first: either pipe may already be where the other one has to go.
            read, write = os.dup(to_browser), os.dup(from_browser)
            spare = [os.dup(read), os.dup(write)]
            os.dup2(spare[0], 3)
            os.dup2(spare[1], 4)

        assert CHROMIUM is not None
        flags = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage")
        flags += (
            "--remote-debugging-pipe",
            f"--user-data-dir={profile}",
            "--window-size=1400,1000",
        )
        self._process = subprocess.Popen(
            [CHROMIUM, *flags, "about:blank"],
            close_fds=False,
            preexec_fn=connect,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._buffer, self._last = b"", 0
        self._events: list[dict[str, Any]] = []
        self._session: str | None = None
        targets = self.call("Target.getTargets")["targetInfos"]
        page = next(one["targetId"] for one in targets if one["type"] == "page")
        attached = self.call("Target.attachToTarget", targetId=page, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and wait for its answer; what happens meanwhile is kept."""
        self._last += 1
        message = {"id": self._last, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while (answer := self._receive()).get("id") != self._last:
            self._events.append(answer)
        assert "error" not in answer, answer
        return answer["result"]

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            read = os.read(self._in, 1 << 20)
            assert read, "the browser has closed its pipe"
            self._buffer += read
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def open(self, page: Path, place: str = "") -> None:
        """Load a page, and forget what happened before."""
        self._events.clear()
        # Another place of the same page would not load it again.
        self.call("Page.navigate", url="about:blank")
        self.call("Page.navigate", url=f"{page.as_uri()}#{place}")
        while not self.run("document.readyState === 'complete' && location.protocol === 'file:'"):
            pass

    def run(self, script: str) -> Any:
        """The value of an expression in the page. AssertionError if it throws."""
        made = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in made, made["exceptionDetails"]
        return made["result"].get("value")

    def press(self, *keys: str) -> None:
        """Press and release keys, one after another."""
        for key in keys:
            self.call("Input.dispatchKeyEvent", type="keyDown", key=key)
            self.call("Input.dispatchKeyEvent", type="keyUp", key=key)

    def point(self, selector: str) -> None:
        """Move the mouse over an element."""
        where = f"document.querySelector({json.dumps(selector)})"
        self.run(f"{where}.scrollIntoView({{block: 'center'}})")
        box = self.run(
            f"(({{x, y, width, height}}) => [x + width / 2, y + height / 2])"
            f"({where}.getBoundingClientRect())"
        )
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=box[0], y=box[1])

    def requested(self) -> list[str]:
        """The addresses that the page has asked for since it was opened."""
        sent = [e for e in self._events if e.get("method") == "Network.requestWillBeSent"]
        return [event["params"]["request"]["url"] for event in sent]

    def thrown(self) -> list[Any]:
        """What the page's script has thrown since the page was opened."""
        return [e for e in self._events if e.get("method") == "Runtime.exceptionThrown"]

    def close(self) -> None:
        """End the browser."""
        self._session = None
        self.call("Browser.close")
        self._process.wait(timeout=30)
        os.close(self._out)
        os.close(self._in)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    made = Browser(tmp_path_factory.mktemp("profile"))
    yield made
    made.close()


def elements(browser: Browser, tensor: str, name: str) -> list[int]:
    """The elements of a tensor that have a class, in order."""
    return browser.run(
        f"[...document.querySelectorAll('#tensor-{tensor} i.{name}')].map(c => +c.dataset.n)"
    )


def text(browser: Browser, element: str) -> str:
    return browser.run(f"document.getElementById('{element}').textContent")
