"""A real closer that is killed at an exact write of a change; bench/each_write.py does it at every write."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from faults import kills
from servers import Server
from struck import Step, Strike
from struck_checks import check_run
from struck_fleet import StruckFleet

from isthmus.cli.main import main
from isthmus.protocol.access import OWNER_KEY, open_as
from isthmus.protocol.invitations import Token
from isthmus.runtime import newcomer
from isthmus.store import open_store


@pytest.fixture
def fleet(tmp_path: Path, seaweed_url: str, seaweed_server: Server) -> Iterator[StruckFleet]:
    started = StruckFleet(tmp_path / "run", seaweed_server, seaweed_url, num_full=2)
    yield started
    started.close()
    assert kills.check_left_over(tmp_path) == []


def test_a_closer_killed_at_a_write_of_a_change_costs_nothing(fleet, monkeypatch, capsys):
    """After the document of an admission is written, and before the manifest that names a revocation is."""
    owner = ["--key", str(fleet.keys / OWNER_KEY)]
    fleet.all_give()
    assert main(["invite", fleet.url, "--replica", "new", "--like", "rack", *owner]) == 0
    key = newcomer.prepare(fleet.url, Token.parse(capsys.readouterr().out), str(fleet.keys / "new.key"))

    admitted = fleet.watch.begin(Strike(Step(0, "membership"), after=True))
    monkeypatch.setenv("AWS_ENDPOINT_URL", fleet.wires.endpoint("newcomer"))
    newcomer.ask(open_as(open_store(fleet.url), "new", str(key))[0])
    fleet.until(lambda: admitted.fired and "new" in fleet.epoch().run.keys, "admission")
    fleet.all_give(fleet.watch.first, but=["new"])

    revoked = fleet.watch.begin(Strike(Step(0, "manifest"), after=False))
    monkeypatch.setenv("AWS_ENDPOINT_URL", fleet.wires.endpoint("revoke"))
    assert main(["revoke", fleet.url, "new", *owner]) == 0
    fleet.until(lambda: revoked.fired, "revocation")
    edge = fleet.watch.first
    fleet.all_give(edge)
    assert fleet.ledger.manifest(edge).next_epoch == 2
    starts = re.findall(r"first inner step after .*\((\w+)", fleet.log(revoked.victim))
    assert (starts[0], set(starts[1:])) == (
        "launcher",
        {"imports"},
    )  # the time before a kill is no part of a start
    assert set(fleet.stop().values()) == {0}
    assert check_run(fleet.folder, fleet.url, num_changes=2) == []
