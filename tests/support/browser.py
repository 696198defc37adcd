"""Headless Chromium for tests of pages, driven by the DevTools protocol over two pipes (no package
needed).
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import subprocess
import time

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--headless",
    "--disable-gpu",
    "--no-first-run",
    "--disable-extensions",
    "--disable-background-networking",
    "--disable-dev-shm-usage",
    "--mute-audio",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)


def find_chromium() -> str | None:
    """Return the path of a Chromium, or None."""
    return next(filter(None, map(shutil.which, NAMES)), None)


def _pipe() -> list[int]:
    """Return the two ends of a pipe, as file descriptors from 10 on: 3 and 4 are
    Chromium's own.
    """
    ends = os.pipe()
    moved = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in ends]
    for end in ends:
        os.close(end)
    return moved


class Browser:
    """One page of a Chromium.

    Attributes:
        problems: uncaught errors, console errors and policy violations of the page since `open`.
        requests: addresses that the page asked for since `open`.
    """

    def __init__(self, folder, timeout=60.0):
        self.timeout, self._buffer, self._number = timeout, b"", 0
        self.problems: list[str] = []
        self.requests: list[str] = []
        read_here, write_there = _pipe()
        read_there, write_here = _pipe()
        root = ["--no-sandbox"] if os.geteuid() == 0 else []
        words = [find_chromium(), *FLAGS, *root, f"--user-data-dir={folder}", "about:blank"]
        # Chromium reads from file descriptor 3 and writes to 4; sh puts the pipes there.
        script = f'exec "$@" 3<&{read_there} 4>&{write_there}'
        self._process = subprocess.Popen(
            ["/bin/bash", "-c", script, "browser", *words],
            pass_fds=(read_there, write_there),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(read_there)
        os.close(write_there)
        self._read, self._write = read_here, write_here
        self._session = None
        target = self._page()
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def _page(self):
        targets = self.call("Target.getTargets")["targetInfos"]
        found = [target["targetId"] for target in targets if target["type"] == "page"]
        return (
            found[0] if found else self.call("Target.createTarget", url="about:blank")["targetId"]
        )

    def call(self, method, **params):
        """Call a method of the protocol and return its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]

    def _receive(self):
        deadline = time.monotonic() + self.timeout
        while b"\0" not in self._buffer:
            if not select.select([self._read], [], [], max(deadline - time.monotonic(), 0))[0]:
                raise TimeoutError(f"no answer of Chromium within {self.timeout:g} s")
            part = os.read(self._read, 1 << 20)
            if not part:
                raise OSError(f"Chromium ended with exit code {self._process.wait()}")
            self._buffer += part
        line, self._buffer = self._buffer.split(b"\0", 1)
        message = json.loads(line)
        self._note(message.get("method"), message.get("params", {}))
        return message

    def _note(self, event, params):
        if event == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(params["exceptionDetails"])[:2000])
        elif event == "Runtime.consoleAPICalled" and params["type"] in (
            "error",
            "warning",
            "assert",
        ):
            self.problems.append(json.dumps(params["args"])[:2000])
        elif event == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.problems.append(params["entry"]["text"])
        elif event == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])

    def open(self, path, width=1200, height=800, dark=False):
        """Open a file and wait until it is loaded."""
        self.resize(width, height, dark)
        self.problems, self.requests = [], []
        self.call("Page.navigate", url=path.resolve().as_uri())
        self.wait_for("document.readyState === 'complete' && location.protocol === 'file:'")

    def resize(self, width, height=800, dark=False):
        """Set the window's size in pixels and the preferred colors."""
        phone = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **phone)
        colors = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[colors])

    def run(self, script):
        """Return the value of a JavaScript expression."""
        answer = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in answer:
            raise RuntimeError(json.dumps(answer["exceptionDetails"])[:2000])
        return answer["result"].get("value")

    def wait_for(self, script, seconds=20.0):
        """Wait until an expression is true."""
        deadline = time.monotonic() + seconds
        while not self.run(script):
            assert time.monotonic() < deadline, f"never true: {script}"
            time.sleep(0.02)

    def press(self, key, code=None, text=None):
        """Press and release a key, e.g. "ArrowRight"."""
        values = {
            "key": key,
            "code": code or key,
            "windowsVirtualKeyCode": _CODES.get(key, ord(key[0].upper())),
        }
        self.call(
            "Input.dispatchKeyEvent", type="keyDown", **values, **({"text": text} if text else {})
        )
        self.call("Input.dispatchKeyEvent", type="keyUp", **values)

    def screenshot(self, path):
        """Write the visible part of the page as PNG."""
        path.write_bytes(
            base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])
        )

    def close(self):
        """End Chromium."""
        with contextlib.suppress(OSError):
            self._session = None
            self.call("Browser.close")
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._read)
        os.close(self._write)


_CODES = {"ArrowLeft": 37, "ArrowRight": 39, "Home": 36, "End": 35, "Tab": 9, " ": 32, "Enter": 13}


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    """One headless Chromium for all tests of pages."""
    if find_chromium() is None:
        pytest.skip("no Chromium on the PATH (Debian: apt-get install chromium)")
    opened = Browser(tmp_path_factory.mktemp("chromium"))
    yield opened
    opened.close()
