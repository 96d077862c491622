"""A headless Chromium driven over the DevTools protocol, through a pair of pipes: no driver, no port, no package."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import queue
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-dev-shm-usage"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions"),
    *("--remote-debugging-pipe", "--hide-scrollbars", "--force-device-scale-factor=1", "--lang=en"),
)
# Chromium speaks on its descriptors 3 and 4, whichever ours are.
LAUNCH = "import os, sys; a, b = int(sys.argv[1]), int(sys.argv[2]); os.dup2(a, 3); os.dup2(b, 4); " \
    "os.execvp(sys.argv[3], sys.argv[3:])"  # fmt: skip
ANSWER_SECONDS = 30.0


def found() -> str | None:
    """A browser of this machine; None where there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class BrowserError(Exception):
    """What the browser refused, or a script of ours threw."""


class Browser:
    """Commands to a running Chromium and what it tells unasked, by session."""

    def __init__(self, process: subprocess.Popen[bytes], to: int, from_: int) -> None:
        self.process = process
        self._to = to
        self._answers: dict[int, queue.Queue[dict[str, Any]]] = {}
        self._pages: dict[str, Page] = {}
        self._last = 0
        threading.Thread(target=self._read, args=(from_,), daemon=True).start()

    def send(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """A command's result. Raises BrowserError."""
        self._last += 1
        answer = self._answers[self._last] = queue.Queue()
        message = {"id": self._last, "method": method, "params": params}
        if session:
            message["sessionId"] = session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        try:
            told = answer.get(timeout=ANSWER_SECONDS)
        except queue.Empty:
            raise BrowserError(f"{method}: no answer within {ANSWER_SECONDS:g} s") from None
        if "error" in told:
            raise BrowserError(f"{method}: {told['error']['message']}")
        result: dict[str, Any] = told["result"]
        return result

    @contextmanager
    def page(self, *, width: int = 1280, height: int = 900, dark: bool = False, mobile: bool = False) -> Iterator[Page]:
        """A fresh tab with storage of its own."""
        context = self.send("Target.createBrowserContext")["browserContextId"]
        target = self.send("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
        session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = self._pages[session] = Page(self, session)
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.send(f"{domain}.enable")
        page.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        page.send("Emulation.setEmulatedMedia", features=[scheme])
        try:
            yield page
        finally:
            self.send("Target.disposeBrowserContext", browserContextId=context)

    def _read(self, from_: int) -> None:
        rest = b""
        while data := os.read(from_, 2**20):
            *messages, rest = (rest + data).split(b"\0")
            for raw in messages:
                told = json.loads(raw)
                if "id" in told:
                    self._answers.pop(told["id"]).put(told)
                elif (page := self._pages.get(told.get("sessionId", ""))) is not None:
                    page.hear(told["method"], told["params"])
        os.close(from_)


@dataclass
class Page:
    """A tab. `complaints`: everything that its console or the browser had to say against it; `requests`: their URLs."""

    browser: Browser
    session: str
    complaints: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    _loaded: threading.Event = field(default_factory=threading.Event)

    def hear(self, method: str, params: dict[str, Any]) -> None:
        match method:
            case "Page.loadEventFired":
                self._loaded.set()
            case "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])
            case "Runtime.exceptionThrown":
                self.complaints.append(json.dumps(params["exceptionDetails"]))
            case "Runtime.consoleAPICalled":
                self.complaints.append(json.dumps(params["args"]))
            case "Log.entryAdded":
                self.complaints.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
            case "Page.javascriptDialogOpening":
                self.complaints.append(f"a dialog: {params['message']}")

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        return self.browser.send(method, self.session, **params)

    def open(self, url: str) -> None:
        """Go there, and wait until all of it is loaded."""
        self._loaded.clear()
        self.send("Page.navigate", url=url)
        assert self._loaded.wait(ANSWER_SECONDS), f"{url} does not load"

    def do(self, script: str) -> Any:
        """The value of an expression in the page; promises are awaited. Raises BrowserError where it throws."""
        told = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in told:
            raise BrowserError(json.dumps(told["exceptionDetails"])[:2000])
        return told["result"].get("value")

    def until(self, script: str, seconds: float = 20.0) -> None:
        """Wait for the expression to be true (an element is); fails after the given time."""
        deadline = time.monotonic() + seconds
        while not self.do(f"!!({script})"):
            if time.monotonic() > deadline:
                raise AssertionError(f"not true within {seconds} s: {script}\n{self.do('document.body.innerText')}")
            time.sleep(0.05)

    def write(self, selector: str, text: str) -> None:
        """Type into a field, as a person does."""
        self.do(f"document.querySelector({json.dumps(selector)}).focus()")
        self.send("Input.insertText", text=text)

    def click(self, selector: str) -> None:
        self.do(f"document.querySelector({json.dumps(selector)}).click()")

    def picture(self, path: Path, height: int | None = None) -> None:
        """A PNG of the page: all of it, or its first pixels."""
        size = self.send("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": height or size["height"], "scale": 1}
        told = self.send("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(told["data"]))


@contextmanager
def running_browser(path: str, profile: Path) -> Iterator[Browser]:
    """The browser at that path, with an empty profile; ended with its children at the end."""
    ours, theirs = _pipe(), _pipe()  # what it reads, what it writes
    command = [sys.executable, "-c", LAUNCH, str(ours[0]), str(theirs[1]), path, *FLAGS, f"--user-data-dir={profile}"]
    with (profile.parent / "browser.log").open("wb") as log:
        process = subprocess.Popen(
            command, pass_fds=(ours[0], theirs[1]), stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
    os.close(ours[0])
    os.close(theirs[1])
    browser = Browser(process, ours[1], theirs[0])
    try:
        yield browser
        browser.send("Browser.close")
        process.wait(20)
    finally:
        os.close(ours[1])
        process.kill()
        process.wait()


def _pipe() -> tuple[int, int]:
    """Descriptors that are neither 3 nor 4."""
    pair = os.pipe()
    high = tuple(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in pair)
    for end in pair:
        os.close(end)
    return high[0], high[1]
