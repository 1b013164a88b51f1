"""Rounds through a store: one manifest whatever happens, and no right beyond one's own prefixes."""

import re
import threading
from pathlib import Path

import pytest
import servers
from faultproxy import FaultProxy
from little import RECIPE, Little, Replica, at_once, rounds
from little import hasty as hasty
from servers import use

from isthmus.config import parse_recipe
from isthmus.errors import ConfigError
from isthmus.layout.traffic import outer_bytes
from isthmus.protocol import closer as closer_module
from isthmus.protocol.ledger import Entry, Ledger, Manifest, Shard
from isthmus.protocol.trust import MAX_DOCUMENT_BYTES
from isthmus.runlog.facts import Facts
from isthmus.runtime.create import create
from isthmus.store import open_store

pytestmark = pytest.mark.usefixtures("hasty")
one_server = pytest.mark.parametrize("bad_network", ["seaweed"], indirect=True)  # where it takes seconds


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every closer wants to be the first."""
    monkeypatch.setattr(closer_module, "STEP_IN_SECONDS", 0.0)


def one_history(replicas: list[Replica], last: int, quorum: int = 0) -> None:
    """All hold the same anchor, and every round was settled once, with everybody in it once.

    Who is still waited for after an outage is the clock's affair: there `quorum` of them suffice.
    """
    assert len({each.exchange.anchor for each in replicas}) == 1
    digests = {tuple(each.ledger.manifest(t).digest for t in range(1, last + 1)) for each in replicas}
    assert len(digests) == 1
    names = [each.name for each in replicas]
    for t in range(1, last + 1):
        counted = [entry.replica for entry in replicas[0].ledger.manifest(t).entries]
        assert counted == [name for name in names if name in counted]
        assert len(counted) >= (quorum or len(names))


def test_sixteen_closers_race_for_a_manifest_and_one_wins(racing_store_url: str, tmp_path: Path):
    recipe = RECIPE.replace('name = "b"', 'name = "b"\ncount = 14')
    run = Little(racing_store_url, tmp_path, recipe)
    assert len(run.names) == 16
    signers = [run.signer(name) for name in run.names]
    # Twenty buckets at a time: SeaweedFS lets those who wait for a key's lock sleep for a second each.
    for start in range(0, 20 if racing_store_url.startswith("s3") else 100, 20):
        stores = [open_store(f"{racing_store_url}/race-{start + n}") for n in range(20)]
        races = [[Ledger(store, run.run, each) for each in signers] for store in stores]
        gate = threading.Barrier(16 * 20)

        def create_one(ledger: Ledger, gate: threading.Barrier = gate) -> bool:
            shards = tuple(Shard(i, "0" * 64, size) for i, size in enumerate(ledger.sizes))
            entries = (Entry(ledger.signer.replica, shards, 1.0),)
            rest = {
                "anchor": "",
                "members": (),
                "dealt_in": ("a",),
                "deadline_seconds": 1.0,
                "seconds": 1.0,
            }
            gate.wait()
            return ledger.create_manifest(Manifest(round=1, entries=entries, **rest))

        everyone = [ledger for race in races for ledger in race]
        won = at_once(*(lambda each=each: create_one(each) for each in everyone))
        for n, race in enumerate(races):
            winners = [ledger for ledger, mine in zip(race, won[16 * n :], strict=False) if mine]
            assert len(winners) == 1
            read = {ledger.manifest(1).digest for ledger in (winners[0], race[0], race[-1])}
            assert len(read) == 1
            assert race[3].manifest(1).closer == winners[0].signer.replica


def test_bytes_that_the_exchange_counts_are_those_that_traffic_predicts(folder_url: str, tmp_path: Path):
    replicas = Little(folder_url, tmp_path).replicas()
    rounds(replicas, [1])
    for each, member in zip(replicas, replicas[0].recipe.fleet(), strict=True):
        down = each.exchange.pop_facts().bytes
        up = outer_bytes(each.recipe, member)[0]
        (entry,) = (e for e in each.ledger.manifest(1).entries if e.replica == each.name)
        assert entry.facts.bytes["payload_up"] == up  # the commit states it
        assert (down["payload_up"], down["payload_down"]) == (0, 2 * up)
        assert each.exchange.pop_facts().bytes == dict.fromkeys(down, 0)


def theirs(replica: Replica) -> list[str]:
    """What contributors have put; without the copies that closers keep."""
    return replica.ledger.store.list("payloads")


def test_delivering_again_after_a_crash_changes_nothing(folder_url: str, tmp_path: Path):
    a, b, c = Little(folder_url, tmp_path, closers=["a"]).replicas()
    updates = {each: each.update() for each in (a, b, c)}
    for each, update in updates.items():
        each.exchange.deliver(1, update)
    before = theirs(a)
    b.exchange.deliver(1, updates[b])
    assert theirs(a) == before
    for each in (a, b, c, b):  # b once more, after the round was settled
        counted = each.exchange.close(1, [updates[each]])
        assert [one.replica for one in counted] == ["a", "b", "c"]
    assert theirs(a) == before


def test_an_oversized_commit_stops_nobody_who_waits(folder_url: str, tmp_path: Path):
    a, _, c = Little(folder_url, tmp_path).replicas()
    c.ledger.store.put(c.commit_key(), bytes(MAX_DOCUMENT_BYTES + 1))
    assert "b" in a.exchange._missing(1)


# A bad network


@pytest.mark.usefixtures("eager")
def test_replies_lost_after_the_write_neither_lose_nor_double_a_round(
    bad_network: tuple[str, FaultProxy], tmp_path: Path
):
    url, proxy = bad_network
    replicas = Little(url, tmp_path).replicas()
    for part in ("manifests", "commits", "payloads"):
        proxy.trouble("lose", part=part, times=2)
    rounds(replicas, [1, 2])
    one_history(replicas, 2)


def test_a_store_that_ignores_put_if_absent_is_refused_at_the_start(
    moto_url: str, moto_server: servers.Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    proxy = FaultProxy(moto_server.port)  # moto checks no signature, so a header can go missing
    use(monkeypatch, proxy.url)
    proxy.trouble("strip", times=99)
    with pytest.raises(ConfigError, match="ignores put-if-absent"):
        create(parse_recipe(RECIPE), moto_url, tmp_path / "keys")
    assert open_store(moto_url).list() == []
    assert not (tmp_path / "keys").exists()
    proxy.close_port()


# Rights


@pytest.fixture
def demo(seaweed_url: str):
    """s3://runs/demo, in which the identity `rack` may write only below members/rack and payloads/rack."""
    url = f"s3://{servers.BUCKET}/demo"

    def empty() -> None:
        store = open_store(url)
        for key in store.list():
            store.delete(key)

    empty()
    yield url
    empty()


def test_who_may_write_only_below_its_own_prefixes_can_take_part(
    demo: str, seaweed_server: servers.Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    recipe = RECIPE.replace('name = "b"', 'name = "rack"')
    run = Little(demo, tmp_path, recipe, closers=["a", "c"])
    a, c = run.replica("a"), run.replica("c")
    use(monkeypatch, seaweed_server.endpoint, servers.RACK)
    rack = run.replica("rack")
    assert rack.exchange.closer is None
    rack.ledger.store.now("members/rack/clock")
    use(monkeypatch, seaweed_server.endpoint)
    replicas = [a, rack, c]
    rounds(replicas, [1, 2])
    one_history(replicas, 2)
    own = [key for key in a.ledger.store.list() if "/rack/" in key or key.endswith("/rack.json")]
    assert all(re.match(r"members/rack/|payloads/rack/|commits/\d{6}/rack\.json$", key) for key in own)
    assert len(own) == 2 + 2 * (len(rack.ledger.shards) + 1)  # heartbeat, clock, shards and commits


def test_a_key_that_is_let_down_by_its_rights_is_one_line(
    demo: str, seaweed_server: servers.Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    use(monkeypatch, seaweed_server.endpoint, servers.RACK)
    with pytest.raises(ConfigError, match="permission denied") as caught:
        create(parse_recipe(RECIPE), demo, tmp_path / "keys")
    assert "\n" not in str(caught.value)
    assert not any(secret in str(caught.value) for secret in servers.RACK)
    assert not (tmp_path / "keys").exists()


def test_no_credential_is_in_the_bucket(seaweed_url: str, tmp_path: Path):
    run = Little(seaweed_url, tmp_path)
    replicas = run.replicas()
    rounds(replicas, [1, 2])
    store = open_store(seaweed_url)
    keys = [path.read_bytes().split()[0] for path in run.keys.iterdir()]
    secrets = [word.encode() for word in servers.ADMIN] + keys + [bytes.fromhex(k.decode()) for k in keys]
    for key in store.list():
        data = store.get(key, max_bytes=1 << 24)
        assert not any(secret in data for secret in secrets), key


def test_a_replicas_facts_are_those_of_all_its_processes():
    first = Facts(loss=2.0, bytes={"activations": 3}, measured={"compute_seconds": [1.0]})
    second = Facts(loss=9.0, bytes={"gradients": 1, "activations": 4}, measured={"compute_seconds": [2.0]})
    counts = {"activations": 7, "gradients": 1, "control": 5}
    assert Facts.gather([first, second.plus(Facts(bytes={"control": 5}))]) == Facts(
        loss=2.0, bytes=counts, measured={"compute_seconds": [1.0, 2.0]}
    )
    assert Facts.gather([first] * 33).measured == {}  # too long for a commit
