"""The page of a real run while it goes on: a process is killed, the page shows it gone, and back."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from urllib.parse import urlsplit

import pytest
from browser import CHROMIUM, watching
from deadlines import ended, until
from faults import kills
from made import small

from isthmus.config import dump_recipe

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(not CHROMIUM, reason="no Chromium here; apt-get install chromium"),
]
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
    ended(process, 120)


@pytest.fixture
def watched(tmp_path, train):
    until((tmp_path / "run" / "about.json").exists, "run directory", 180)
    with watching(tmp_path / "run") as (url, _):
        yield url


def test_a_replica_that_is_killed_is_seen_to_go_and_to_return(page, tmp_path, train, watched):
    edge, bad = STATE.format("edge"), "document.querySelectorAll('#picture .boxed.gone').length"
    page.go(watched)  # before the first round, perhaps before the bucket is there
    page.until(f"{list(HEALTHY)}.includes({edge}) && {ROUND} >= 2")
    assert page.value("document.getElementById('heard').className") == "heard live"
    before = page.value(ROUND)
    # Stopped until the page has seen it. The page looks every two seconds; on idle cores a process that was
    # killed can be back sooner, so no state between two looks is sure to be seen.
    edges = [process for process in kills.processes(tmp_path / "run") if process.replica == "edge"]
    assert sorted(process.role for process in edges) == ["stage", "stage"]
    for process in edges:
        os.kill(process.pid, signal.SIGSTOP)
    assert page.until(f"!{list(HEALTHY)}.includes({edge}) && {edge}") == "silent"
    for process in edges:
        with suppress(ProcessLookupError):  # `isthmus train` may have ended it by now
            os.kill(process.pid, signal.SIGKILL)
    comings = "document.getElementById('comings').textContent"
    page.until(f"/edge (is gone|was started again)/.test({comings})")
    page.until(f"{list(HEALTHY)}.includes({edge})")
    page.until(f"/edge (is back|sends heartbeats again)/.test({comings})")
    page.until(f"{bad} === 0")
    page.until(f"{ROUND} > {before + 2}")
    # The others went on, perhaps by more rounds than the grid has; now it contributes again.
    cells = "[...document.querySelectorAll('[role=gridcell]')].map(c => c.getAttribute('aria-label'))"
    page.until(f"{cells}.some(label => label.includes('edge: contributed'))")
    train.send_signal(signal.SIGINT)
    page.until("document.getElementById('status').textContent === 'interrupted'")
    page.until("document.getElementById('heard').textContent.startsWith('the run has ended')")
    assert page.complaints == []
    assert {urlsplit(asked).netloc for asked in page.requests} == {urlsplit(watched).netloc}
