"""A real, headless Chromium under test, driven over its debugging pipe: no driver, no network, no packages."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Tab:
    """One page of one browser. ``call`` sends a command of the DevTools protocol and waits for its answer."""

    def __init__(self, profile: Path) -> None:
        ours_in, theirs_out = os.pipe()
        theirs_in, ours_out = os.pipe()
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
                 "--disable-background-networking", "--disable-component-update", "--hide-scrollbars",
                 "--remote-debugging-pipe", f"--user-data-dir={profile}", "about:blank"]  # fmt: skip
        # The browser reads commands from descriptor 3 and writes answers to 4.
        shell = f'exec "$0" "$@" 3<&{theirs_in} 4>&{theirs_out}'
        self.process = subprocess.Popen(["bash", "-c", shell, str(BROWSER), *flags], pass_fds=(theirs_in, theirs_out),
                                        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # fmt: skip
        os.close(theirs_in)
        os.close(theirs_out)
        self.reads, self.writes, self.buffer, self.count = ours_in, ours_out, b"", 0
        self.session: str | None = None
        self.log: list[dict[str, Any]] = []
        target = next(one for one in self.call("Target.getTargets")["targetInfos"] if one["type"] == "page")
        self.session = self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self.count += 1
        message: dict[str, Any] = {"id": self.count, "method": method, "params": params}
        message |= {"sessionId": self.session} if self.session else {}
        os.write(self.writes, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self.count:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]
            self.log.append(answer)

    def _receive(self, timeout: float = 30.0) -> dict[str, Any]:
        end = time.monotonic() + timeout
        while b"\0" not in self.buffer:
            ready, _, _ = select.select([self.reads], [], [], max(0.0, end - time.monotonic()))
            assert ready, "the browser did not answer"
            chunk = os.read(self.reads, 1 << 20)
            assert chunk, "the browser closed its pipe"
            self.buffer += chunk
        line, _, self.buffer = self.buffer.partition(b"\0")
        return json.loads(line)

    def event(self, method: str, timeout: float = 30.0) -> dict[str, Any]:
        """The next event of this name, also one that has come already."""
        while True:
            found = next((one for one in self.log if one.get("method") == method), None)
            if found is not None:
                self.log.remove(found)
                return found
            self.log.append(self._receive(timeout))

    def view(self, width: int, height: int, dark: bool = False) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def offline(self) -> None:
        self.call("Network.emulateNetworkConditions", offline=True, latency=0, downloadThroughput=0, uploadThroughput=0)

    def open(self, page: Path) -> None:
        self.log.clear()
        self.call("Page.navigate", url=page.resolve().as_uri())
        self.event("Page.loadEventFired")

    def run(self, script: str) -> Any:
        """The value of an expression in the page; a thrown error fails the test."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def press(self, key: str) -> None:
        text = {"Enter": "\r", " ": " "}.get(key, "")
        for kind in ("keyDown", "keyUp"):
            extra = {"text": text} if text and kind == "keyDown" else {}
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=KEYS[key], **extra)

    def write(self, text: str) -> None:
        """Text, typed where the focus is."""
        self.call("Input.insertText", text=text)

    def click(self, x: float, y: float) -> None:
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def screenshot(self, path: Path, whole: bool = False) -> Path:
        data = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"]
        path.write_bytes(base64.b64decode(data))
        return path

    def errors(self) -> list[str]:
        """What the page reported: exceptions, refused content, requests other than for the page itself."""
        self.run("0")
        found = [
            json.dumps(one["params"])
            for one in self.log
            if one.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded")
        ]
        sent = [one["params"]["request"]["url"] for one in self.log if one.get("method") == "Network.requestWillBeSent"]
        return found + [url for url in sent if not url.startswith("file:")]

    def close(self) -> None:
        self.session = None
        try:
            self.call("Browser.close")
            self.process.wait(10)
        except (AssertionError, OSError, subprocess.TimeoutExpired):
            self.process.kill()
            self.process.wait(10)
        os.close(self.reads)
        os.close(self.writes)


KEYS = {"Tab": 9, "Enter": 13, " ": 32, "End": 35, "Home": 36, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}  # fmt: skip
