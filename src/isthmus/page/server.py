"""The page's server: four files, /state and /metrics, by GET and HEAD only."""

import errno
import hashlib
import ipaddress
import json
import socket
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from isthmus import __version__
from isthmus.crowd import Crowd
from isthmus.errors import ConfigError
from isthmus.page import parts, prometheus
from isthmus.page.source import BucketSource, RunSource
from isthmus.page.state import State, StateBuilder
from isthmus.page.tensorboard import Follower

LOOK_SECONDS = 1.0  # between polls of a folder, while requests arrive
FAR_SECONDS = 3.0  # between polls of a remote bucket
READING_SECONDS = 0.5  # between polls while older rounds are read
LOOK_BUDGET = 4.0  # seconds of a poll for reading older rounds
SLOWEST_SECONDS = 6.0  # the most between polls that take long
TIMEOUT_SECONDS = 1.5  # how long a request waits for a fresh state
MOST_CONNECTIONS = 64
MOST_OF_ONE = 24  # per address: all viewers behind a tunnel or a proxy share one
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


class Watcher(threading.Thread):
    """Polls the source while requests arrive, and caches the newest state: a slow bucket delays no answer."""

    def __init__(self, source: RunSource | BucketSource) -> None:
        super().__init__(daemon=True, name="watcher")
        self.source, self.builder = source, StateBuilder()
        self.followers: list[Follower] = []
        self.least = self.every = FAR_SECONDS if source.far else LOOK_SECONDS
        self.wanted, self.fresh = threading.Event(), threading.Condition()
        self.looked = 0.0
        self.fault = ""
        self.state: State = {}
        self.body, self.etag = b"", ""
        self._look(0.0)  # without older rounds, which the next polls read

    def follow(self, follower: Follower) -> None:
        """Add a follower before the start: it gets all rounds."""
        self.followers.append(follower)
        if not self.raw.unread:
            follower.add(self.raw.rows)

    def _look(self, budget_seconds: float = LOOK_BUDGET) -> None:
        began = time.monotonic()
        raw = self.source.look(budget_seconds)
        state = self.builder.build(raw)
        body = json.dumps(state, allow_nan=False, separators=(",", ":")).encode()
        with self.fresh:
            self.raw, self.state, self.body = raw, state, body
            self.etag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
            self.looked = time.monotonic()
            # Drawing a new row of a very long run takes seconds, and the machine may have other work.
            slowly = min(max(self.least, 2 * (self.looked - began)), SLOWEST_SECONDS)
            self.every = READING_SECONDS if raw.unread else slowly
            self.fresh.notify_all()
        for follower in () if raw.unread else self.followers:  # rounds are written in order
            follower.add(raw.rows)

    def run(self) -> None:
        while True:
            # TensorBoard and the loggers get rounds even while no page is open.
            if not self.raw.unread:
                self.wanted.wait(self.every if self.followers else None)
            self.wanted.clear()
            time.sleep(max(0.0, self.looked + self.every - time.monotonic()))
            try:
                self._look()
                self.fault = ""
            except Exception as error:  # the folder may be gone for a while: keep the last state
                words = f"{type(error).__name__}: {error}".splitlines()[0]
                if words != self.fault:
                    print(f"isthmus watch: cannot look: {words}", file=sys.stderr, flush=True)
                self.fault = words
                with self.fresh:
                    self.looked = time.monotonic()
                    self.fresh.notify_all()

    def current(self) -> tuple[State, bytes, str]:
        """Return the newest state; if it is old, wait briefly for a fresh one."""
        with self.fresh:
            if time.monotonic() - self.looked > self.every:
                looked = self.looked
                self.wanted.set()
                self.fresh.wait_for(lambda: self.looked != looked, TIMEOUT_SECONDS)
            return self.state, self.body, self.etag


class Handler(BaseHTTPRequestHandler):
    server: "Server"
    server_version = f"isthmus/{__version__}"
    sys_version = ""
    protocol_version = "HTTP/1.1"

    def setup(self) -> None:
        super().setup()
        self.visit = self.server.crowd.of(self.request)

    def handle_one_request(self) -> None:
        self.visit.idle()
        if self.rfile.peek(1):  # pyright: ignore[reportAttributeAccessIssue] - it is a BufferedReader
            self.visit.request()
        super().handle_one_request()

    def do_GET(self) -> None:
        if "Content-Length" in self.headers or "Transfer-Encoding" in self.headers:
            self.close_connection = True  # so that an unread body is not parsed as the next request
        if not self.server.admits(self.headers.get("Host", "")):
            self._answer(
                403, "text/plain", b"this name is not served; take the machine's address, or --host\n"
            )
            return
        path = self.path.partition("?")[0].partition("#")[0]
        if path == "/state":
            _, body, etag = self.server.watcher.current()
            if etag in [tag.strip() for tag in self.headers.get("If-None-Match", "").split(",")]:
                self._answer(304, "", b"", etag)
            else:
                self._answer(200, "application/json", body, etag)
        elif path == "/metrics":
            state, _, _ = self.server.watcher.current()
            self._answer(200, prometheus.CONTENT_TYPE, prometheus.exposition(state, time.time()).encode())
        elif path in self.server.pages:
            self._answer(200, *self.server.pages[path])
        else:
            self._answer(404, "text/plain", b"there is nothing here; the page is at /\n")

    do_HEAD = do_GET

    def __getattr__(self, name: str) -> Any:
        """Answer every other verb, whatever its name."""
        if name.startswith("do_"):
            return self._refuse
        raise AttributeError(name)

    def _refuse(self) -> None:
        self.close_connection = True  # a body may follow, and it is not read
        self._answer(405, "text/plain", b"only GET and HEAD are answered\n")

    def _answer(self, status: int, kind: str, body: bytes, etag: str = "") -> None:
        self.send_response(status)
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.send_header("X-Isthmus-Now", f"{time.time():.1f}")
        if etag:
            self.send_header("ETag", etag)
        if status == 405:
            self.send_header("Allow", "GET, HEAD")
            self.send_header("Connection", "close")
        if status != 304:
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
        self.visit.answer(len(body))
        self.end_headers()
        if self.command != "HEAD" and status != 304:
            self.wfile.write(body)

    def log_message(self, form: str, *args: Any) -> None:
        """Log no requests: the terminal shows the URL."""


class Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 128  # a few connections that wait to be accepted do not block the next

    def __init__(
        self, host: str, port: int, watcher: Watcher, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.names = {name.lower() for name in (host, socket.gethostname(), socket.getfqdn())}
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            self.address_family = found[0][0]
            host, port = str(found[0][4][0]), int(found[0][4][1])
            super().__init__((host, port), Handler)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            no_such = isinstance(error, socket.gaierror) or getattr(error, "errno", 0) == errno.EADDRNOTAVAIL
            cure = (
                "--host is an address of this machine"
                if no_such
                else "give another --port, or 0 for any free one"
            )
            raise ConfigError(f"cannot listen on {host} port {port}: {reason}; {cure}") from None
        self.watcher, self.host = watcher, host
        self.crowd = Crowd(MOST_CONNECTIONS, MOST_OF_ONE, clock)
        self.local = is_loopback(str(self.server_address[0]))
        self.pages = {
            "/": ("text/html; charset=utf-8", parts.html().encode()),
            "/page.js": ("text/javascript; charset=utf-8", parts.script().encode()),
            "/page.css": ("text/css; charset=utf-8", parts.style().encode()),
            "/icon.svg": ("image/svg+xml", parts.icon().encode()),
        }

    @property
    def url(self) -> str:
        host = self.host if ":" not in self.host else f"[{self.host}]"
        return f"http://{host}:{self.server_address[1]}/"

    def admits(self, host: str) -> bool:
        """Accept only this machine's names and that of `--host` in the Host header. After DNS rebinding,
        another site could otherwise read us in a viewer's browser."""
        name = (host.rsplit(":", 1)[0] if host.rpartition(":")[2].isdigit() else host).strip("[]").lower()
        if name == "localhost" or is_loopback(name):
            return True
        return not self.local and (is_address(name) or name in self.names)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self.crowd.enter(request, str(client_address[0])) is None:
            self.shutdown_request(request)
        else:
            super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.crowd.leave(request)

    def service_actions(self) -> None:
        """Run in the server's loop, several times a second."""
        self.crowd.sweep()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore browsers that disconnect; print our own faults as one line."""
        error = sys.exc_info()[1]
        if not isinstance(error, ConnectionError | TimeoutError):
            print(f"isthmus watch: {type(error).__name__}: {error}", file=sys.stderr, flush=True)


def is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def is_loopback(name: str) -> bool:
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
