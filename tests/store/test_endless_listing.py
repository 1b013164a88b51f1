"""A bucket whose listings never end, as anybody who may write below a prefix can make it."""

import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
import servers
from fabricated import Long, resident_bytes

from isthmus.cli.main import main

ENOUGH_PAGES = 1200  # of 1000 objects; a reader that has not stopped by then would not
MOST_BYTES = 500 << 20
PAGE = b"".join(
    b"<Contents><Key>run/%%s/%%s-%03d</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
    b'<ETag>"0123456789abcdef0123456789abcdef"</ETag><Size>7</Size></Contents>' % number
    for number in range(1000)
)


class Endless(BaseHTTPRequestHandler):
    """S3 with run.json, no other object, and another page after each of any listing."""

    protocol_version = "HTTP/1.1"
    document, pages = b"", 0

    def do_GET(self) -> None:
        asked = parse_qs(urlsplit(self.path).query)
        if "list-type" in asked:
            self.answer(200, self.page(asked["prefix"][0].strip("/").removeprefix("run/")))
        elif self.path.endswith("/run.json"):
            self.answer(200, self.document)
        else:
            self.answer(404, b"<Error><Code>NoSuchKey</Code></Error>")

    def do_HEAD(self) -> None:
        self.answer(404, b"")

    def page(self, prefix: str) -> bytes:
        Endless.pages += 1
        last = Endless.pages >= ENOUGH_PAGES
        head = f"<IsTruncated>{'false' if last else 'true'}</IsTruncated>"
        head += "" if last else f"<NextContinuationToken>{Endless.pages}</NextContinuationToken>"
        keys = PAGE.replace(b"%s/%s", f"{prefix}/{Endless.pages:08d}".encode())
        return b"<ListBucketResult>" + head.encode() + keys + b"</ListBucketResult>"

    def answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
        self.send_header("ETag", '"0"')
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *words: object) -> None:
        pass


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    Endless.document = (Path(Long(str(tmp_path / "bucket"), tmp_path).url) / "run.json").read_bytes()
    Endless.pages = 0
    server = ThreadingHTTPServer(("127.0.0.1", 0), Endless)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    servers.use(monkeypatch, f"http://127.0.0.1:{server.server_port}")
    yield "s3://bucket/run"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_reader_of_an_endless_listing_ends_in_one_line_and_takes_little_memory(url, capsys):
    before = resident_bytes()
    assert main(["ledger", "show", url]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert re.search(r"more than [0-9,]+ objects lie below manifests/", err)
    assert len(err.splitlines()) == 1
    assert Endless.pages < ENOUGH_PAGES
    assert resident_bytes() - before < MOST_BYTES
