"""Objects that others wrote: one that cannot be read is its author's fault."""

import os
import subprocess
import time
from pathlib import Path

import obstore
import pytest
from servers import Server

from isthmus.store import Store, StoreError, StoreRefused, open_store
from isthmus.store import objects as objects_module


@pytest.fixture
def store(any_store_url: str) -> Store:
    return open_store(any_store_url)


def plant(folder: Path, kind: str, key: str) -> None:
    """Something under a key that is no object."""
    path = folder / key
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind == "loop":
        path.symlink_to(path.name)
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "link":
        (folder.parent / "outside").write_bytes(b"x")
        path.symlink_to(folder.parent / "outside")
    elif kind == "folder":
        path.mkdir()


@pytest.mark.parametrize("kind", ["loop", "pipe", "link", "folder"])
def test_what_is_no_regular_file_is_refused_at_once_and_is_no_object(folder_url: str, kind: str):
    store = open_store(folder_url)
    store.put("payloads/c/1/ours", b"x")
    plant(Path(folder_url), kind, "payloads/c/1/theirs")
    with pytest.raises(StoreRefused, match="theirs is not an object"):
        store.get("payloads/c/1/theirs", max_bytes=9)
    assert store.head("payloads/c/1/theirs") is None
    assert store.list() == ["payloads/c/1/ours"]


def test_a_loop_or_a_deep_tree_of_folders_does_not_break_a_listing(folder_url: str):
    store = open_store(folder_url)
    store.put("manifests/1.json", b"x")
    Path(folder_url, "payloads").symlink_to(folder_url)
    deep = os.open(folder_url, os.O_RDONLY)
    for _ in range(1500):  # deeper than Python calls, by its name longer than a path may be
        os.mkdir("deep", dir_fd=deep)
        below = os.open("deep", os.O_RDONLY, dir_fd=deep)
        os.close(deep)
        deep = below
    os.close(deep)
    try:
        assert store.list() == ["manifests/1.json"]
    finally:
        subprocess.run(["rm", "-rf", f"{folder_url}/deep"], check=True)  # pytest's own broom recurses


def test_an_object_that_must_be_thawed_is_its_authors_fault(moto_url: str):
    store = open_store(moto_url)
    store.put("run.json", b"{}")
    raw = store._client(0)
    obstore.put(raw, "theirs", b"x", attributes={"Storage-Class": "GLACIER"}, use_multipart=False)
    with pytest.raises(StoreError, match="InvalidObjectState"):
        store.get("theirs", max_bytes=9)
    with pytest.raises(StoreRefused, match=r"get theirs: .*InvalidObjectState"):
        store.foreign(lambda: store.get("theirs", max_bytes=9))


def test_a_file_that_may_not_be_read_is_its_authors_fault(folder_url: str, monkeypatch: pytest.MonkeyPatch):
    store = open_store(folder_url)
    store.put("theirs", b"x")
    real = os.open

    def locked(path: Path, *rest: object, **more: object) -> int:
        if Path(path).name == "theirs":
            raise PermissionError(13, "Permission denied")
        return real(path, *rest, **more)

    monkeypatch.setattr(os, "open", locked)
    with pytest.raises(StoreRefused, match="get theirs: Permission denied"):
        store.foreign(lambda: store.get("theirs", max_bytes=9))
    assert store.foreign(lambda: store.get("not-there", max_bytes=9)) is None


def test_a_store_that_is_away_is_nobodys_fault(
    moto_url: str, moto_server: Server, monkeypatch: pytest.MonkeyPatch
):
    store = open_store(moto_url)
    monkeypatch.setattr(objects_module, "ASK_SECONDS", 0.5)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    store._clients.clear()
    with pytest.raises(StoreError, match="connection refused"):
        store.foreign(lambda: store.get("theirs", max_bytes=9, deadline=time.monotonic() + 0.5))
