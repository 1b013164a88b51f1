"""The store of a real fleet is killed for a while in the middle of a run, and the run goes on."""

import threading
import time
from pathlib import Path

import pytest
import servers
from small_recipes import EDGE, RACK, recipe_text

from isthmus import train
from isthmus.config import parse_recipe
from isthmus.protocol.access import open_ledger
from isthmus.protocol.replay import Replay

pytestmark = pytest.mark.soak

AWAY_SECONDS = 20.0
ROUNDS = 8


def outage(server: servers.Server, metrics: Path, over: threading.Event) -> None:
    """From the third row on."""
    while not metrics.exists() or len(metrics.read_text().splitlines()) < 3:
        if over.wait(0.1):
            return
    server.kill()
    time.sleep(AWAY_SECONDS)  # it is away for so long: nothing is waited for
    server.start()


def test_a_store_that_is_killed_for_a_while_loses_no_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "server").mkdir()
    server = servers.start_seaweed(tmp_path / "server")
    if isinstance(server, str):
        pytest.skip(server)
    servers.use(monkeypatch, server.endpoint)
    url, run, over = f"s3://{servers.BUCKET}/outage", tmp_path / "run", threading.Event()
    text = recipe_text(RACK + EDGE, name="outage", outer={"inner_steps": 10, "rounds": ROUNDS})
    away = threading.Thread(target=outage, args=(server, run / "metrics.jsonl", over), daemon=True)
    away.start()
    try:
        results = train(parse_recipe(text, [f'bucket.url="{url}"']), run, device="cpu", quiet=True)
        over.set()
        away.join()
        replay = Replay(open_ledger(url))
        while replay.step() is not None:
            pass
        assert replay.round == ROUNDS
        assert [row["round"] for row in results.rows] == list(range(ROUNDS + 1))
        assert max(row["seconds"] for row in results.rows[1:]) > AWAY_SECONDS / 2  # it was felt
    finally:
        over.set()
        server.kill()
