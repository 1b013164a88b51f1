"""What a commit lists is on the disk before the commit is: after a power cut nothing counted is gone."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from little import RECIPE, Little, at_once

LARGE = (
    RECIPE.replace("width = 32", "width = 256")
    .replace("ffn = 64", "ffn = 512")
    .replace("keep = 8", "keep = 2048")
)
MIB = 1 << 20


class Disk:
    """What would be there after a power cut: files whose bytes, and names whose folders, were synced."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bytes, self.names = set[int](), set[str]()
        self.lost: dict[str, list[str]] = {}  # by document, what it needs and a power cut would take
        self.link, self.replace, self.fsync = os.link, os.replace, os.fsync
        monkeypatch.setattr(os, "link", lambda source, target: self.name(self.link, source, target))
        monkeypatch.setattr(os, "replace", lambda source, target: self.name(self.replace, source, target))
        monkeypatch.setattr(os, "fsync", self.sync)

    def name(self, give: Callable[..., None], source: Path, target: Path) -> None:
        """A document gets its name: is on the disk what it counts?"""
        if target.parent.name == "manifests":
            self.note(target, list(target.parents[1].glob(f"payloads/*/{target.stem}/*-*")))
        if target.parent.parent.name == "commits":
            self.note(
                target, list(target.parents[2].glob(f"payloads/{target.stem}/{target.parent.name}/*-*"))
            )
        if target.name == "complete.json":
            self.note(target, list(target.parent.glob("*.safetensors")))
        give(source, target)

    def note(self, document: Path, needed: list[Path]) -> None:
        assert needed
        self.lost[f"{document.parent.name}/{document.name}"] = [
            str(file)
            for file in needed
            if "#" not in file.name and not (file.stat().st_ino in self.bytes and str(file) in self.names)
        ]

    def sync(self, handle: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{handle}"))
        if path.is_dir():
            self.names |= {str(path / name) for name in os.listdir(path)}
        else:
            self.bytes.add(os.fstat(handle).st_ino)


def test_what_a_commit_lists_and_an_anchor_names_is_on_the_disk_first(
    folder_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    disk = Disk(monkeypatch)
    run = Little(folder_url, tmp_path, LARGE)
    replicas = run.replicas()
    for number in (1, 2):
        for each in replicas:
            each.beat()
        at_once(*(lambda each=each, number=number: each.round(number) for each in replicas))
    payloads = [path for path in Path(folder_url, "payloads").rglob("*-*") if path.stat().st_size > MIB]
    assert payloads
    anchors = [path for path in Path(folder_url, "anchors").rglob("*.safetensors")]
    assert any(path.stat().st_size > MIB for path in anchors)
    commits = {f"00000{t}/{name}.json" for t in (1, 2) for name in run.names}
    assert disk.lost.keys() == commits | {
        "manifests/000001.json",
        "manifests/000002.json",
        "000002/complete.json",
    }
    assert not any(disk.lost.values()), disk.lost
