"""What a manifest counts is on the disk before the manifest is: after a power cut nothing counted is gone."""

import json
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
            closer = json.loads(source.read_bytes())["replica"]
            round_files = target.parents[1].glob(f"payloads/*/{target.stem}/*-*")
            needed = [file for file in round_files if closer in file.parts or "kept-" not in file.name]
            self.note(target, needed)
        if target.name == "complete.json":
            self.note(target, list(target.parent.glob("*.safetensors")))
        give(source, target)

    def note(self, document: Path, needed: list[Path]) -> None:
        assert needed
        self.lost[document.name] = [
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


def test_what_a_manifest_counts_and_an_anchor_names_is_on_the_disk_first(
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
    assert {"kept-" in path.name for path in payloads} == {True, False}
    anchors = [path for path in Path(folder_url, "anchors").rglob("*.safetensors")]
    assert any(path.stat().st_size > MIB for path in anchors)
    assert disk.lost.keys() == {"000001.json", "000002.json", "complete.json"}
    assert not any(disk.lost.values()), disk.lost
