"""A folder as a store: what the file system must be asked for."""

import os
import time
from pathlib import Path

import pytest

from isthmus.errors import ConfigError
from isthmus.store import StoreError, StoreRefused, open_store


def recorded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is synced, linked and renamed from here on, by the file's last name."""
    events: list[str] = []

    def watch(name: str, where: int) -> None:
        real = getattr(os, name)

        def call(*args: object) -> object:
            target = args[where]
            path = os.readlink(f"/proc/self/fd/{target}") if isinstance(target, int) else str(target)
            events.append(f"{name} {Path(path).name.split('#')[0]}")
            return real(*args)

        monkeypatch.setattr(os, name, call)

    for name, where in (("fsync", 0), ("link", 1), ("replace", 1)):
        watch(name, where)
    return events


@pytest.mark.parametrize("size", [2, 1 << 21])
def test_an_object_of_any_size_is_on_the_disk_before_it_has_its_name(
    folder_url: str, monkeypatch: pytest.MonkeyPatch, size: int
):
    store = open_store(folder_url)
    events = recorded(monkeypatch)
    store.create("a/b/object", bytes(size))
    store.put("a/b/object", bytes(size))
    store.put("clock", b"x", durable=False)
    assert events == [
        *("fsync object", "link object", "fsync b", "fsync a", "fsync bucket"),
        *("fsync object", "replace object", "fsync b", "fsync a", "fsync bucket"),
        "replace clock",
    ]


def test_a_name_that_another_gave_is_made_durable_by_who_finds_it(
    folder_url: str, monkeypatch: pytest.MonkeyPatch
):
    """It may have been killed between giving the name and syncing the folder."""
    store = open_store(folder_url)
    store.put("a/object", b"x", durable=False)
    events = recorded(monkeypatch)
    assert store.create("a/object", b"x")
    assert events == ["fsync object", "link object", "fsync a", "fsync bucket"]


def test_a_full_disk_leaves_the_old_object_and_no_litter(folder_url: str, monkeypatch: pytest.MonkeyPatch):
    store = open_store(folder_url)
    store.put("a", b"old")

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StoreError, match="put a: No space left on device") as caught:
        store.put("a", b"new", deadline=time.monotonic() + 1)
    assert caught.value.kind == "disk"
    assert store.get("a", max_bytes=3) == b"old"
    assert [path.name for path in Path(folder_url).rglob("*") if path.is_file()] == ["a"]


def test_below_an_object_nothing_is_found_and_nothing_written(folder_url: str):
    store = open_store(folder_url)
    store.put("run.json", b"{}")
    assert store.get("run.json/x", max_bytes=1) is None
    assert store.head("run.json/x") is None
    for key in ("run.json/x", "run.json/x/y"):
        with pytest.raises(StoreRefused, match="below an object"):
            store.put(key, b"")


def test_a_file_system_without_links_cannot_be_a_store(folder_url: str, monkeypatch: pytest.MonkeyPatch):
    def link(source: Path, target: Path) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", link)
    with pytest.raises(ConfigError, match="no hard links"):
        open_store(folder_url).probe()


def test_stale_temporary_files_are_unlisted_and_swept(folder_url: str):
    store = open_store(folder_url)
    store.put("manifests/1.json", b"{}")
    stale, fresh = (Path(folder_url, "manifests", name) for name in ("2.json#1234567", "3.json#7654321"))
    for path in (stale, fresh):
        path.write_bytes(b"half")
    os.utime(stale, (0, time.time() - 7200))
    assert store.list() == ["manifests/1.json"]
    assert open_store(folder_url).list() == ["manifests/1.json"]
    assert not stale.exists()
    assert fresh.exists()  # its writer may be at work


def test_no_write_follows_a_link_out_of_the_folder(folder_url: str, tmp_path: Path):
    outside = tmp_path / "outside"
    outside.mkdir()
    store = open_store(folder_url)
    Path(folder_url, "members").symlink_to(outside)
    for key in ("members/rack.json", "members/new/rack.json"):
        for write in (store.put, store.create):
            with pytest.raises(StoreRefused, match="leads out of"):
                write(key, b"x")
    assert list(outside.iterdir()) == []
    (outside / "file").write_bytes(b"theirs")
    Path(folder_url, "run.json").symlink_to(outside / "file")
    assert not store.create("run.json", b"ours")
    store.put("run.json", b"ours")  # replaces the link, not what it points to
    assert (outside / "file").read_bytes() == b"theirs"


def test_a_folder_may_be_given_as_a_url_or_a_relative_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    open_store("a folder").put("x", b"1")
    for url in (
        f"file://{tmp_path}/a%20folder",
        f"file://localhost{tmp_path}/a%20folder",
        str(tmp_path / "a folder"),
    ):
        assert open_store(url).get("x", max_bytes=1) == b"1"


@pytest.mark.parametrize("leaves_a_mount_point", [True, False])
def test_a_folder_that_is_away_for_a_while_is_a_fault_that_passes(
    folder_url: str, leaves_a_mount_point: bool
):
    store, folder = open_store(folder_url), Path(folder_url.removeprefix("file://"))
    assert store.get("run.json", max_bytes=9) is None  # an empty folder that was never used is a store
    store.put("run.json", b"x")
    folder.rename(aside := folder.with_name("unmounted"))
    if leaves_a_mount_point:
        folder.mkdir()
    soon = store.clock() + 1.0
    requests = (
        lambda: store.get("run.json", max_bytes=9, deadline=soon),
        lambda: store.head("run.json", deadline=soon),
        lambda: store.put("a", b"y", deadline=soon),
    )
    for request in requests:
        with pytest.raises(StoreError, match="is its disk mounted") as fault:
            request()
        assert fault.value.passes
    assert not list(folder.glob("*"))
    if leaves_a_mount_point:
        folder.rmdir()
    aside.rename(folder)
    assert store.get("run.json", max_bytes=9) == b"x"
