"""A headless Chromium, driven over its pipe by the DevTools protocol: no driver, no package, no port."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage"),
    *("--remote-debugging-pipe", "--hide-scrollbars", "--force-color-profile=srgb"),
)
PATIENCE = 20.0


def found() -> str | None:
    """Find the program; None where there is none."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Tab:
    """One page. `errors`: what its console called an error, and exceptions nobody caught; `asked`: every URL."""

    def __init__(self, reader: int, writer: int) -> None:
        self._reader, self._writer, self._rest = reader, writer, b""
        self._numbers = itertools.count(1)
        self.errors: list[str] = []
        self.asked: list[str] = []
        self.session = ""
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        os.write(self._writer, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            answer = self._next(end - time.monotonic())
            if answer is not None and answer.get("id") == number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]
        raise TimeoutError(method)

    def _next(self, seconds: float) -> dict[str, Any] | None:
        while b"\0" not in self._rest:
            if not select.select([self._reader], [], [], max(seconds, 0))[0]:
                return None
            piece = os.read(self._reader, 1 << 20)
            assert piece, "the browser went away"
            self._rest += piece
        line, _, self._rest = self._rest.partition(b"\0")
        message = json.loads(line)
        self._note(message.get("method"), message.get("params", {}))
        return message

    def _note(self, method: str | None, params: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description") or details["text"])
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.errors.append(" ".join(str(a.get("value", a.get("description"))) for a in params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.errors.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
        elif method == "Network.requestWillBeSent":
            self.asked.append(params["request"]["url"])

    def show(self, width: int, height: int = 900, *, dark: bool = False, still: bool = False) -> None:
        """Set the window's size and the user's preferences."""
        self.send(
            "Emulation.setDeviceMetricsOverride",
            **{"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500},
        )
        features = [
            {"name": "prefers-color-scheme", "value": "dark" if dark else "light"},
            {"name": "prefers-reduced-motion", "value": "reduce" if still else "no-preference"},
        ]
        self.send("Emulation.setEmulatedMedia", features=features)

    def leave(self) -> None:
        """Replace the page by a blank one, then forget its errors and requests, late ones included."""
        self.send("Page.navigate", url="about:blank")
        self.until("location.href === 'about:blank' && document.readyState === 'complete'")
        self.errors.clear()
        self.asked.clear()

    def go(self, url: str) -> None:
        self.send("Page.navigate", url=url)
        self.until("document.readyState === 'complete'")

    def run(self, script: str) -> Any:
        """Evaluate an expression and await its value; an exception fails the test."""
        answer = self.send("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def until(self, condition: str, seconds: float = PATIENCE) -> Any:
        """Wait for the first true value of an expression."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            with contextlib.suppress(AssertionError):
                if value := self.run(condition):
                    return value
            time.sleep(0.05)
        raise AssertionError(f"never came true: {condition}; errors: {self.errors}")

    def type(self, text: str) -> None:
        """Into what has the focus."""
        self.send("Input.insertText", text=text)

    def press(self, key: str) -> None:
        code = {"Enter": 13, "Tab": 9, "ArrowRight": 39, "ArrowLeft": 37}[key]
        common = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        text = {"text": "\r"} if key == "Enter" else {}
        self.send("Input.dispatchKeyEvent", type="keyDown", **common, **text)
        self.send("Input.dispatchKeyEvent", type="keyUp", **common)

    def drag(self, points: list[tuple[float, float]]) -> None:
        """With the left button, through these places of the window."""
        for index, (x, y) in enumerate(points):
            kind = "mousePressed" if index == 0 else "mouseMoved"
            self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", buttons=1, clickCount=1)
        x, y = points[-1]
        self.send("Input.dispatchMouseEvent", type="mouseReleased", x=x, y=y, button="left", clickCount=1)

    def picture(self, path: Path, *, whole: bool = True) -> None:
        size = self.run("[innerWidth, document.documentElement.scrollHeight]") if whole else None
        area = {"clip": {"x": 0, "y": 0, "width": size[0], "height": size[1], "scale": 1}} if size else {}
        answer = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=whole, **area)
        path.write_bytes(base64.b64decode(answer["data"]))


@contextlib.contextmanager
def browser() -> Iterator[Tab]:
    """Start a browser with an empty profile; end it at exit."""
    program = found()
    assert program is not None
    to_read, to_write = os.pipe()
    from_read, from_write = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:

        def place() -> None:
            """Connect the protocol to descriptors 3 and 4."""
            reader, writer = os.dup(to_read), os.dup(from_write)
            os.dup2(reader, 3)
            os.dup2(writer, 4)

        with subprocess.Popen(
            [program, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            close_fds=False,
            preexec_fn=place,  # noqa: PLW1509
        ) as process:
            os.close(to_read)
            os.close(from_write)
            try:
                yield Tab(from_read, to_write)
            finally:
                os.close(to_write)
                os.close(from_read)
                try:
                    process.wait(5)
                except subprocess.TimeoutExpired:
                    process.kill()
