"""Odd documents: each kind has a schema with bounds; what breaks it is one line that names the document."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from little import RECIPE, Little, Replica, rounds
from little import hasty as hasty

from isthmus.cli.main import main
from isthmus.config import parse_recipe
from isthmus.errors import ConfigError, RunError, RunStopped
from isthmus.protocol.documents import AnchorDocument, Commit, decode
from isthmus.protocol.ledger import Ledger, parse_run, read_run, run_document
from isthmus.protocol.trust import Refused, canonical
from isthmus.store import Store, open_store

pytestmark = pytest.mark.usefixtures("hasty")
HUGE = 10**400


def test_a_field_that_is_wrong_is_named_with_its_place():
    body = {"round": 1, "digest": "0" * 64, "files": ["0" * 64, "x"], "manifest": "0" * 64}
    with pytest.raises(Refused, match=r"^the anchor is malformed: .* at `\$\.files\[1\]`"):
        decode(json.dumps(body).encode(), AnchorDocument, "anchor")
    with pytest.raises(Refused, match=r"missing required field `manifest`"):
        decode(
            json.dumps({name: body[name] for name in ("round", "digest")} | {"files": ["0" * 64]}).encode(),
            AnchorDocument,
            "anchor",
        )


GOOD = {"round": 1, "anchor": "", "incarnation": "1"}


@pytest.mark.parametrize(
    "data",
    [b"", b"[]", b"{", b"\xff", b'{"round":' * 5000, b'{"x":' + b"[" * 10**5 + b"]" * 10**5 + b"}"],
    ids=["nothing", "a list", "half", "no text", "deep", "deep in a field that nobody knows"],
)
def test_what_is_no_document_is_one_line(data: bytes):
    with pytest.raises(Refused, match="the commit is malformed") as caught:
        decode(data, Commit, "commit")
    assert len(str(caught.value)) < 300
    assert str(caught.value).isprintable()


def test_fields_of_a_newer_version_are_ignored_unless_it_requires_them():
    newer = GOOD | {"colour": {"deep": [1]}, "requires": ["tensors"]}
    assert decode(json.dumps(newer).encode(), Commit, "commit").round == 1
    for more in ({}, {"round": {"of": "another type"}}):  # what it requires is said first
        with pytest.raises(Refused, match='the commit requires "colour", which this Isthmus does not know'):
            decode(json.dumps(newer | {"requires": ["colour"]} | more).encode(), Commit, "commit")


@pytest.fixture
def run(folder_url: str, tmp_path: Path) -> tuple[Little, list[Replica]]:
    """Three settled rounds of six; an anchor after the second."""
    made = Little(folder_url, tmp_path)
    replicas = made.replicas()
    rounds(replicas, [1, 2, 3])
    return made, replicas


def said(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    status = main(list(words))
    err = capsys.readouterr().err
    assert err.count("\n") <= 1, err
    return status, err


def change(url: str, key: str, signer: Any, kind: str, **fields: Any) -> None:
    path = Path(url, key)
    body = json.loads(path.read_bytes())["body"] | fields
    path.write_bytes(signer.seal(kind, read_run(open_store(url)).run_id, body))


ODD_MANIFESTS: dict[str, dict[str, Any]] = {
    "a huge deadline": {"deadline_seconds": HUGE},
    "a deadline before time": {"deadline_seconds": -1.0},
    "true for a number": {"seconds": True},
    "a huge round": {"round": HUGE},
    "true for a round": {"round": True},
    "a member elsewhere": {"members": ["../x"]},
    "a member that is a stranger": {"members": ["mallory"]},
    "a share of a stranger": {"dealt_in": ["a", "b", "c", "mallory"]},
    "a member without a share": {"dealt_in": ["b", "c"]},
    "no shares": {"dealt_in": []},
    "a refused stranger": {"refused": [["mallory", "late", "because"]]},
    "a long reason": {"refused": [["c", "late", "x" * 301]]},
    "a code that is none": {"refused": [["c", "Because of", "x"]]},
    "more than we know": {"requires": ["published"]},
    "members by the million": {"members": ["a"] * 5000},
    "entries that are none": {"entries": [None]},
    "no entries": {"entries": {}},
    "a chain to nowhere": {"previous": "x"},
    "an anchor that is none": {"anchor": "../" * 21 + "x"},
}


@pytest.mark.parametrize("fields", ODD_MANIFESTS.values(), ids=ODD_MANIFESTS)
def test_an_odd_manifest_is_one_line_for_every_reader(
    run: tuple[Little, list[Replica]], tmp_path: Path, capsys, fields: dict[str, Any]
):
    made, _ = run
    change(made.url, "manifests/000003.json", made.signer("a"), "manifest", **fields)
    target = str(tmp_path / "theta")
    for words in (
        ("status", made.url),
        ("ledger", "show", made.url),
        ("ledger", "verify", made.url),
        ("ledger", "rebuild", made.url, "--to", target),
    ):
        status, err = said(capsys, *words)
        assert status == 1
        assert "manifest 3 of this run" in err
        assert "by closer a," in err or "written by a)" in err
    with pytest.raises(RunStopped, match="manifest 3"):
        made.replica("b").exchange.closed(3)


@pytest.mark.parametrize("data", [b"", b"{}", b"\x00" * 100])
@pytest.mark.parametrize("number", ["999999999999", "000900", "000005", "00000x", "-00001", "\u0663"])
def test_what_lies_beyond_the_chain_is_not_a_round(
    run: tuple[Little, list[Replica]], capsys, number: str, data: bytes, tmp_path: Path
):
    made, replicas = run
    Path(made.url, "manifests", f"{number}.json").write_bytes(data)
    assert made.ledger().last_round() == 3
    assert said(capsys, "status", made.url)[0] == 0
    assert said(capsys, "ledger", "rebuild", made.url, "--to", str(tmp_path / "theta"))[0] == 0
    if number != "000005":
        rounds(replicas, [4])
        assert made.ledger().last_round() == 4


@pytest.mark.parametrize("gone", [[1], [1, 2], [2], [2, 3], [1, 2, 3]])
def test_manifests_that_were_deleted_are_named(
    run: tuple[Little, list[Replica]], capsys, gone: list[int], tmp_path: Path
):
    made, replicas = run
    rounds(replicas, [4])
    for t in gone:
        Path(made.url, "manifests", f"{t:06d}.json").unlink()
    for words in (
        ("status", made.url),
        ("ledger", "show", made.url),
        ("ledger", "verify", made.url),
        ("ledger", "rebuild", made.url, "--to", str(tmp_path / "theta")),
    ):
        status, err = said(capsys, *words)
        assert status == 1
        assert f"manifest {gone[0]} of this run is gone" in err


def test_every_store_finds_the_newest_round_by_the_chain(any_store_url: str, tmp_path: Path, capsys):
    rounds(Little(any_store_url, tmp_path).replicas(), [1, 2, 3])
    store, target = open_store(any_store_url), str(tmp_path / "theta")
    for number in ("999999999999", "000900", "000005"):
        store.put(f"manifests/{number}.json", b"")
        store.put(f"anchors/{number}/complete.json", b"{}")
    assert said(capsys, "status", any_store_url)[0] == 0
    assert said(capsys, "ledger", "rebuild", any_store_url, "--to", target)[0] == 0
    for t in (1, 2):
        store.delete(f"manifests/{t:06d}.json")
    for words in (("status", any_store_url), ("ledger", "verify", any_store_url)):
        status, err = said(capsys, *words)
        assert (status, "manifest 1 of this run is gone" in err) == (1, True)


def test_junk_anchors_of_the_future_change_nothing(run: tuple[Little, list[Replica]], capsys, tmp_path: Path):
    """At a restart, the two newest anchors tell up to where payloads may have been swept."""
    made, _ = run
    for name in ("000005", "000006", "000900", "999999999999", "x", "\u0665"):
        path = Path(made.url, "anchors", name)
        path.mkdir(parents=True, exist_ok=True)
        (path / "complete.json").write_bytes(b"{}")
    ledger = made.ledger("b")
    assert ledger.anchor_rounds() == [2]
    assert said(capsys, "ledger", "verify", made.url)[0] == 0
    assert said(capsys, "ledger", "rebuild", made.url, "--to", str(tmp_path / "theta"))[0] == 0


ODD_ANCHORS: dict[str, dict[str, Any]] = {
    "files for a number": {"files": 3},
    "too few files": {"files": ["0" * 64]},
    "a file that is no hash": {"files": ["../x"] * 3},
    "a huge round": {"round": HUGE},
    "a digest that is none": {"digest": [1]},
    "another history": {"manifest": "0" * 64},
}


@pytest.mark.parametrize("fields", ODD_ANCHORS.values(), ids=ODD_ANCHORS)
def test_an_odd_anchor_is_named_with_its_writer(run: tuple[Little, list[Replica]], fields: dict[str, Any]):
    made, _ = run
    change(made.url, "anchors/000002/complete.json", made.signer("b"), "anchor", **fields)
    words = r"the anchor of round 2 cannot be used: .* \(it was written by b\)"
    with pytest.raises(RunError, match=words) as caught:
        made.ledger().read_anchor(2, range(3))
    assert "\n" not in str(caught.value)


ODD_RUNS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a huge format": lambda body: body | {"format": HUGE},
    "true for a format": lambda body: body | {"format": True},
    "a run id elsewhere": lambda body: body | {"run_id": "../x"},
    "a recipe that is none": lambda body: body | {"recipe": ["x"]},
    "a key that is none": lambda body: body | {"keys": body["keys"] | {"a": "zz"}},
    "a key of a stranger": lambda body: body | {"keys": body["keys"] | {"mallory": "0" * 64}},
    "a name elsewhere": lambda body: body | {"keys": body["keys"] | {"../x": "0" * 64}},
    "a key too few": lambda body: body | {"keys": {"a": body["keys"]["a"]}},
    "a closer that is a stranger": lambda body: body | {"closers": ["mallory"]},
    "a closer twice": lambda body: body | {"closers": ["a", "a"]},
    "no closer": lambda body: body | {"closers": []},
    "a corpus that is none": lambda body: body | {"corpus": 3},
    "a start that is none": lambda body: body | {"start": "x" * 64},
    "a list": lambda body: [body],
    "no recipe": lambda body: {name: value for name, value in body.items() if name != "recipe"},
}


@pytest.mark.parametrize("odd", ODD_RUNS.values(), ids=ODD_RUNS)
def test_an_odd_run_json_is_one_line(folder_url: str, tmp_path: Path, capsys, odd: Callable[..., Any]):
    Little(folder_url, tmp_path)
    path = Path(folder_url, "run.json")
    data = canonical(odd(json.loads(path.read_bytes())))
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=r"run\.json") as caught:
        parse_run(data)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300
    assert said(capsys, "status", folder_url)[0] == 2


@pytest.mark.parametrize(
    "fields",
    [
        {"round": True},
        {"round": HUGE},
        {"incarnation": "x" * 65},
        {"requires": ["scores"]},
        {"facts": {"bytes": {"control": HUGE}}},
        {"facts": {"loss": "low"}},
        {"shards": [[True, "0" * 64, 1]]},
        {"shards": [[0, "0" * 64, HUGE]]},
        {"facts": []},
        {"anchor": 3},
    ],
)
def test_an_odd_commit_is_refused_by_name(folder_url: str, tmp_path: Path, fields: dict[str, Any]):
    a, b, c = Little(folder_url, tmp_path, closers=["a"]).replicas()
    for honest in (a, b):
        honest.exchange.deliver(1, honest.update())
    mine = c.update()
    for index, data in mine.shards.items():
        c.ledger.put_shard(1, index, data)
    c.ledger.store.put(c.commit_key(), c.sealed(1, c.entry(mine), **fields))
    assert a.exchange.closer.attempt(1, a.exchange.anchor)
    manifest = a.ledger.manifest(1)
    ((name, reason),) = manifest.refused
    assert (name, [entry.replica for entry in manifest.entries]) == ("c", ["a", "b"])
    assert reason.startswith(("the commit is malformed: ", "the commit requires "))


def test_a_manifest_of_many_members_with_the_longest_commits_is_within_its_limit():
    """128 members with 8 KiB each: no contributor can make a round too large to be written."""

    recipe = RECIPE.replace('name = "a"', 'name = "a"\ncount = 126')
    names = [member.name for member in parse_recipe(recipe).fleet()]
    assert len(names) == 128
    keys = dict.fromkeys(names, "0" * 64)
    info = parse_run(run_document(parse_recipe(recipe), keys, names[:2], owner="0" * 64))
    ledger = Ledger(Store("memory", None), info)
    shards = [[i, "0" * 64, size] for i, size in enumerate(ledger.sizes)]
    facts = {"x" * 40: "y" * 7500}
    commit = {
        "shards": shards,
        "facts": facts,
        "round": 6,
        "anchor": "0" * 64,
    }
    sealed = {"body": commit | {"incarnation": "x" * 64}, "replica": "a-100", "signature": "0" * 128}
    assert len(canonical(sealed)) < ledger.cut.commit_limit
    entry = {"replica": "a-100", "shards": shards, "norm": 1.123456789, "facts": facts}
    reasons = [["a-100", "x" * 32, "\U0001f600" * 300]] * 128
    body = {
        "entries": [entry] * 128,
        "refused": reasons,
        "members": names,
        "dealt_in": names,
        "previous": "0" * 64,
    }
    assert len(canonical(body)) + 1024 < ledger.manifests.limit
