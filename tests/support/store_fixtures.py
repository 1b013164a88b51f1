"""Stores to test against: a folder, moto and SeaweedFS, and a fault proxy before either server."""

import secrets
from collections.abc import Iterator
from pathlib import Path

import faultproxy
import pytest
import servers


@pytest.fixture(scope="session")
def moto_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.Server | str]:
    yield from _session(servers.start_moto(tmp_path_factory.mktemp("moto")))


@pytest.fixture(scope="session")
def seaweed_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.Server | str]:
    yield from _session(servers.start_seaweed(tmp_path_factory.mktemp("seaweed")))


def _session(server: servers.Server | str) -> Iterator[servers.Server | str]:
    yield server
    if not isinstance(server, str):
        server.kill()


def _server(request: pytest.FixtureRequest, name: str) -> servers.Server:
    server = request.getfixturevalue(f"{name}_server")
    if isinstance(server, str):
        pytest.skip(server)
    return server


def _url() -> str:
    return f"s3://{servers.BUCKET}/{secrets.token_hex(6)}"


@pytest.fixture
def folder_url(tmp_path: Path) -> str:
    return str(tmp_path / "bucket")


@pytest.fixture
def moto_url(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    servers.use(monkeypatch, _server(request, "moto").endpoint)
    return _url()


@pytest.fixture
def seaweed_url(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    servers.use(monkeypatch, _server(request, "seaweed").endpoint)
    return _url()


SEAWEED = pytest.param("seaweed", marks=pytest.mark.soak)


@pytest.fixture(params=["folder", "moto", SEAWEED])
def any_store_url(request: pytest.FixtureRequest) -> str:
    return request.getfixturevalue(f"{request.param}_url")


@pytest.fixture(params=["folder", SEAWEED])
def racing_store_url(request: pytest.FixtureRequest) -> str:
    """moto looks whether a key is there and then writes it, in two steps: it may let two racers win."""
    return request.getfixturevalue(f"{request.param}_url")


@pytest.fixture(params=["moto", SEAWEED])
def bad_network(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[str, faultproxy.FaultProxy]]:
    """A URL and the fault proxy on the way to it."""
    proxy = faultproxy.FaultProxy(_server(request, request.param).port)
    servers.use(monkeypatch, proxy.url)
    yield _url(), proxy
    proxy.close_port()
