"""A headless Chromium that a test controls while a page is open, by its debugging pipe: JSON messages that
end with NUL."""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))),
    None,
)
START = """
import os, sys
for given, number in ((1, 103), (2, 104)):  # first out of the way
    os.dup2(int(sys.argv[given]), number)
os.dup2(103, 3), os.dup2(104, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
"""The browser reads commands from 3 and writes answers to 4."""
OPTIONS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-breakpad")
HEIGHT = 900
KEYS = {"Tab": (9, ""), "Enter": (13, "\r")}
"""Code and text of a key."""


class Browser:
    """One page. `problems` are the errors that its console had."""

    def __init__(self, read_end: int, write_end: int) -> None:
        self._answers, self._commands = os.fdopen(read_end, "rb"), os.fdopen(write_end, "wb", buffering=0)
        self._buffer, self._sent, self._session = b"", 0, {}
        self.problems: list[Any] = []

    def open(self, url: str, *, width: int = 1280, scheme: str = "light") -> None:
        """Open a page in a window of that width, which may be narrower than the browser's own can be.
        `scheme`: dark or light."""
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = {
            "sessionId": self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        }
        for domain in ("Runtime", "Log", "Page"):
            self._call(f"{domain}.enable")
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=HEIGHT,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        self._call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self._call("Page.navigate", url=url)
        self.wait_for("document.readyState === 'complete' && location.href !== 'about:blank'")

    def value(self, expression: str) -> Any:
        """The value of an expression in the page."""
        found = self._call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def picture(self, file: Path, height: int = HEIGHT) -> None:
        """Write the first `height` pixels of the page as PNG."""
        width = self.value("innerWidth")
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        shot = self._call("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        file.write_bytes(base64.b64decode(shot["data"]))

    def key(self, name: str) -> None:
        """Press and release a key."""
        code, text = KEYS[name]
        for kind in ("keyDown", "keyUp"):
            self._call(
                "Input.dispatchKeyEvent",
                type=kind,
                key=name,
                code=name,
                windowsVirtualKeyCode=code,
                text=text,
            )

    def wait_for(self, expression: str, seconds: float = 60.0) -> None:
        """Wait until an expression in the page is true."""
        until = time.monotonic() + seconds
        while not self.value(expression):
            assert time.monotonic() < until, f"not true within {seconds} s: {expression}"
            time.sleep(0.1)

    def mouse(self, kind: str, selector: str, share: float) -> None:
        """Send `mousePressed`, `mouseMoved` or `mouseReleased` at a share of the width of an element, which
        is scrolled to."""
        box = (
            f"(() => {{ const own = document.querySelector({json.dumps(selector)}); "
            f"own.scrollIntoView({{block: 'center'}});"
        )
        x, y, width = self.value(
            f"{box} const {{ left, top, width }} = own.getBoundingClientRect(); return [left, top, "
            f"width]; }})()"
        )
        pressed = (
            {"button": "left", "buttons": 1, "clickCount": 1} if kind != "mouseMoved" else {"buttons": 1}
        )
        self._call("Input.dispatchMouseEvent", type=kind, x=x + share * width, y=y + 20, **pressed)

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._sent += 1
        self._commands.write(
            json.dumps({"id": self._sent, "method": method, "params": parameters} | self._session).encode()
            + b"\0"
        )
        while True:
            message = self._read()
            if message.get("id") == self._sent:
                assert "error" not in message, message
                return message["result"]
            if (
                message.get("method") == "Runtime.exceptionThrown"
                or message.get("params", {}).get("entry", {}).get("level") == "error"
            ):
                self.problems.append(message["params"])

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            fresh = os.read(self._answers.fileno(), 65_536)
            assert fresh, "the browser has ended"
            self._buffer += fresh
        text, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(text)

    def close(self) -> None:
        self._commands.close()
        self._answers.close()


def _wait_for_group(group: int, seconds: float = 10.0) -> None:
    """Wait until no process of a killed group is left."""
    until = time.monotonic() + seconds
    with suppress(ProcessLookupError):
        while time.monotonic() < until:
            os.killpg(group, 0)
            time.sleep(0.05)


@contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """Start a browser; it ends with the context."""
    (commands, write_end), (read_end, answers) = os.pipe(), os.pipe()
    options = [*OPTIONS, f"--user-data-dir={folder / 'profile'}", "--remote-debugging-pipe", "about:blank"]
    command = [sys.executable, "-c", START, str(commands), str(answers), str(CHROMIUM), *options]
    process = subprocess.Popen(
        command, pass_fds=(commands, answers), stderr=subprocess.DEVNULL, start_new_session=True
    )
    os.close(commands)
    os.close(answers)
    found = Browser(read_end, write_end)
    try:
        yield found
    finally:
        found.close()
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # its renderers too
        process.wait()
        _wait_for_group(process.pid)
