"""Buckets that work, and how one does not: each says what to do, and nothing is left behind."""

import time

import faultproxy
import pytest
import servers

from isthmus.doctor import store_checks
from isthmus.doctor.store_checks import check_bucket
from isthmus.store import open_store
from isthmus.store.url import CREDENTIALS


def quiet(words):
    pass


def _started(start, folder):
    server = start(folder)
    if isinstance(server, str):
        pytest.skip(server)
    yield server
    server.kill()


@pytest.fixture(scope="module")
def moto(tmp_path_factory):
    yield from _started(servers.start_moto, tmp_path_factory.mktemp("moto"))


@pytest.fixture(scope="module")
def seaweed(tmp_path_factory):
    yield from _started(servers.start_seaweed, tmp_path_factory.mktemp("seaweed"))


URL = f"s3://{servers.BUCKET}/doctor"


def names(checks):
    return {check.name: check for check in checks}


def test_a_folder_is_measured_and_left_as_it_was(tmp_path):
    folder = tmp_path / "not" / "yet"
    checks, rate = check_bucket(str(folder), 0.2, quiet)
    assert [check.name for check in checks] == [str(folder), "put-if-absent", "clock", "bucket link"]
    assert all(check.ok for check in checks)
    assert rate.mbps > 1
    assert list(folder.iterdir()) == []
    (folder / "run.json").write_text("{}")
    check_bucket(str(folder), 0.1, quiet)
    assert [path.name for path in folder.iterdir()] == ["run.json"]


def test_a_server_is_measured_and_left_as_it_was(moto, monkeypatch):
    servers.use(monkeypatch, moto.endpoint)
    checks, rate = check_bucket(URL, 0.3, quiet)
    assert [check.name for check in checks] == [URL, "put-if-absent", "clock", "bucket link"]
    assert all(check.ok for check in checks), checks
    assert rate.mbps > 1
    assert open_store(URL).list() == []


def test_a_thin_link_is_found_to_be_thin(moto, monkeypatch):
    proxy = faultproxy.FaultProxy(moto.port)
    proxy.bytes_per_second = 1e6
    servers.use(monkeypatch, proxy.url)
    _, rate = check_bucket(URL, 1.0, quiet)
    proxy.close_port()
    assert 4 < rate.up_mbps < 10  # 8 Mb/s, and sleeping takes longer than asked for
    assert 4 < rate.down_mbps < 10


def test_a_store_that_ignores_put_if_absent_fails_and_the_rest_is_tried(moto, monkeypatch):
    proxy = faultproxy.FaultProxy(moto.port)
    proxy.trouble("strip", times=999)
    servers.use(monkeypatch, proxy.url)
    checks, rate = check_bucket(URL, 0.1, quiet)
    proxy.close_port()
    failed = [check for check in checks if not check.ok]
    assert [check.name for check in failed] == ["put-if-absent"]
    assert "ignores put-if-absent" in failed[0].words
    assert "another store" in failed[0].cure
    assert rate is not None
    servers.use(monkeypatch, moto.endpoint)
    assert open_store(URL).list() == []


def test_wrong_credentials_say_so_without_the_secret(seaweed, monkeypatch):
    servers.use(monkeypatch, seaweed.endpoint, ("nobody", "hunter2-hunter2"))
    (check,), rate = check_bucket(URL, 0.1, quiet)
    assert (check.ok, rate) == (False, None)
    assert "does not know these credentials" in check.words
    assert "check the key" in check.cure
    assert "hunter2" not in check.words + check.cure


def test_a_contributor_is_refused_outside_its_name_and_passes_with_it(seaweed, monkeypatch):
    servers.use(monkeypatch, seaweed.endpoint, servers.RACK)
    (check,), _ = check_bucket(f"s3://{servers.BUCKET}/demo", 0.1, quiet)
    assert "permission denied" in check.words
    assert "--replica" in check.cure
    checks, rate = check_bucket(f"s3://{servers.BUCKET}/demo", 0.2, quiet, "rack")
    assert all(check.ok for check in checks), checks
    assert rate is not None


def test_no_credentials_no_bucket_and_no_answer_each_have_a_cure(moto, monkeypatch, tmp_path):
    servers.use(monkeypatch, moto.endpoint)
    (check,), _ = check_bucket("s3://no-such-bucket/x", 0.1, quiet)
    assert "no such bucket" in check.words
    assert "create the bucket" in check.cure
    monkeypatch.setattr(store_checks, "TIMEOUT_SECONDS", 1.0)
    servers.use(monkeypatch, "http://127.0.0.1:1")
    (check,), _ = check_bucket(URL, 0.1, quiet)
    assert "connection refused" in check.words
    assert "firewall" in check.cure
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ["AWS_SECRET_ACCESS_KEY", *(n for names in CREDENTIALS.values() for n in names)]:
        monkeypatch.delenv(name, raising=False)
    (check,), _ = check_bucket(URL, 0.1, quiet)
    assert check.words.startswith("no credentials for")
    assert "docs/operate.md" in check.cure
    (check,), _ = check_bucket("/proc/nowhere/x", 0.1, quiet)
    assert "cannot write to the folder" in check.words
    assert "folder" in check.cure


def test_a_clock_that_is_off_says_by_how_much_and_what_it_does(tmp_path, monkeypatch):
    right = time.time
    monkeypatch.setattr(time, "time", lambda: right() + 3600)
    checks, _ = check_bucket(str(tmp_path / "b"), 0.1, quiet)
    clock = names(checks)["clock"]
    assert not clock.ok
    assert "3600 s ahead of the bucket" in clock.words
    assert "NTP" in clock.cure


def test_a_store_that_refuses_the_clock_says_so(moto, monkeypatch):
    proxy = faultproxy.FaultProxy(moto.port)
    for method in ("GET", "PUT"):
        proxy.trouble("answer", method, times=99, status=403, code="RequestTimeTooSkewed")
    servers.use(monkeypatch, proxy.url)
    (check,), _ = check_bucket(URL, 0.1, quiet)
    proxy.close_port()
    assert "clock is wrong" in check.words
    assert "NTP" in check.cure
