"""A reverse proxy on loopback that misbehaves as told: the bad network between a store and its client."""

import http.client
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Trouble:
    """What to do to the next `times` requests of a method whose path contains `part`."""

    kind: str  # "lose", "answer", "stall", "cut" or "strip"
    method: str
    part: str
    times: float
    status: int = 503
    code: str = "SlowDown"
    seconds: float = 0.0


class FaultProxy:
    """Forwards to `upstream`, a port on loopback, keeping the Host header, which a signature covers."""

    def __init__(self, upstream: int) -> None:
        self.upstream = upstream
        self.bytes_per_second: float | None = None
        self.seen: list[tuple[str, str]] = []
        # Called with method, path and the store's status, 0 before the request is passed on; True: hang up.
        self.watch: Callable[[str, str, int], bool] = lambda method, path, status: False
        self._begun: list[str] = []
        self._troubles: list[Trouble] = []
        self._lock = threading.Lock()
        self._server: ThreadingHTTPServer | None = None
        self.port = 0
        self.open_port()
        self.url = f"http://127.0.0.1:{self.port}"

    def trouble(
        self, kind: str, method: str = "PUT", part: str = "", times: float = 1, **more: object
    ) -> None:
        """Arrange for "lose": pass on, drop the reply; "answer": reply with `status` and `code`; "stall": say
        nothing for `seconds`, then hang up; "cut": half of the reply's body; "strip": no If-None-Match."""
        with self._lock:
            self._troubles.append(Trouble(kind, method, part, times, **more))

    def take(self, method: str, path: str) -> Trouble | None:
        with self._lock:
            self.seen.append((method, path))
            for each in self._troubles:
                if each.times > 0 and each.method == method and each.part in path:
                    each.times -= 1
                    return each
        return None

    def wait_for(self, part: str, timeout_seconds: float = 60.0) -> bool:
        """Until a request whose path contains `part` has begun to come in."""
        deadline = time.monotonic() + timeout_seconds
        while not (there := any(part in path for path in self._begun)) and time.monotonic() < deadline:
            time.sleep(0.02)
        return there

    def open_port(self) -> None:
        server = ThreadingHTTPServer(("127.0.0.1", self.port), _Handler)
        server.daemon_threads = True
        server.proxy = self
        self.port, self._server = server.server_port, server
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()

    def close_port(self) -> None:
        """From now on connections are refused, and those that exist end at their next request."""
        server, self._server = self._server, None
        if server is not None:
            server.shutdown()
            server.server_close()

    @property
    def listening(self) -> bool:
        return self._server is not None


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def _serve(self) -> None:
        proxy: FaultProxy = self.server.proxy
        if not proxy.listening:
            return self._hang_up()
        proxy._begun.append(self.path)
        body = self._paced_read(int(self.headers.get("Content-Length") or 0))
        trouble = proxy.take(self.command, self.path)
        kind = trouble.kind if trouble else ""
        if kind == "stall":
            time.sleep(trouble.seconds)
            return self._hang_up()
        if kind == "answer":
            text = f"<Error><Code>{trouble.code}</Code><Message>no</Message></Error>".encode()
            return self._reply(trouble.status, [("Retry-After", "1")], text)
        if proxy.watch(self.command, self.path, 0):
            return self._hang_up()
        headers = {name: value for name, value in self.headers.items() if name.lower() != "connection"}
        if kind == "strip":
            headers = {name: value for name, value in headers.items() if name.lower() != "if-none-match"}
        try:
            upstream = http.client.HTTPConnection("127.0.0.1", proxy.upstream, timeout=60)
            upstream.request(self.command, self.path, body, headers)
            answer = upstream.getresponse()
            data = answer.read()
        except OSError:
            return self._hang_up()
        if kind == "lose" or proxy.watch(self.command, self.path, answer.status):
            return self._hang_up()
        kept = [
            (k, v) for k, v in answer.getheaders() if k.lower() not in ("transfer-encoding", "connection")
        ]
        self._reply(answer.status, kept, data, cut=kind == "cut")

    do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = _serve

    def _reply(self, status: int, headers: list[tuple[str, str]], data: bytes, cut: bool = False) -> None:
        self.send_response_only(status)
        for name, value in headers:
            if name.lower() != "content-length" or self.command == "HEAD":
                self.send_header(name, value)
        if self.command != "HEAD":
            self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command == "HEAD":
            return
        rate = self.server.proxy.bytes_per_second
        step = max(1, int(rate / 20)) if rate else 1 << 20
        end = len(data) // 2 if cut else len(data)
        for start in range(0, end, step):
            self.wfile.write(data[start : min(start + step, end)])
            if rate:
                time.sleep(step / rate)
        if cut:
            self._hang_up()

    def _paced_read(self, length: int) -> bytes:
        parts = []
        while length > 0:
            rate = self.server.proxy.bytes_per_second  # may change meanwhile
            part = self.rfile.read(min(max(1, int(rate / 20)), length) if rate else length)
            if not part:
                break
            parts.append(part)
            length -= len(part)
            time.sleep(len(part) / rate if rate else 0)
        return b"".join(parts)

    def _hang_up(self) -> None:
        self.close_connection = True
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def handle(self) -> None:
        with suppress(OSError):  # the client gave up
            super().handle()

    def log_message(self, *args: object) -> None:
        pass
