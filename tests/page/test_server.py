"""The server: GET and HEAD of a handful of paths, on loopback, with strict headers; bad input is one line."""

import functools
import http.client
import json
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from contextlib import contextmanager

import pytest
from deadlines import first_line

from isthmus.cli.main import main
from isthmus.page.server import Server, Watcher
from isthmus.page.source import open_source
from isthmus.runlog import RunDir
from isthmus.store.objects import open_store


@contextmanager
def serving(run, host="127.0.0.1"):
    watcher = Watcher(open_source(str(run.path)))
    watcher.start()
    with Server(host, 0, watcher) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        yield server
        server.shutdown()


@pytest.fixture(scope="module")
def server(run):
    with serving(run) as server:
        yield server


def ask(server, path, method="GET", **headers):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=60)
    connection.request(method, path, headers={key.replace("_", "-"): value for key, value in headers.items()})
    answer = connection.getresponse()
    return answer, answer.read()


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT", "BREW"])
@pytest.mark.parametrize("path", ["/", "/state"])
def test_only_get_and_head_are_answered(server, method, path):
    answer, _ = ask(server, path, method)
    assert answer.status == 405
    assert answer.headers["Allow"] == "GET, HEAD"


@pytest.mark.parametrize("path", ["/", "/page.js", "/page.css", "/icon.svg", "/state", "/metrics"])
def test_head_is_get_without_its_body_and_every_answer_is_strict(server, path):
    got, body = ask(server, path)
    head, nothing = ask(server, path, "HEAD")
    assert (got.status, head.status, nothing) == (200, 200, b"")
    assert len(body) == int(got.headers["Content-Length"])
    for answer in (got, head):
        policy = answer.headers["Content-Security-Policy"]
        assert policy.startswith("default-src 'none';")
        assert "unsafe" not in policy
        assert "http" not in policy
        assert answer.headers["X-Content-Type-Options"] == "nosniff"


@pytest.mark.parametrize(
    "path",
    [
        "/recipe.toml",
        "/../recipe.toml",
        "/..%2f..%2fetc/passwd",
        "//etc/passwd",
        "/keys/",
        "/page.html",
        "/server.py",
    ],
)
def test_no_other_path_leads_anywhere(server, path):
    answer, body = ask(server, path)
    assert answer.status == 404
    assert body == b"there is nothing here; the page is at /\n"


def test_state_is_json_and_costs_nothing_while_it_stays_the_same(server, run):
    answer, body = ask(server, "/state")
    state = json.loads(body)
    assert state["run"]["name"] == run.recipe.name
    assert state["run"]["round"] == 4
    again, nothing = ask(server, "/state", If_None_Match=answer.headers["ETag"])
    assert (again.status, nothing) == (304, b"")
    assert float(again.headers["X-Isthmus-Now"]) == pytest.approx(time.time(), abs=60)


def test_a_new_row_changes_the_state(run, tmp_path):
    copy = RunDir.open(shutil.copytree(run.path, tmp_path / "run"))
    with serving(copy) as server:
        answer, _ = ask(server, "/state")
        copy.append(copy.rows()[-1] | {"loss_mixed": 1.25})
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            again, new = ask(server, "/state", If_None_Match=answer.headers["ETag"])
            if again.status == 200:
                break
            time.sleep(0.1)
        assert json.loads(new)["last"]["loss_mixed"] == 1.25


def test_another_sites_name_for_this_machine_is_not_served(server):
    assert ask(server, "/state", Host="evil.example")[0].status == 403
    for name in ("localhost:8017", "127.0.0.1", "[::1]:80"):
        assert ask(server, "/state", Host=name)[0].status == 200


def test_on_every_address_a_strangers_name_is_not_served_either(run):
    """DNS rebinding: a site gives its own name the address of the machine that a viewer can reach."""
    with serving(run, "0.0.0.0") as server:
        assert ask(server, "/state", Host="evil.example:80")[0].status == 403
        for name in ("192.0.2.7:8017", "[2001:db8::1]", socket.gethostname(), "localhost"):
            assert ask(server, "/state", Host=name)[0].status == 200


def test_it_listens_on_loopback_and_warns_on_other_addresses(run):
    for host, warned in (("127.0.0.1", False), ("0.0.0.0", True)):
        process = watch(run.path, "--port", "0", "--host", host)
        try:
            url = first_line(process)
            assert url.startswith(f"http://{host}:")
            port = url.rsplit(":", 1)[1].strip("/")
            assert urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=60).status == 200
            local = listening(int(port))
            assert (local == {"0100007F"}) is not warned
        finally:
            process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
        assert process.returncode == 0
        assert ("no password" in said) is warned
        assert "Traceback" not in said


def watch(*words):
    command = [sys.executable, "-m", "isthmus.cli.main", "watch", *map(str, words)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def listening(port):
    """The local addresses, in hexadecimal, on which this port is listened on."""
    with open("/proc/net/tcp") as file:
        rows = [line.split() for line in file.readlines()[1:]]
    sockets = [row[1].split(":") for row in rows if row[3] == "0A"]
    return {address for address, number in sockets if int(number, 16) == port}


def refused(capsys, *words):
    assert main(["watch", *map(str, words)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    (line,) = said.err.strip().splitlines()
    return line


def test_what_is_no_run_is_one_line(capsys, tmp_path, run):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    assert "is not a run" in refused(capsys, tmp_path / "empty")
    assert "does not exist" in refused(capsys, tmp_path / "absent")
    assert "is not a folder" in refused(capsys, tmp_path / "file")
    (tmp_path / "empty" / "recipe.toml").write_text("name = ")
    assert "not valid TOML" in refused(capsys, tmp_path / "empty")
    (tmp_path / "bucket").mkdir()
    (tmp_path / "bucket" / "run.json").write_text("{}")
    assert "not one of ours" in refused(capsys, tmp_path / "bucket")
    assert "65535" in refused(capsys, run.path, "--port", "70000")


def test_a_bucket_that_cannot_be_reached_is_one_line(capsys, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    soon = functools.partial(open_store, timeout_seconds=1.0)
    monkeypatch.setattr("isthmus.page.bucket_source.open_store", soon)
    assert "connection refused" in refused(capsys, "s3://nowhere/run")
    assert "is not a store" in refused(capsys, "ftp://nowhere/run")
    assert "no folder" in refused(capsys, "file:///no/such/folder")


def test_a_taken_port_and_a_strange_host_are_one_line(capsys, run, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        words = ("--port", taken.getsockname()[1], "--tensorboard", tmp_path / "tb")
        assert "cannot listen" in refused(capsys, run.path, *words)
    assert not (tmp_path / "tb").exists()
    assert "cannot listen" in refused(capsys, run.path, "--host", "no.such.host.invalid")
