"""The page's server: its own four files, /state and /metrics; GET and HEAD, and nothing else."""

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

LOOK_SECONDS = 1.0  # between looks at a folder, while requests come
FAR_SECONDS = 3.0  # at a bucket that is elsewhere
READING_SECONDS = 0.5  # between looks while older rounds are read
LOOK_BUDGET = 4.0  # seconds of a look in which they are
SLOWEST_SECONDS = 6.0  # between looks that take long
TIMEOUT_SECONDS = 1.5  # that a request waits for a fresh state
MOST_CONNECTIONS = 64
MOST_OF_ONE = 24  # address: every viewer behind a tunnel or a proxy shares one
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


class Watcher(threading.Thread):
    """Looks at the source while requests come, and keeps the newest state: a slow bucket delays no answer."""

    def __init__(self, source: RunSource | BucketSource) -> None:
        super().__init__(daemon=True, name="watcher")
        self.source, self.builder = source, StateBuilder()
        self.followers: list[Follower] = []
        far = isinstance(source, BucketSource) and "://" in source.where
        self.least = self.every = FAR_SECONDS if far else LOOK_SECONDS
        self.wanted, self.fresh = threading.Event(), threading.Condition()
        self.looked = 0.0
        self.fault = ""
        self.state: State = {}
        self.body, self.etag = b"", ""
        self._look(0.0)  # at once: what takes longer comes with the next looks

    def follow(self, follower: Follower) -> None:
        """Before the start: it gets all rounds."""
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
            # A new row of a very long run takes seconds to draw: the machine may have other work.
            slowly = min(max(self.least, 2 * (self.looked - began)), SLOWEST_SECONDS)
            self.every = READING_SECONDS if raw.unread else slowly
            self.fresh.notify_all()
        for follower in () if raw.unread else self.followers:  # rounds are written in order
            follower.add(raw.rows)

    def run(self) -> None:
        while True:
            # TensorBoard and the loggers get their rounds also while no page is open.
            if not self.raw.unread:
                self.wanted.wait(self.every if self.followers else None)
            self.wanted.clear()
            time.sleep(max(0.0, self.looked + self.every - time.monotonic()))
            try:
                self._look()
                self.fault = ""
            except Exception as error:  # the folder may be gone for a while: the page shows what was there
                words = f"{type(error).__name__}: {error}".splitlines()[0]
                if words != self.fault:
                    print(f"isthmus watch: cannot look: {words}", file=sys.stderr, flush=True)
                self.fault = words
                with self.fresh:
                    self.looked = time.monotonic()
                    self.fresh.notify_all()

    def current(self) -> tuple[State, bytes, str]:
        """The newest state; if it is old, a fresh one if that comes soon."""
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
            self.close_connection = True  # a body is not read, nor taken for the next request
        if not self.server.admits(self.headers.get("Host", "")):
            self._answer(403, "text/plain", b"this name is not served\n")
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
        """Every other verb, whatever it is called."""
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
        """Requests are not logged: the terminal shows the URL."""


class Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 128  # a few that wait to be taken do not keep the next one out

    def __init__(
        self, host: str, port: int, watcher: Watcher, clock: Callable[[], float] = time.monotonic
    ) -> None:
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
        """On loopback only local names: another site cannot reach us by giving its name our address."""
        if not self.local:
            return True
        name = host.rsplit(":", 1)[0] if host.rpartition(":")[2].isdigit() else host
        return name.lower() == "localhost" or is_loopback(name.strip("[]"))

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
        """In the server's loop, several times a second."""
        self.crowd.sweep()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that went away is not reported; a fault of ours is one line."""
        error = sys.exc_info()[1]
        if not isinstance(error, ConnectionError | TimeoutError):
            print(f"isthmus watch: {type(error).__name__}: {error}", file=sys.stderr, flush=True)


def is_loopback(name: str) -> bool:
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
