"""The bucket as history: what stops a run, and what can be shown, verified, rebuilt and swept."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from little import RECIPE, Little, Replica, equal, rewritten, rounds
from little import hasty as hasty
from safetensors.torch import load_file

from isthmus.cli.main import main
from isthmus.config import parse_recipe
from isthmus.errors import ConfigError, RunError, RunStopped
from isthmus.model.llama import init_params
from isthmus.outer.sparseloco import SparseLoCo
from isthmus.protocol.heartbeat import Heartbeat
from isthmus.protocol.ledger import Ledger, RunInfo, read_run
from isthmus.protocol.payloads import shard_key
from isthmus.protocol.replay import Replay
from isthmus.protocol.shards import unpack_shards
from isthmus.protocol.trust import Signer, canonical, load_signer, new_secret, sha256
from isthmus.store import open_store

pytestmark = pytest.mark.usefixtures("hasty")


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, dict[str, torch.Tensor]]]:
    """Five rounds of three replicas and every theta as they held it; anchors after rounds 2 and 4."""
    folder = tmp_path_factory.mktemp("told")
    plain = RECIPE.replace("[outer]", '[outer]\nclip = "none"')  # what a plain reference can be compared with
    replicas = Little(str(folder / "bucket"), folder, plain).replicas()
    thetas = {0: copied(replicas[0])}
    for t in range(1, 6):
        rounds(replicas, [t])
        thetas[t] = copied(replicas[0])
    assert len({each.exchange.anchor for each in replicas}) == 1
    return folder, thetas


def copied(replica: Replica) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in replica.anchor.items()}


@pytest.fixture
def history(told: tuple[Path, Any], tmp_path: Path) -> str:
    """A copy of the run that a test may spoil."""
    shutil.copytree(told[0], tmp_path / "history")
    return str(tmp_path / "history" / "bucket")


def ledger_of(url: str, signer: Signer | None = None) -> Ledger:
    store = open_store(url)
    return Ledger(store, read_run(store), signer)


def signer_of(url: str, name: str) -> Signer:
    return load_signer(Path(url).parent / "keys" / f"{name}.key", name)


def said(capsys: pytest.CaptureFixture[str], *command: str) -> tuple[int, str, str]:
    status = main(list(command))
    out, err = capsys.readouterr()
    return status, out, err


# What stops a run


def reseal(url: str, round_number: int, signer: Signer, **changed: Any) -> None:
    """Replace a manifest by one that differs in `changed` and is signed by `signer`."""
    path = Path(url, "manifests", f"{round_number:06d}.json")
    body = json.loads(path.read_bytes())["body"] | changed
    path.write_bytes(signer.seal("manifest", read_run(open_store(url)).run_id, body))


def unsigned(url: str) -> None:
    path = Path(url, "manifests", "000003.json")
    path.write_bytes(canonical({"body": json.loads(path.read_bytes())["body"]}))


def tampered(url: str) -> None:
    key = "manifests/000003.json"
    rewritten(open_store(url), key, lambda document: document["body"]["entries"].pop())


def left_without_a_predecessor(url: str) -> None:
    Path(url, "manifests", "000003.json").unlink()


def as_entries(url: str, change: Callable[[list[Any]], list[Any]]) -> None:
    entries = json.loads(Path(url, "manifests", "000003.json").read_bytes())["body"]["entries"]
    reseal(url, 3, signer_of(url, "a"), entries=change(entries))


FORGERIES = {
    "unsigned": (unsigned, "not signed"),
    "tampered": (tampered, "does not carry"),
    "by a stranger": (lambda url: reseal(url, 3, Signer("eve", new_secret())), "stranger"),
    "by a stranger as a": (lambda url: reseal(url, 3, Signer("a", new_secret())), "does not carry a's"),
    "unchained": (lambda url: reseal(url, 3, signer_of(url, "a"), previous="0" * 64), "not chained to manif"),
    "for another round": (lambda url: reseal(url, 3, signer_of(url, "a"), round=4), "it is for round 4"),
    "gone": (left_without_a_predecessor, "is gone"),
    "twice the same": (lambda url: as_entries(url, lambda rows: [rows[0], *rows]), "once each"),
    "of nobody": (lambda url: as_entries(url, lambda rows: []), "nobody has answered"),
    "of a stranger": (
        lambda url: as_entries(url, lambda rows: [rows[0] | {"replica": "eve"}]),
        "(once each|eve, who had no share)",
    ),
    "with shards left out": (
        lambda url: as_entries(url, lambda rows: [rows[0] | {"shards": rows[0]["shards"][:1]}]),
        "every shard once",
    ),
    "malformed": (lambda url: reseal(url, 3, signer_of(url, "a"), members=5), "is malformed: Expected"),
    "oversized": (lambda url: Path(url, "manifests", "000003.json").write_bytes(bytes(2**22 + 1)), "holds"),
}


@pytest.mark.parametrize(("forge", "says"), FORGERIES.values(), ids=FORGERIES)
def test_a_manifest_that_is_not_to_be_trusted_stops_the_run_by_name(
    history: str, forge: Callable[[str], None], says: str
):
    forge(history)
    with pytest.raises(RunStopped, match=rf"manifest 3 of this run.*{says}.*; the run stops here"):
        list(ledger_of(history).between(2, 5))
    if says != "is gone":
        replica = Replica(history, "a", signer_of(history, "a"))
        for t in (1, 2):
            replica.apply(t, replica.exchange.closed(t))
        with pytest.raises(RunStopped, match="manifest 3"):
            replica.exchange.closed(3)
    with pytest.raises(RunStopped, match="manifest 3"):  # nobody else can speak for the anchor of round 2
        Replay(ledger_of(history), start=2)


def test_a_manifest_signed_by_one_who_may_not_close_stops_the_run(folder_url: str, tmp_path: Path):
    run = Little(folder_url, tmp_path, closers=["a"])
    replicas = run.replicas()
    rounds(replicas, [1])
    reseal(folder_url, 1, run.signer("b"))
    with pytest.raises(RunStopped, match=r"manifest 1 .* it is signed by b, who may not close rounds"):
        run.manifest(1)


def test_a_rewritten_history_is_found_out_by_the_manifest_after_it(history: str):
    """A closer may sign anything; it cannot take back what others have chained to."""
    reseal(history, 2, signer_of(history, "a"), seconds=9.0)
    with pytest.raises(RunStopped, match=r"manifest 3 .*not chained to manifest 2"):
        list(ledger_of(history).between(1, 3))
    with pytest.raises(RunError, match=r"the anchor of round 2 .*another history \(it was written by"):
        ledger_of(history).read_anchor(2, [])


# Readers


@pytest.mark.parametrize("spoil", ["delete", "change"])
def test_a_reader_never_skips_a_listed_payload_on_its_own(history: str, spoil: str):
    reader = Replica(history, "c", signer_of(history, "c"))
    shard = reader.ledger.manifest(1).entries[1].shards[2]
    path = Path(history, shard_key("b", 1, shard))
    if spoil == "delete":
        path.unlink()
    else:
        path.write_bytes(bytes(shard.size))

    class Waits(Exception):
        pass

    def sleep(seconds: float) -> None:
        raise Waits

    reader.exchange.missing.sleep = sleep
    with pytest.raises(Waits):
        reader.exchange.closed(1)
    assert re.search(r"cannot be read \(shard 2 (is missing|does not match)", reader.said[-1])
    with pytest.raises(RunError, match="round 1 counts b, but shard 2"):
        Replay(ledger_of(history)).step()


def test_a_replica_with_another_anchor_is_told_to_join_anew(history: str):
    strayed = Replica(history, "c", signer_of(history, "c"))
    strayed.anchor["norm.weight"].add_(1e-6)
    strayed.hold(0)
    with pytest.raises(RunError, match="replica c holds another anchor than round 1 started from"):
        strayed.exchange.closed(1)


def test_an_anchor_is_used_only_whole_signed_and_of_this_history(history: str):
    path = Path(history, "anchors", "000004")
    good = {file: file.read_bytes() for file in path.iterdir()}
    every = range(len(ledger_of(history).shards))
    _, tensors = ledger_of(history).read_anchor(4, every)
    assert set(tensors) == set(ledger_of(history).run.recipe.model.shapes())

    def spoiled(name: str, data: bytes | None) -> None:
        target = path / name
        if data is None:
            target.unlink()
        else:
            target.write_bytes(data)
        with pytest.raises(RunError, match=r"the anchor of round 4 .*cannot be used"):
            ledger_of(history).read_anchor(4, every)
        for file, content in good.items():
            file.write_bytes(content)

    spoiled("1.safetensors", None)
    spoiled("1.safetensors", good[path / "2.safetensors"])
    spoiled("2.safetensors", good[path / "2.safetensors"][:-1])
    spoiled("complete.json", b"{}")
    run_id, body = read_run(open_store(history)).run_id, json.loads(good[path / "complete.json"])["body"]
    noise = b"\xff" * 64
    (path / "0.safetensors").write_bytes(noise)
    files = [sha256(noise), *body["files"][1:]]
    spoiled("complete.json", signer_of(history, "a").seal("anchor", run_id, body | {"files": files}))
    spoiled("complete.json", Signer("a", new_secret()).seal("anchor", run_id, body))
    spoiled("complete.json", signer_of(history, "a").seal("anchor", run_id, body | {"round": 2}))
    ledger = ledger_of(history)
    ledger.manifest(4)
    other = signer_of(history, "a").seal("anchor", run_id, body | {"manifest": "0" * 64})
    (path / "complete.json").write_bytes(other)
    with pytest.raises(RunError, match="another history"):
        ledger.read_anchor(4, every)


@pytest.mark.parametrize(
    "data", [b"", b"[]", b"{}", b'{"format": 9}', b'{"format": 1, "keys": 3}', b"[" * 99999, bytes(2**22 + 1)]
)
def test_a_run_json_that_is_not_ours_is_one_line(folder_url: str, data: bytes):
    store = open_store(folder_url)
    store.put("run.json", data)
    with pytest.raises(ConfigError) as caught:
        read_run(store)
    assert "\n" not in str(caught.value)


# Heartbeats


@pytest.mark.parametrize(
    "spoil",
    [
        lambda c, b: c.ledger.store.put("members/c/live.json", bytes(5 << 20)),
        lambda c, b: c.ledger.store.put("members/c/live.json", b"{}"),
        lambda c, b: c.ledger.store.put(
            "members/c/live.json", b.ledger.signer.seal("heartbeat", b.ledger.run.run_id, {"state": "x"})
        ),
        lambda c, b: c.beat("\x1b[2J", loss="much", inner_step=[1], tokens_per_second={}, round=10**400),
    ],
    ids=["oversized", "unsigned", "signed by another", "of wrong types"],
)
def test_a_broken_heartbeat_breaks_nobody_else(
    folder_url: str, tmp_path: Path, capsys, spoil: Callable[[Replica, Replica], None]
):
    run = Little(folder_url, tmp_path, closers=["a"])
    a, b, c = run.replicas()
    spoil(c, b)
    found = a.ledger.heartbeat("c")
    assert found is None or found[0] == Heartbeat(incarnation="1", beat=1)
    for each in (a, b, c):
        each.exchange.deliver(1, each.update())
    assert a.exchange.closer.attempt(1, a.exchange.anchor)
    status, out, _ = said(capsys, "status", folder_url)
    assert status == 0
    assert "\x1b" not in out


# Show, verify, rebuild, sweep


def test_show_tells_who_gave_what_to_every_round(history: str, capsys):
    status, out, _ = said(capsys, "ledger", "show", history, "--json")
    rows = json.loads(out)
    assert status == 0
    assert [row["round"] for row in rows] == [1, 2, 3, 4, 5]
    ledger = ledger_of(history)
    for row in rows:
        assert set(row["contributors"]) == {"a", "b", "c"}
        assert row["closer"] in "abc"
        assert row["payload_bytes"] == 3 * sum(ledger.sizes)
        assert row["refused"] == {}
        assert row["seconds"] >= 0
        assert row["anchor_before"] == ledger.manifest(row["round"]).anchor
        for entry in ledger.manifest(row["round"]).entries:
            square = 0.0
            for shard in entry.shards:
                packed = ledger.get_shard(entry.replica, row["round"], shard)
                for payload in unpack_shards(ledger, {shard.index: packed}).values():
                    square += payload.values.double().square().sum().item()
            assert row["contributors"][entry.replica] == pytest.approx(square**0.5, rel=1e-4)
    assert "closed by" in said(capsys, "ledger", "show", history)[1]


def test_verify_replays_every_round_and_compares_anchors(history: str, capsys):
    status, out, _ = said(capsys, "ledger", "verify", history, "--json")
    facts = json.loads(out)
    assert (status, facts["from"], facts["to"], facts["anchors"]) == (0, 0, 5, [2, 4])
    status, out, _ = said(capsys, "ledger", "verify", history, "--from", "3")
    assert status == 0
    assert out.startswith("rounds 3 to 5 replay to anchor " + facts["digest"][:16])


def a_payload(history: str) -> None:
    entry = ledger_of(history).manifest(3).entries[1]
    path = Path(history, shard_key("b", 3, entry.shards[2]))
    path.write_bytes(path.read_bytes()[:-1] + b"x")


def an_anchor_file(history: str) -> None:
    path = Path(history, "anchors", "000004", "1.safetensors")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def the_files_of_an_anchor_with_their_hashes(history: str) -> None:
    """As a closer could: everything fits together, and is not theta^(4)."""
    signer = signer_of(history, "a")
    ledger = ledger_of(history, signer)
    digest, tensors = ledger.read_anchor(4, range(len(ledger.shards)))
    tensors["norm.weight"] += 1
    files = [
        ledger.put_anchor_shard(4, i, {name: tensors[name] for name in names})
        for i, names in enumerate(ledger.shards)
    ]
    ledger.manifest(4)
    ledger.complete_anchor(4, digest, files)


@pytest.mark.parametrize(
    ("tamper", "says"),
    [
        (a_payload, "round 3 counts b, but shard 2 does not match its commit"),
        (an_anchor_file, "cannot be used: file 1 is missing or not what"),
        (
            the_files_of_an_anchor_with_their_hashes,
            "the anchor of round 4, written by a, is not what replaying gives",
        ),
    ],
)
def test_verify_names_the_round_that_was_tampered_with(
    history: str, capsys, tamper: Callable[[str], None], says: str
):
    tamper(history)
    status, out, err = said(capsys, "ledger", "verify", history)
    assert status == 1
    assert out == ""
    assert says in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("t", [0, 1, 2, 3, 5])
def test_rebuild_gives_theta_as_the_replicas_had_it_bit_for_bit(told, tmp_path: Path, capsys, t: int):
    folder, thetas = told
    target = tmp_path / "theta.safetensors"
    status, out, _ = said(
        *(capsys, "ledger", "rebuild", str(folder / "bucket")),
        "--round",
        str(t),
        "--to",
        str(target),
        "--json",
    )
    assert status == 0
    assert json.loads(out)["round"] == t
    assert equal(load_file(target), thetas[t])


def test_rebuild_without_a_replica_applies_the_others_alone(told, tmp_path: Path, capsys):
    """Against a plain reference: the same payloads, aggregated by hand."""
    url, target = str(told[0] / "bucket"), tmp_path / "without.safetensors"
    status, out, _ = said(
        capsys, "ledger", "rebuild", url, "--without", "b", "--round", "4", "--to", str(target)
    )
    assert status == 0
    assert "theta^(4) without b" in out
    ledger = ledger_of(url)
    theta = init_params(ledger.run.recipe.model, ledger.run.recipe.seed)
    for t in range(1, 5):
        total = {name: torch.zeros_like(tensor) for name, tensor in theta.items()}
        count = {name: torch.zeros_like(tensor) for name, tensor in theta.items()}
        for entry in ledger.manifest(t).entries:
            for shard in entry.shards if entry.replica != "b" else ():
                packed = ledger.get_shard(entry.replica, t, shard)
                for name, payload in unpack_shards(ledger, {shard.index: packed}).items():
                    dense = SparseLoCo(theta, ledger.run.recipe.outer).codec.decode(payload)
                    total[name] += dense
                    count[name] += dense != 0
        theta = {name: theta[name] - total[name] / count[name].clamp(min=1) for name in theta}
    rebuilt = load_file(target)
    for name, tensor in theta.items():
        torch.testing.assert_close(rebuilt[name], tensor, rtol=0, atol=1e-7)
    assert not torch.equal(rebuilt["norm.weight"], told[1][4]["norm.weight"])


def test_sweep_keeps_what_joiners_and_auditors_need(told, history: str, capsys):
    before = open_store(history).list()
    status, out, _ = said(capsys, "ledger", "sweep", history, "--json")
    assert (status, json.loads(out)["kept_after_round"]) == (0, 2)
    after = open_store(history).list()
    gone = set(before) - set(after)
    old = re.compile(r"payloads/\w+/00000[12]/.*|commits/00000[12]/.*")
    assert gone == {key for key in before if old.fullmatch(key)}
    assert json.loads(out)["deleted"] == len(gone) > 0
    status, out, _ = said(capsys, "ledger", "verify", history)
    assert status == 0
    assert out.startswith("rounds 3 to 5 replay")
    joiner = Replay(ledger_of(history), start=5)
    assert joiner.round == 4
    while joiner.step():
        pass
    assert equal(joiner.anchor, told[1][5])
    assert json.loads(said(capsys, "ledger", "sweep", history, "--json")[1])["deleted"] == 0
    target = str(Path(history).parent / "t.safetensors")
    status, _, err = said(capsys, "ledger", "rebuild", history, "--without", "b", "--to", target)
    assert status == 1
    assert "may have been swept" in err
    assert not Path(target).exists()


def test_sweep_does_not_count_on_an_anchor_that_cannot_be_read(history: str, capsys):
    an_anchor_file(history)
    before = open_store(history).list()
    status, _, err = said(capsys, "ledger", "sweep", history)
    assert status == 2
    assert "1 complete anchor that can be believed; sweeping needs two" in err
    assert open_store(history).list() == before


def test_run_json_fixes_recipe_keys_and_closers(folder_url: str, tmp_path: Path):
    run = Little(folder_url, tmp_path, closers=["b", "a"]).run
    there: RunInfo = read_run(open_store(folder_url))
    assert there == run
    assert there.closers == ("b", "a")
    assert there.recipe == parse_recipe(RECIPE)
    assert set(there.keys) == {"a", "b", "c"}
    assert len(there.run_id) == 32
    text = Path(folder_url, "run.json").read_text()
    for name in "abc":
        assert (tmp_path / "keys" / f"{name}.key").read_text().strip() not in text
