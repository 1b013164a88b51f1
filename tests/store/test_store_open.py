"""What is said when a store cannot be opened: one line, with the cure and without a secret."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import servers
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from servers import use

from isthmus.errors import ConfigError
from isthmus.store import open_store
from isthmus.store.url import CREDENTIALS, ENDPOINT_NAMES, REGION_NAMES, connect, where_s3_is


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("", "empty"),
        ("s3://bucket/a\nb", "not printable"),
        ("s3://", "names the bucket ''; a bucket has 3 to 63"),
        ("s3://a/b", "names the bucket 'a'; a bucket has 3 to 63"),
        ("s3://bucket/../other", "has '..' in its prefix"),
        ("s3://bucket/x?versionId=1", "in its prefix"),
        ("s3://b cket/x", "names the bucket 'b cket'"),
        ("s3:/bucket/x", "is not a store"),
        ("ftp://host/x", "is not a store"),
        ("file://host/x", "is not a store"),
        ("s3://me:hunter2@bucket/x", "belong in the environment"),
        ("/proc/nowhere/x", "cannot write to the folder"),
        (__file__, "is a file"),
    ],
)
def test_a_wrong_url_is_one_line(url: str, says: str):
    with pytest.raises(ConfigError, match=says) as caught:
        open_store(url)
    assert "\n" not in str(caught.value)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("scheme", ["s3", "gs", "az"])
def test_without_credentials_nothing_is_asked(scheme: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    use(monkeypatch, "http://127.0.0.1:1")
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in [name for names in CREDENTIALS.values() for name in names]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(ConfigError, match="no credentials for"):
        open_store(f"{scheme}://bucket/x")


@pytest.mark.parametrize("variable", ["GOOGLE_APPLICATION_CREDENTIALS", "GOOGLE_SERVICE_ACCOUNT"])
def test_a_service_account_of_google_is_taken_from_the_usual_variables(
    variable: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in CREDENTIALS["gs"]:
        monkeypatch.delenv(name, raising=False)
    made = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    key = made.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()
    account = {
        "type": "service_account",
        "client_email": "isthmus@example.invalid",
        "private_key": key,
        "private_key_id": "1",
    }
    (tmp_path / "account.json").write_text(json.dumps(account))
    monkeypatch.setenv(variable, str(tmp_path / "account.json"))
    connect("gs://bucket/x", None)


@pytest.mark.parametrize("scheme", ["s3", "gs", "az"])
def test_every_variable_that_we_name_is_one_that_the_store_client_reads(scheme: str):
    from obstore.exceptions import UnknownConfigurationKeyError
    from obstore.store import AzureStore, GCSStore, S3Store

    client = {"s3": S3Store, "gs": GCSStore, "az": AzureStore}[scheme]
    names = CREDENTIALS[scheme]
    if scheme == "s3":
        names += (*REGION_NAMES, *ENDPOINT_NAMES, "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
    with pytest.raises(UnknownConfigurationKeyError):
        client("bucket", config={f"{names[0]}S": "x"})
    for name in names:
        try:
            client("bucket", config={name: "x"})
        except UnknownConfigurationKeyError:
            pytest.fail(f"{name} is not a name of the store client")
        except Exception:  # about the value, which is nonsense
            continue


def test_half_a_key_or_a_bad_endpoint_is_found_before_a_request(monkeypatch: pytest.MonkeyPatch):
    use(monkeypatch, "http://user:hunter2@127.0.0.1:1")
    with pytest.raises(ConfigError, match="AWS_ENDPOINT_URL is malformed") as caught:
        open_store("s3://bucket/x")
    assert "hunter2" not in str(caught.value)
    use(monkeypatch, "http://127.0.0.1:1")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(ConfigError, match="set both"):
        open_store("s3://bucket/x")


@pytest.mark.parametrize(
    ("endpoint", "says"),
    [
        ("http://127.0.0.1:1", "cannot reach the store: connection refused (at http://127.0.0.1:1)"),
        ("http://no-such-host.invalid", "cannot reach the store: its host name does not resolve"),
    ],
)
def test_an_unreachable_store_is_one_line(endpoint: str, says: str, monkeypatch: pytest.MonkeyPatch):
    use(monkeypatch, endpoint)
    with pytest.raises(ConfigError, match=re.escape(says)):
        open_store("s3://bucket/x", timeout_seconds=1.5)


def test_whoever_forgot_the_endpoint_is_told_that_none_is_set(monkeypatch: pytest.MonkeyPatch):
    use(monkeypatch, "http://127.0.0.1:1")
    assert where_s3_is() == "at http://127.0.0.1:1"
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    assert where_s3_is() == "at AWS: no AWS_ENDPOINT_URL is set here"


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch):
    """A host that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        use(monkeypatch, f"http://127.0.0.1:{listener.getsockname()[1]}")
        yield


@pytest.mark.usefixtures("silent")
def test_a_silent_store_is_one_line():
    with pytest.raises(ConfigError, match="no answer in time"):
        open_store("s3://bucket/x", timeout_seconds=1.5)


@pytest.mark.usefixtures("silent")
def test_ctrl_c_ends_a_request_that_waits():
    began = time.monotonic()
    timer = threading.Timer(0.5, os.kill, [os.getpid(), signal.SIGINT])
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        open_store("s3://bucket/x", timeout_seconds=30)
    assert time.monotonic() - began < 20


def test_no_such_bucket(seaweed_url: str):
    with pytest.raises(ConfigError, match=r"s3://no-such-bucket/x: .*no such bucket; create it"):
        open_store("s3://no-such-bucket/x")


@pytest.mark.parametrize(
    ("key", "secret"), [("wrong-id", "wrong-secret"), (servers.ADMIN[0], "wrong-secret")]
)
def test_wrong_credentials_are_one_line(seaweed_url: str, seaweed_server, monkeypatch, key: str, secret: str):
    use(monkeypatch, seaweed_server.endpoint, (key, secret))
    with pytest.raises(ConfigError, match="does not know these credentials") as caught:
        open_store(seaweed_url)
    assert key not in str(caught.value)
    assert secret not in str(caught.value)


def test_credentials_and_endpoint_may_come_from_the_usual_files(
    seaweed_url, seaweed_server, monkeypatch, tmp_path
):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL", "AWS_REGION"):
        monkeypatch.delenv(name)
    keys, config = tmp_path / "credentials", tmp_path / "config"
    key, secret = servers.ADMIN
    keys.write_text(f"[training]\naws_access_key_id = {key}\naws_secret_access_key = {secret}\n")
    config.write_text(f"[profile training]\nregion = us-east-1\nendpoint_url = {seaweed_server.endpoint}\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(keys))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    monkeypatch.setenv("AWS_PROFILE", "training")
    open_store(seaweed_url).probe()


def test_a_process_may_end_while_its_heartbeat_is_under_way(seaweed_url: str):
    script = (
        "import sys, threading, time; from isthmus.store import open_store\n"
        "store = open_store(sys.argv[1])\n"
        "def beat():\n"
        "    while True: store.put('live', b'x')\n"
        "for _ in range(3): threading.Thread(target=beat, daemon=True).start()\n"
        "time.sleep(0.2)\n"
    )
    command = [sys.executable, "-c", f"import sys; sys.path[:0] = {sys.path!r}\n{script}", seaweed_url]
    runs = [subprocess.Popen(command, stderr=subprocess.PIPE) for _ in range(6)]
    assert [(run.communicate()[1], run.returncode) for run in runs] == [(b"", 0)] * 6
