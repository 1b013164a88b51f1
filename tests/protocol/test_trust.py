"""What is refused, by name, while the run goes on with the others."""

import dataclasses
import json
import re
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from little import Little, Replica, with_value
from little import hasty as hasty
from msgspec import to_builtins
from msgspec.structs import replace

from isthmus.errors import ConfigError
from isthmus.outer.exchange import Contribution
from isthmus.protocol.heartbeat import Heartbeat, Vitals, fitting
from isthmus.protocol.ledger import Shard
from isthmus.protocol.payloads import shard_key
from isthmus.protocol.trust import (
    MAX_DOCUMENT_BYTES,
    Refused,
    Signer,
    canonical,
    load_signer,
    new_secret,
    open_raw,
    save_secret,
    sha256,
)
from isthmus.runlog.facts import Facts
from isthmus.sparse import TopK, pack_many, unpack_many

pytestmark = pytest.mark.usefixtures("hasty")
Evil = Callable[[Replica, Replica], None]
CASES: list[tuple[str, str, Evil]] = []


def refused(says: str) -> Callable[[Evil], Evil]:
    """Register what `c` does, with `b` honest beside it, and the reason that must be given."""

    def register(evil: Evil) -> Evil:
        CASES.append((evil.__name__.strip("_"), says, evil))
        return evil

    return register


def put_commit(c: Replica, data: bytes, mine: Contribution | None = None) -> None:
    for index, shard in (mine.shards if mine else {}).items():
        c.ledger.put_shard(1, index, shard)
    c.ledger.store.put(c.commit_key(), data)


def changed(c: Replica, index: int, change: Callable[[bytes], bytes]) -> Contribution:
    """An update of which one shard was tampered with before it was hashed, listed and signed."""
    shards = dict(c.update().shards)
    shards[index] = change(shards[index])
    return Contribution(c.name, shards)


def sealed_again(body: bytes) -> bytes:
    return body + struct.pack("<I", zlib.crc32(body))


@refused("the commit is not signed: it is not a document of ours")
def unsigned(c: Replica, b: Replica) -> None:
    mine = c.update()
    put_commit(c, canonical({"body": to_builtins(c.entry(mine)), "replica": "c"}), mine)


@refused("the commit is not signed")
def json_of_endless_depth(c: Replica, b: Replica) -> None:
    put_commit(c, b'{"body":' + b"[" * 4_000 + b"]" * 4_000 + b',"replica":"c","signature":""}')


@refused("does not carry c's signature for this run")
def changed_after_it_was_signed(c: Replica, b: Replica) -> None:
    mine = c.update()
    put_commit(c, c.sealed(1, c.entry(mine)).replace(b'"round":1', b'"round":2'), mine)


@refused(r"signed by a stranger \('mallory'\), who is not on the run's list")
def signed_by_a_stranger(c: Replica, b: Replica) -> None:
    mine = c.update()
    put_commit(c, c.sealed(1, c.entry(mine), by=Signer("mallory", new_secret())), mine)


@refused("does not carry c's signature")
def signed_by_a_stranger_in_our_name(c: Replica, b: Replica) -> None:
    mine = c.update()
    put_commit(c, c.sealed(1, c.entry(mine), by=Signer("c", new_secret())), mine)


@refused("the commit is for round 2, not 1")
def for_another_round(c: Replica, b: Replica) -> None:
    mine = c.update()
    put_commit(c, c.sealed(2, c.entry(mine)), mine)


@refused("starts from another anchor")
def from_another_anchor(c: Replica, b: Replica) -> None:
    mine = c.update()
    put_commit(c, c.sealed(1, c.entry(mine), anchor="0" * 64), mine)


@refused(r"shard 1 is said to have \d+ bytes")
def truncated_and_owned_up_to(c: Replica, b: Replica) -> None:
    c.deliver_as(1, changed(c, 1, lambda data: data[:-5]))


@refused("shard 0 does not match its commit")
def a_shard_that_does_not_match_its_commit(c: Replica, b: Replica) -> None:
    mine, other = c.update(), c.update()
    c.deliver_as(1, mine)
    c.ledger.store.put(shard_key("c", 1, c.entry(mine).shards[0]), other.shards[0])


@refused("shard 2 is malformed: .* not finite")
def with_a_nan(c: Replica, b: Replica) -> None:
    c.deliver_as(1, changed(c, 2, lambda data: with_value(data, float("nan"))))


@refused("shard 0 is malformed: the payload's checksum")
def with_a_nan_and_the_old_checksum(c: Replica, b: Replica) -> None:
    c.deliver_as(1, changed(c, 0, lambda data: data[:-8] + struct.pack("<f", float("nan")) + data[-4:]))


@refused(r"its norm \S+ is over 3 times the median")
def a_thousand_times_too_large(c: Replica, b: Replica) -> None:
    c.deliver_as(1, c.update(scale=10.0))


@refused("shard 1 is missing")
def with_a_missing_shard(c: Replica, b: Replica) -> None:
    mine = c.update()
    c.deliver_as(1, mine)
    c.ledger.store.delete(shard_key("c", 1, c.entry(mine).shards[1]))


@refused("shard 0 is missing")
def with_another_ones_shards_that_it_never_put(c: Replica, b: Replica) -> None:
    theirs = json.loads(b.ledger.store.get(b.commit_key(), max_bytes=1 << 20))["body"]["shards"]
    entry = c.entry(c.update(), shards=tuple(Shard(*row) for row in theirs))
    put_commit(c, c.sealed(1, entry))


@refused("shard 1 is said to have 1000000000000 bytes")
def with_an_oversized_shard_declared(c: Replica, b: Replica) -> None:
    mine = c.update()
    rows = list(c.entry(mine).shards)
    rows[1] = replace(rows[1], size=10**12)
    c.deliver_as(1, mine, c.entry(mine, shards=tuple(rows)))


@refused(r"shard 1: .* holds 3000000 bytes; at most \d+ are accepted")
def with_an_oversized_object(c: Replica, b: Replica) -> None:
    mine = c.update()
    c.deliver_as(1, mine)
    c.ledger.store.put(shard_key("c", 1, c.entry(mine).shards[1]), bytes(3_000_000))


@refused(r"the commit: .* holds \d+ bytes; at most")
def with_an_oversized_commit(c: Replica, b: Replica) -> None:
    put_commit(c, b" " * (MAX_DOCUMENT_BYTES + 1))


@refused("does not list every shard once")
def with_a_shard_listed_twice(c: Replica, b: Replica) -> None:
    mine = c.update()
    first, second, _ = c.entry(mine).shards
    c.deliver_as(1, mine, c.entry(mine, shards=(first, second, second)))


@refused("the commit is malformed")
def with_a_path_for_a_hash(c: Replica, b: Replica) -> None:
    mine = c.update()
    rows = [replace(row, digest="../" * 21 + "x") for row in c.entry(mine).shards]
    put_commit(c, c.sealed(1, c.entry(mine, shards=tuple(rows))), mine)


@refused(r"shard 0 is said to have \d+ bytes|is not coded as")
def in_another_codec(c: Replica, b: Replica) -> None:
    codec = TopK(c.recipe.outer.chunk_side, c.recipe.outer.keep + 1, "fp32")
    c.deliver_as(1, c.packed({name: codec.encode(t) for name, t in c.anchor.items()}))


@refused("shard 0: tok_embeddings.weight has the shape")
def in_another_shape(c: Replica, b: Replica) -> None:
    def turn(data: bytes) -> bytes:
        sent = unpack_many(data)
        turned = {n: dataclasses.replace(p, shape=torch.Size(p.shape[::-1])) for n, p in sent.items()}
        return pack_many(turned)

    c.deliver_as(1, changed(c, 0, turn))


@refused("shard 2 does not hold the tensors it should")
def with_another_set_of_names(c: Replica, b: Replica) -> None:
    c.deliver_as(1, changed(c, 2, lambda d: sealed_again(d.replace(b"norm.weight", b"nose.weight")[:-4])))


@refused(r"shard 0 is malformed: \\x1b\[2J\\x0ambeddings.weight claims 255 dimensions")
def with_a_name_that_would_write_on_terminals(c: Replica, b: Replica) -> None:
    def paint(data: bytes) -> bytes:
        name = b"tok_embeddings.weight"
        painted = data.replace(name, b"\x1b[2J\n" + name[5:])
        at = painted.index(b"\x1b[2J\n") + len(name)
        return sealed_again((painted[:at] + b"\xff" + painted[at + 1 :])[:-4])

    c.deliver_as(1, changed(c, 0, paint))


@refused(r"the commit: .* holds \d+ bytes; at most")
def with_facts_that_are_too_large(c: Replica, b: Replica) -> None:
    mine = c.update()
    put_commit(c, c.sealed(1, c.entry(mine), facts={"loss": 1.0, "story": "x" * 9000}), mine)


@pytest.mark.parametrize(("says", "evil"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_it_is_refused_by_name_and_the_round_closes_with_the_others(
    folder_url: str, tmp_path: Path, says: str, evil: Evil
):
    a, b, c = Little(folder_url, tmp_path, closers=["a"]).replicas()
    for honest in (a, b):
        honest.exchange.deliver(1, honest.update())
    evil(c, b)
    assert a.exchange.closer.attempt(1, a.exchange.anchor)

    manifest = b.ledger.manifest(1)
    assert [entry.replica for entry in manifest.entries] == ["a", "b"]
    ((name, reason),) = manifest.refused
    assert name == "c"
    assert reason.isprintable()
    assert a.said == [f"round 1: refused c: {reason}"]
    assert re.search(says, reason)
    for honest in (a, b):
        honest.apply(1, honest.exchange.closed(1))
    assert a.exchange.anchor == b.exchange.anchor


@pytest.mark.parametrize("thief", ["a", "b"])
def test_a_copied_commit_neither_counts_twice_nor_harms_its_author(
    folder_url: str, tmp_path: Path, thief: str
):
    """Whether the copy is judged before or after the original."""
    replicas = {each.name: each for each in Little(folder_url, tmp_path, closers=["c"]).replicas()}
    author = {"a": "b", "b": "a"}[thief]
    for name in (author, "c"):
        replicas[name].exchange.deliver(1, replicas[name].update())
    copied = replicas[author].ledger.store.get(replicas[author].commit_key(), max_bytes=1 << 20)
    replicas[thief].ledger.store.put(replicas[thief].commit_key(), copied)
    c = replicas["c"]
    assert c.exchange.closer.attempt(1, c.exchange.anchor)
    manifest = c.ledger.manifest(1)
    assert [entry.replica for entry in manifest.entries] == [author, "c"]
    assert dict(manifest.refused) == {thief: f"the commit of {thief} is signed by {author}"}


@pytest.mark.parametrize(
    "facts",
    [
        {"loss": "\x1b[2J"},
        {"grad_norm": 10**400},
        {"seconds": True},
        {"bytes": ["x"]},
        {"bytes": {"control": -1}},
        {"bytes": {"x\n": 1}},
        {"measured": {"many": [1] * 33}},
    ],
)
def test_figures_of_another_type_or_size_make_a_commit_malformed(
    folder_url: str, tmp_path: Path, facts: dict[str, Any]
):
    a, _, c = Little(folder_url, tmp_path, closers=["a"]).replicas()
    sealed = c.sealed(1, c.entry(c.update()), facts=facts)
    with pytest.raises(Refused, match="the commit is malformed") as caught:
        a.ledger.check_commit(sealed, "c", 1, a.exchange.anchor)
    assert str(caught.value).isprintable()
    assert caught.value.code == "malformed"


def test_a_replica_leaves_out_of_its_own_figures_what_readers_would_refuse():
    plain = {"loss": 2.5, "grad_norm": 1, "seconds": 0.5, "bytes": {"control": 7}}
    assert Facts.from_dict(plain).to_dict() == plain
    odd = {"loss": float("nan"), "grad_norm": float("inf"), "bytes": {"control": -1}, "seconds": 0.5}
    assert Facts.from_dict(odd) == Facts(seconds=0.5)
    assert Facts.from_dict({"measured": {"many": [1] * 33}}) == Facts()
    vitals = Vitals(restarts=2, last_error="a\nb")
    said = Heartbeat(state="training", awaiting="x" * 201, loss=float("inf"), host="a b", vitals=vitals)
    assert fitting(said) == Heartbeat(state="training")
    assert fitting(Heartbeat(state="training", loss=1.0)) == Heartbeat(state="training", loss=1.0)


def test_a_signature_covers_the_kind_the_run_and_the_body():
    signer, other = Signer("a", new_secret()), Signer("b", new_secret())
    keys = {"a": signer.public_key, "b": other.public_key}
    body = {"round": 1, "words": "ä", "number": 0.1}
    sealed = signer.seal("commit", "run", body)
    assert open_raw(sealed, "commit", "run", keys) == ("a", canonical(body))
    for kind, run in (("manifest", "run"), ("commit", "other")):
        with pytest.raises(Refused, match="signature for this run"):
            open_raw(sealed, kind, run, keys)
    document = json.loads(sealed)
    for change in ({"replica": "b"}, {"body": body | {"round": 2}}, {"signature": "00" * 64}):
        with pytest.raises(Refused, match="signature for this run"):
            open_raw(json.dumps(document | change).encode(), "commit", "run", keys)
    for broken in (
        {"replica": ["a"]},
        {"signature": 5},
        {"signature": "zz"},
        {"body": {"x": float("nan")}},
    ):
        with pytest.raises(Refused, match="not signed"):
            open_raw(json.dumps(document | broken).encode(), "commit", "run", keys)
    with pytest.raises(Refused):
        open_raw(sealed, "commit", "run", {"a": "not a key"})
    assert sha256(canonical({"b": 1, "a": 2})) == sha256(canonical({"a": 2, "b": 1}))


def test_a_key_is_for_its_owner_alone_and_never_overwritten(tmp_path: Path):
    path = tmp_path / "keys" / "a.key"
    secret = new_secret()
    save_secret(path, secret, "0" * 64)
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(FileExistsError):
        save_secret(path, new_secret(), "0" * 64)
    assert load_signer(path, "a").public_key == Signer("a", secret).public_key


@pytest.mark.parametrize("text", ["", "zz" * 32, "ab" * 31, "\u00e4" * 64, "-----BEGIN PRIVATE KEY-----"])
def test_a_file_that_is_no_key_is_one_line_and_is_not_shown(tmp_path: Path, text: str):
    path = tmp_path / "a.key"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"is not a key of `isthmus init`") as caught:
        load_signer(path, "a")
    assert not text or text not in str(caught.value)
    assert "\n" not in str(caught.value)
