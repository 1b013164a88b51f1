"""A fleet of real processes that changes while it trains: invited, revoked; and a longer run."""

import itertools
import json
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from faults import kills
from returning import Seat, seat, small

from isthmus.cli.main import main
from isthmus.config import dump_recipe
from isthmus.errors import RunStopped
from isthmus.protocol import closer
from isthmus.protocol.access import OWNER_KEY, check_owner, open_as, open_ledger
from isthmus.protocol.bundle import read_bundle
from isthmus.protocol.membership import Admitted, Changes, table_of
from isthmus.protocol.trust import Signer, new_secret, save_secret
from isthmus.runlog import RunDir
from isthmus.runtime.create import create
from isthmus.runtime.trainer import Trainer

LIMIT_SECONDS = 240.0


class Friends:
    """Machines of their own: each has a folder with its key and its state."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.url = folder, str(folder / "bucket")
        self.running: dict[str, subprocess.Popen] = {}
        self.owner = str(folder / "keys" / OWNER_KEY)

    def key(self, name: str) -> Path:
        return self.folder / "keys" / f"{name}.key"

    def join(self, name: str, *words: str) -> None:
        options = ["--key", str(self.key(name)), "--work", str(self.folder / "work" / name)]
        command = [sys.executable, "-m", "isthmus.cli.main", "join", self.url, *words, *options]
        with open(self.log_of(name), "ab") as log:
            self.running[name] = subprocess.Popen(
                [*command, "--threads", "1", "--device", "cpu"],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    def log_of(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def wait_for(self, name: str, pattern: str) -> re.Match[str]:
        deadline = time.monotonic() + LIMIT_SECONDS
        while not (found := re.search(pattern, self.log_of(name).read_text())):
            assert time.monotonic() < deadline, f"no {pattern!r} in {self.log_of(name).read_text()}"
            time.sleep(0.1)
        return found

    def wait_for_updates(self, name: str, first: int, num_updates: int) -> None:
        """Until so many rounds have counted a replica, from round `first` on."""
        ledger, deadline = open_ledger(self.url), time.monotonic() + LIMIT_SECONDS
        for t in itertools.count(first):
            while (manifest := ledger.manifest(t)) is None:
                assert time.monotonic() < deadline, f"no round {t} that counts {name}"
                time.sleep(0.1)
            num_updates -= manifest.entry(name) is not None
            if num_updates == 0:
                return

    def anchors(self) -> dict[int, set[str]]:
        """Round -> every digest that any of them has said of it."""
        said: dict[int, set[str]] = {}
        for log in self.folder.glob("*.log"):
            for t, digest in re.findall(r"round (\d+): anchor (\w+)", log.read_text()):
                said.setdefault(int(t), set()).add(digest)
        return said


@pytest.fixture
def friends(tmp_path: Path) -> Iterator[Friends]:
    create(small(rounds=100_000, precision="fp32"), str(tmp_path / "bucket"), tmp_path / "keys")
    fleet = Friends(tmp_path)
    yield fleet
    for process in fleet.running.values():
        if process.poll() is None:
            process.kill()
            process.wait()
    assert kills.check_left_over(tmp_path) == []


@pytest.mark.soak
def test_a_fleet_of_two_invites_one_revokes_one_and_keeps_one_model(friends, capsys):
    for name in ("rack-0", "rack-1"):
        friends.join(name, "--replica", name)
    friends.wait_for("rack-0", r"round [1-9]\d*: anchor")

    assert main(["invite", friends.url, "new", "--like", "rack", "--key", friends.owner]) == 0
    read_bundle(friends.folder / "keys" / "new.isthmus.toml").save_key(str(friends.key("new")))
    friends.join("new", "--replica", "new")
    friends.wait_for_updates("new", 1, 3)

    assert main(["revoke", friends.url, "new", "--key", friends.owner]) == 0
    assert friends.running["new"].wait(LIMIT_SECONDS) == 1
    ended = friends.wait_for("new", r"isthmus: new: you were revoked by the owner in round (\d+)\n")
    friends.wait_for("rack-0", rf"round {int(ended[1]) + 2}: anchor")

    for name in ("rack-0", "rack-1"):
        friends.running[name].send_signal(signal.SIGINT)
    assert [friends.running[name].wait(LIMIT_SECONDS) for name in ("rack-0", "rack-1")] == [0, 0]
    assert all(len(digests) == 1 for digests in friends.anchors().values())

    capsys.readouterr()
    assert main(["status", friends.url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["revoked"] == ["new"]
    assert main(["ledger", "show", friends.url, "--json"]) == 0
    gave = [row["round"] for row in json.loads(capsys.readouterr().out) if "new" in row["contributors"]]
    assert len(gave) >= 3
    assert max(gave) <= int(ended[1])
    assert main(["ledger", "verify", friends.url]) == 0


# One process, so that each edge is looked at


@pytest.fixture
def alone(tmp_path, monkeypatch) -> Seat:
    monkeypatch.setattr(closer, "STEP_IN_SECONDS", 0.0)
    return seat(small(full=2, rounds=4, quorum=1, deadline_seconds=0.01), tmp_path, "rack-0")


def owners(alone: Seat, **changes) -> None:
    ledger = open_ledger(str(alone.folder / "bucket"))
    owner = check_owner(ledger.run, alone.folder / "keys" / OWNER_KEY)
    ledger.membership.order(owner, Changes(**changes))


def catch_up(fleet: Trainer, last: int) -> None:
    for t in range(fleet.resume() + 1, last + 1):
        assert not fleet.begin(t)
        fleet.settle(t)


def revoking(alone: Seat, name: str):
    """The owner sends `name` away while round 2 is closed."""

    def strike(fleet):
        look = fleet.session.exchange.closer._look_for_orders

        def revoked():
            if fleet.session.exchange.closer.round == 2:
                owners(alone, revoked=[name])
            look()

        fleet.session.exchange.closer._look_for_orders = revoked

    return strike


def test_a_replica_that_was_revoked_ends_with_one_line_at_the_edge(alone):
    said = "rack-0: you were revoked by the owner in round 2"
    with pytest.raises(RunStopped, match=said):
        alone.run(3, revoking(alone, "rack-0"))


def test_who_slept_over_its_last_round_is_told_that_round_and_not_the_newest(alone):
    late = Seat(alone.recipe, alone.folder, "rack-1").come()
    alone.run(3, revoking(alone, "rack-1"))
    catch_up(late, 3)
    said = "rack-1: you were revoked by the owner in round 2"
    with pytest.raises(RunStopped, match=said):
        late.begin(4)


def invited(alone: Seat, name: str) -> Seat:
    """A newcomer with its key."""
    folder, secret = alone.folder, new_secret()
    ledger = open_ledger(str(folder / "bucket"))
    table = table_of(ledger.run.recipe.replicas[0])
    owners(alone, admitted=[Admitted(name, Signer(name, secret).public_key, table)])
    key = folder / "keys" / f"{name}.key"
    save_secret(key, secret, ledger.run.digest)
    return Seat(open_as(ledger.store, name, str(key))[0].run.recipe, folder, name)


def test_a_newcomer_trains_from_the_round_after_the_manifest_that_has_seen_it(alone):
    closing = alone.run(2)
    new = invited(alone, "new")
    fleet = new.come()
    catch_up(fleet, 2)
    steps, step = [], fleet.replica.inner_step
    fleet.replica.inner_step = lambda number: steps.append(number) or step(number)
    assert not fleet.begin(3)
    assert (steps, fleet.step_count, fleet.status.state) == ([], 0, "ready")
    fleet.session.heart.beat()

    for t in (3, 4):
        assert closing.begin(t)
        closing.train_round(t, lambda h: None)
        if t == 4:
            assert fleet.begin(4)
            fleet.train_round(4, lambda h: None)
        closing.settle(t)
        fleet.settle(t)
    manifest = closing.ledger.manifest(4)
    assert "new" in {entry.replica for entry in manifest.entries} | dict(manifest.refused).keys()


def test_a_newcomer_that_is_revoked_before_its_first_round_ends_with_one_line(alone):
    alone.run(1)
    new = invited(alone, "new")
    fleet = new.come()
    catch_up(fleet, 1)
    assert fleet.train_round(1, lambda h: None) == []
    owners(alone, revoked=["new"])
    fleet.ledger.membership.look()
    with pytest.raises(RunStopped, match="new: you were revoked by the owner in round 1"):
        fleet.train_round(1, lambda h: None)


def test_a_longer_run_goes_on_where_it_ended(alone):
    first = alone.run(4)
    assert first.ledger.last_round() == 4
    owners(alone, rounds=6)
    ledger = open_ledger(str(alone.folder / "bucket"))
    longer = Seat(ledger.run.recipe, alone.folder, alone.name)
    longer.run(6)
    assert [sorted(longer.anchors())[-1], open_ledger(ledger.store.url).last_round()] == [6, 6]
    assert any(line.startswith("back in round ") for line in longer.said)


@pytest.mark.soak
def test_extend_and_resume_go_on_with_a_run_directory(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("r.toml").write_text(dump_recipe(small(full=1, rounds=2, precision="fp32")))
    assert main(["train", "r.toml", "--run", "run", "--quiet", "--device", "cpu"]) == 0
    shutil.copytree("run", "killed")
    assert main(["extend", "run", "--rounds", "2"]) == 0
    out = capsys.readouterr().out
    assert "goes on from 2 to 4 rounds (epoch 1)" in out
    assert "after inner step 6 it is" in out
    assert main(["train", "--resume", "run", "--quiet", "--device", "cpu"]) == 0
    assert [row.round for row in RunDir.open("run").rows()] == [0, 1, 2, 3, 4]
    # Killed between bucket and folder: the same command finishes it.
    shutil.rmtree("killed/bucket")
    shutil.copytree("run/bucket", "killed/bucket")
    assert main(["extend", "killed", "--rounds", "2"]) == 0
    assert "goes on from 2 to 4 rounds (epoch 1)" in capsys.readouterr().out
