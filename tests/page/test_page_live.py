"""The page of a real run while it goes on: a process is killed, the page shows it gone, and back."""

import os
import signal
import subprocess
import sys
import time
from urllib.parse import urlsplit

import pytest
from browser import CHROMIUM, watching
from made import small

from isthmus.config import dump_recipe

pytestmark = pytest.mark.skipif(not CHROMIUM, reason="no Chromium here; apt-get install chromium")
STATE = "document.querySelector('tr[data-replica=\"{}\"]')?.dataset.state"
ROUND = "Number(/round ([0-9]+)/.exec(document.querySelector('#now .bar')?.textContent)?.[1] ?? 0)"
HEALTHY = ("training", "delivering", "delivered")


@pytest.fixture
def train(tmp_path):
    recipe = tmp_path / "live.toml"
    recipe.write_text(dump_recipe(small("outer.rounds=2000", "data.eval_every=5")))
    command = [sys.executable, "-m", "isthmus.cli.main", "train", str(recipe), "--run", str(tmp_path / "run")]
    with open(tmp_path / "log", "wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    yield process
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(120)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@pytest.fixture
def watched(tmp_path, train):
    deadline = time.monotonic() + 180
    while not (tmp_path / "run" / "about.json").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    with watching(tmp_path / "run") as (url, _):
        yield url


def test_a_replica_that_is_killed_is_seen_to_go_and_to_return(page, tmp_path, train, watched):
    edge, bad = STATE.format("edge"), "document.querySelectorAll('#picture .boxed.gone').length"
    page.go(watched)  # before the first round, perhaps before the bucket is there
    page.until(f"{list(HEALTHY)}.includes({edge}) && {ROUND} >= 2")
    assert page.value("document.getElementById('heard').className") == "heard live"
    before = page.value(ROUND)
    while not (pid := (tmp_path / "run" / "work" / "edge" / "alive-1").read_text()):
        time.sleep(0.01)  # its process is writing it
    os.kill(int(pid), signal.SIGKILL)
    gone = page.until(f"!{list(HEALTHY)}.includes({edge}) && {edge}")
    assert gone in ("silent", "waiting", "starting", "catching up")
    page.until("/edge (is gone|was started again)/.test(document.getElementById('events').textContent)")
    page.until(f"{list(HEALTHY)}.includes({edge})")
    page.until(f"{bad} === 0")
    page.until(f"{ROUND} > {before + 2}")
    # The others went on; what the round did without it is in the grid, in words.
    found = page.value(
        "[...document.querySelectorAll('[role=gridcell]')].map(c => c.getAttribute('aria-label'))"
    )
    assert any("edge: contributed" in label for label in found)
    train.send_signal(signal.SIGINT)
    page.until("document.getElementById('status').textContent === 'interrupted'")
    page.until("document.getElementById('heard').textContent.startsWith('the run has ended')")
    assert page.complaints == []
    assert {urlsplit(asked).netloc for asked in page.requests} == {urlsplit(watched).netloc}
