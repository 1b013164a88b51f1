"""A real Chromium without a window, driven over its DevTools protocol by a WebSocket of a few lines."""

import base64
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from deadlines import ended, first_line

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
OPTIONS = (
    "--headless=new",
    "--no-sandbox",  # tests run as root
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--metrics-recording-only",
    "--hide-scrollbars",
    "--remote-debugging-port=0",
)
ANSWER_SECONDS = 120.0


class WebSocket:
    """Text frames to and from one server; what RFC 6455 asks of a client, and no more."""

    def __init__(self, url: str) -> None:
        host, _, path = url.removeprefix("ws://").partition("/")
        name, port = host.split(":")
        self.socket = socket.create_connection((name, int(port)), timeout=ANSWER_SECONDS)
        key = base64.b64encode(os.urandom(16)).decode()
        lines = [
            f"GET /{path} HTTP/1.1",
            f"Host: {host}",
            "Upgrade: websocket",
            "Connection: Upgrade",
            f"Sec-WebSocket-Key: {key}",
            "Sec-WebSocket-Version: 13",
        ]
        self.socket.sendall(("\r\n".join(lines) + "\r\n\r\n").encode())
        self.buffer = b""
        while b"\r\n\r\n" not in self.buffer:
            self.buffer += self._more(4096)
        head, _, self.buffer = self.buffer.partition(b"\r\n\r\n")
        assert b" 101 " in head.split(b"\r\n")[0], head

    def send(self, text: str) -> None:
        data, mask = text.encode(), os.urandom(4)
        size = len(data)
        if size < 126:
            head = struct.pack(">BB", 0x81, 0x80 | size)
        elif size < 65536:
            head = struct.pack(">BBH", 0x81, 0x80 | 126, size)
        else:
            head = struct.pack(">BBQ", 0x81, 0x80 | 127, size)
        masked = bytes(byte ^ mask[i % 4] for i, byte in enumerate(data))
        self.socket.sendall(head + mask + masked)

    def receive(self) -> str:
        parts = []
        while True:
            first, second = self._read(2)
            size = second & 0x7F
            if size == 126:
                (size,) = struct.unpack(">H", self._read(2))
            elif size == 127:
                (size,) = struct.unpack(">Q", self._read(8))
            data = self._read(size)
            if first & 0x0F in (0, 1):  # a text frame, or more of it
                parts.append(data)
                if first & 0x80:
                    return b"".join(parts).decode()

    def _read(self, size: int) -> bytes:
        while len(self.buffer) < size:
            self.buffer += self._more(max(65536, size - len(self.buffer)))
        data, self.buffer = self.buffer[:size], self.buffer[size:]
        return data

    def _more(self, most: int) -> bytes:
        if not (more := self.socket.recv(most)):
            raise ConnectionError("the browser has gone")
        return more


class Page:
    """One tab."""

    def __init__(self, url: str) -> None:
        self.socket, self.number = WebSocket(url), 0
        self.requests: list[str] = []  # every URL that the tab asked for
        self.complaints: list[str] = []  # exceptions, errors on the console, violations of the policy
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self.number += 1
        self.socket.send(json.dumps({"id": self.number, "method": method, "params": params}))
        deadline = time.monotonic() + ANSWER_SECONDS  # the socket's own is put off by every event that comes
        while True:
            assert time.monotonic() < deadline, f"Chromium does not answer {method} {params}"
            message = json.loads(self.socket.receive())
            if message.get("id") == self.number:
                assert "error" not in message, message["error"]
                return message["result"]
            self._note(message.get("method", ""), message.get("params", {}))

    def _note(self, method: str, params: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(params["exceptionDetails"].get("exception", {}).get("description", "?"))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
            self.complaints.append(json.dumps(params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.complaints.append(params["entry"]["text"])

    def forget(self) -> None:
        """Leave the page of the test before this one, which would go on asking its server."""
        self.call("Page.navigate", url="about:blank")
        self.until("location.href === 'about:blank' && document.readyState === 'complete'")
        self.requests.clear()
        self.complaints.clear()

    def look_as(self, width: int, height: int, dark: bool = False, touch: bool = False) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=2 if touch else 1,
            mobile=touch,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def go(self, url: str, seconds: float = 120.0) -> None:
        self.call("Page.navigate", url=url)
        self.until("document.documentElement?.dataset.ready === 'yes'", seconds)

    def value(self, expression: str) -> Any:
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def until(self, expression: str, seconds: float = 120.0) -> Any:
        """The expression's value, once it is true."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if found := self.value(expression):
                return found
            time.sleep(0.1)
        text = self.value("document.body.innerText")
        raise AssertionError(f"not within {seconds:g} s: {expression}\n{text[:3000]}\n{self.complaints}")

    def press(self, key: str) -> None:
        codes = {"Tab": 9, "Enter": 13, "Escape": 27}
        codes |= {"ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}
        for kind in ("keyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=codes[key]
            )

    def screenshot(self, path: Path, whole: bool = False) -> None:
        data = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"]
        path.write_bytes(base64.b64decode(data))


@contextmanager
def watching(path: Path) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """`isthmus watch`, as (its URL, its process)."""
    command = [sys.executable, "-m", "isthmus.cli.main", "watch", str(path), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        yield first_line(process), process
    finally:
        process.send_signal(signal.SIGINT)
        ended(process)


@contextmanager
def chromium() -> Iterator[Page]:
    assert CHROMIUM, "no Chromium here"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            [CHROMIUM, *OPTIONS, f"--user-data-dir={profile}", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            yield Page(_tab(Path(profile) / "DevToolsActivePort"))
        finally:
            process.terminate()
            ended(process)


def _tab(note: Path, seconds: float = 120.0) -> str:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            port = note.read_text().splitlines()[0]
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list", timeout=5) as answer:
                tabs = [tab for tab in json.load(answer) if tab["type"] == "page"]
            if tabs:
                return tabs[0]["webSocketDebuggerUrl"]
        except (OSError, IndexError, ValueError):
            pass
        time.sleep(0.1)
    raise AssertionError("Chromium did not start")
