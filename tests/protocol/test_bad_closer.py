"""A closer gone bad, with a valid key: whatever it makes up, every reader finds, names and does not use."""

import dataclasses
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from little import RECIPE, Little, Replica, equal, rounds
from little import hasty as hasty
from safetensors.torch import load_file

from isthmus.cli.main import main
from isthmus.config import parse_recipe
from isthmus.data.corpus import open_corpus
from isthmus.data.tokens import Batches
from isthmus.errors import Diverged, RunError, RunStopped
from isthmus.model.digest import anchor_digest, shard_digests
from isthmus.protocol.judge import judge
from isthmus.protocol.ledger import Entry, Ledger, Manifest, read_run
from isthmus.protocol.trust import Signer, load_signer
from isthmus.replica.control_group import SingleProcess
from isthmus.replica.full import FullReplica
from isthmus.runtime.create import create
from isthmus.runtime.recovery import Recovery
from isthmus.runtime.trainer import Trainer
from isthmus.store import open_store

pytestmark = pytest.mark.usefixtures("hasty")
# With a text, so that the model can be exported. Anchors after rounds 2 and 4; `a` goes bad in round 4.
RECIPE_WITH_TEXT = RECIPE.replace("vocab = 64\n", "").replace('[data]\ncorpus = "not-here"\n', "")
CLOSERS = ["a", "b"]


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, dict[str, torch.Tensor]]]:
    """Three settled rounds, and each theta."""
    folder = tmp_path_factory.mktemp("honest")
    replicas = Little(str(folder / "bucket"), folder, RECIPE_WITH_TEXT, CLOSERS).replicas()
    thetas = {}
    for t in (1, 2, 3):
        rounds(replicas, [t])
        thetas[t] = {name: tensor.clone() for name, tensor in replicas[0].anchor.items()}
    return folder, thetas


@pytest.fixture
def bucket(honest: tuple[Path, object], tmp_path: Path) -> str:
    """A copy that a test may spoil; keys lie beside it."""
    shutil.copytree(honest[0], tmp_path / "run")
    return str(tmp_path / "run" / "bucket")


def signer_of(url: str, name: str) -> Signer:
    return load_signer(Path(url).parent / "keys" / f"{name}.key", name)


def caught_up(url: str, name: str) -> Replica:
    """A replica of the test's, at theta of the newest round."""
    replica = Replica(url, name, signer_of(url, name))
    for t in range(1, replica.ledger.last_round() + 1):
        replica.apply(t, replica.exchange.closed(t))
    return replica


# Readers. Each gives what it said, and where it went on all the same, the weights that it handed out.


def command(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    status = main(list(words))
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    return f"status {status}: {out}{err}"


def verify(url: str, to: Path, capsys: pytest.CaptureFixture[str]) -> str:
    return command(capsys, "ledger", "verify", url)


def rebuild(url: str, to: Path, capsys: pytest.CaptureFixture[str]) -> str:
    return command(capsys, "ledger", "rebuild", url, "--to", str(to))


def export(url: str, to: Path, capsys: pytest.CaptureFixture[str]) -> str:
    return command(capsys, "export", url, "--to", "hf", str(to))


def join(url: str, to: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """As a worker of `isthmus join` begins: the newest anchor that it believes, then round after round."""
    said: list[str] = []
    store = open_store(url)
    ledger = Ledger(store, read_run(store), signer_of(url, "b"))
    recipe, cpu = ledger.run.recipe, torch.device("cpu")
    member = next(member for member in recipe.fleet() if member.name == "b")
    batches = Batches(open_corpus(recipe.data.corpus).train, 0, 3, recipe.inner.batch, recipe.model.context)
    replica = FullReplica(recipe, member, batches, device=cpu, precision="fp32")
    work, incarnation = to.parent / "work", os.urandom(8).hex()
    fleet = Trainer(
        recipe,
        member,
        replica,
        ledger,
        SingleProcess(),
        cpu,
        work,
        incarnation,
        said.append,
        background=False,
    )
    try:
        done = Recovery(fleet).resume()
        while (counted := fleet.exchange.closed(done + 1)) is not None:
            done += 1
            fleet.apply(done, counted)
    except RunStopped as stopped:
        return f"status 1: {stopped}"
    said.append(f"joined with anchor {fleet.exchange.anchor}")
    return "status 0: " + "\n".join(said)


READERS = {"verify": verify, "rebuild": rebuild, "export": export, "join": join}

# False manifests of round 4. Everybody has delivered; `entries` are as an honest closer would list them.

Lie = Callable[[Replica, dict[str, Entry]], dict[str, Entry]]
LIES: dict[str, tuple[str, Lie]] = {}


def lie(says: str) -> Callable[[Lie], Lie]:
    def add(make: Lie) -> Lie:
        LIES[make.__name__] = says, make
        return make

    return add


def changed(entries: dict[str, Entry], name: str, **fields: object) -> dict[str, Entry]:
    return entries | {name: dataclasses.replace(entries[name], **fields)}


def own_times_a_million(a: Replica) -> Entry:
    mine = a.update(scale=1e4)
    for index, data in mine.shards.items():
        a.ledger.put_shard(4, index, data)
    sealed = a.sealed(4, a.entry(mine))
    return judge(a.ledger, sealed, "a", 4, a.exchange.anchor, a.ledger.get_shard)


@lie(r"it counts a, but its norm \S+ is over 3 times the median")
def its_own_update_a_million_times(a: Replica, entries: dict[str, Entry]) -> dict[str, Entry]:
    return entries | {"a": own_times_a_million(a)}


@lie(r"it says that a's update has the norm \S+, and that is ")
def its_own_update_a_million_times_with_a_modest_norm(
    a: Replica, entries: dict[str, Entry]
) -> dict[str, Entry]:
    return entries | {"a": dataclasses.replace(own_times_a_million(a), norm=entries["b"].norm)}


@lie(r"it counts a, but its norm \S+ is over 20 times any of the round before")
def its_own_update_a_million_times_and_nobody_elses(
    a: Replica, entries: dict[str, Entry]
) -> dict[str, Entry]:
    return {"a": own_times_a_million(a)}


@lie("it says that b's update has the norm")
def a_false_norm_of_another(a: Replica, entries: dict[str, Entry]) -> dict[str, Entry]:
    return changed(entries, "b", norm=entries["b"].norm * 1.01)


@lie("it counts b without a commit that b signed")
def an_entry_without_a_commit(a: Replica, entries: dict[str, Entry]) -> dict[str, Entry]:
    return changed(entries, "b", commit=b"")


@lie("it counts b, but the commit of b is signed by a")
def a_commit_in_anothers_name(a: Replica, entries: dict[str, Entry]) -> dict[str, Entry]:
    return changed(entries, "b", commit=a.sealed(4, dataclasses.replace(entries["b"], commit=b"")))


@lie("it counts b, but the commit is for round 3, not 4")
def a_commit_of_the_round_before(a: Replica, entries: dict[str, Entry]) -> dict[str, Entry]:
    return changed(entries, "b", commit=a.ledger.get_commit("b", 3))


@lie("it does not list of b what b signed")
def other_shards_than_the_author_signed(a: Replica, entries: dict[str, Entry]) -> dict[str, Entry]:
    return changed(entries, "b", shards=entries["c"].shards)


def settle(a: Replica, entries: dict[str, Entry], anchor: str = "", round_number: int = 4) -> None:
    """Write the manifest as a closer can, past all of its own checks."""
    made = Manifest(
        round=round_number,
        anchor=anchor or a.exchange.anchor,
        entries=tuple(entries.values()),
        refused=(),
        members=("a", "b", "c"),
        deadline_seconds=60.0,
        seconds=1.0,
    )
    body = a.ledger.in_epoch(made).to_dict(a.ledger.chain[round_number - 1])
    sealed = a.ledger.signer.seal("manifest", a.ledger.run.run_id, body)
    assert a.ledger.store.create(f"manifests/{round_number:06d}.json", sealed)


def delivered(url: str) -> tuple[Replica, dict[str, Entry]]:
    """`a`, and what everybody gave to round 4, judged."""
    replicas = [caught_up(url, name) for name in "abc"]
    for each in replicas:
        each.exchange.deliver(4, each.update())
    a = replicas[0]
    read, anchor = a.ledger.get_shard, a.exchange.anchor
    commits = {name: a.ledger.get_commit(name, 4) for name in "abc"}
    return a, {name: judge(a.ledger, data, name, 4, anchor, read) for name, data in commits.items()}


@pytest.mark.parametrize("reader", READERS.values(), ids=READERS)
@pytest.mark.parametrize(("says", "make"), LIES.values(), ids=LIES)
def test_what_a_closer_makes_up_is_found_by_every_reader_and_named(
    bucket: str, tmp_path: Path, capsys, says: str, make: Lie, reader: Callable[..., str]
):
    a, entries = delivered(bucket)
    settle(a, make(a, entries))
    said = reader(bucket, tmp_path / "theta", capsys)
    assert said.startswith("status 1: ")
    assert "manifest 4 of this run, by closer a, is not to be trusted" in said
    assert re.search(says, said)
    assert not (tmp_path / "theta").exists()


@pytest.mark.parametrize("reader", READERS.values(), ids=READERS)
def test_the_same_round_without_a_lie_is_taken(
    bucket: str, tmp_path: Path, capsys, reader: Callable[..., str]
):
    settle(*delivered(bucket))
    assert reader(bucket, tmp_path / "theta", capsys).startswith("status 0: ")


@pytest.mark.parametrize("case", ["times_a_million", "alone"])
def test_it_is_found_on_every_store(any_store_url: str, tmp_path: Path, capsys, case: str):
    replicas = Little(any_store_url, tmp_path, RECIPE_WITH_TEXT, CLOSERS).replicas()
    rounds(replicas, [1, 2, 3])
    for each in replicas:
        each.exchange.deliver(4, each.update())
    a = replicas[0]
    read, anchor = a.ledger.get_shard, a.exchange.anchor
    entries = {name: judge(a.ledger, a.ledger.get_commit(name, 4), name, 4, anchor, read) for name in "abc"}
    settle(a, (entries if case == "times_a_million" else {}) | {"a": own_times_a_million(a)})
    said = command(capsys, "ledger", "verify", any_store_url)
    assert said.startswith("status 1: ")
    assert "manifest 4 of this run, by closer a, is not to be trusted: it counts a, but its norm" in said
    b = replicas[1]
    before = {name: tensor.clone() for name, tensor in b.anchor.items()}
    with pytest.raises(RunStopped, match="by closer a"):  # who trains does not apply it either
        b.apply(4, b.exchange.closed(4))
    assert equal(b.anchor, before)


# False anchors


def false_anchor(a: Replica, round_number: int, digest: str = "") -> str:
    """Files that fit their hashes, and a digest that fits the files unless one is given; not theta."""
    weights = {name: tensor * 1e3 for name, tensor in a.anchor.items()}
    files = [
        a.ledger.put_anchor_shard(round_number, i, {name: weights[name] for name in names})
        for i, names in enumerate(a.ledger.shards)
    ]
    false = anchor_digest(shard_digests(weights, a.ledger.shards))
    a.ledger.complete_anchor(round_number, digest or false, files)
    return false


@pytest.fixture
def with_theta_4(bucket: str) -> tuple[str, list[Replica]]:
    """Round 4 is settled honestly, by `a`, who writes its anchor."""
    replicas = [caught_up(bucket, name) for name in "abc"]
    for each in replicas:
        each.exchange.deliver(4, each.update())
    a = replicas[0]
    read = a.ledger.get_shard
    settle(
        a,
        {n: judge(a.ledger, a.ledger.get_commit(n, 4), n, 4, a.exchange.anchor, read) for n in "abc"},
    )
    for each in replicas:
        each.apply(4, each.exchange.closed(4))
    return bucket, replicas


def an_anchor_that_nobody_has_started_from(replicas: list[Replica]) -> str:
    false_anchor(replicas[0], 4)
    return "a alone speaks for it: round 5 is not settled yet"


def an_anchor_that_the_next_round_did_not_start_from(replicas: list[Replica]) -> str:
    false_anchor(replicas[0], 4)
    rounds(replicas, [5])
    false_anchor(replicas[0], 4)
    return "a wrote another one than round 5 began from"


def an_anchor_with_the_right_digest_and_other_weights(replicas: list[Replica]) -> str:
    digest = replicas[0].exchange.anchor
    rounds(replicas, [5])
    false_anchor(replicas[0], 4, digest)
    return "the anchor of round 4 "


FALSE_ANCHORS = [
    an_anchor_that_nobody_has_started_from,
    an_anchor_that_the_next_round_did_not_start_from,
    an_anchor_with_the_right_digest_and_other_weights,
]


@pytest.mark.parametrize("reader", READERS.values(), ids=READERS)
@pytest.mark.parametrize("spoil", FALSE_ANCHORS, ids=[each.__name__ for each in FALSE_ANCHORS])
def test_a_false_anchor_is_named_and_not_used(
    with_theta_4: tuple[str, list[Replica]],
    tmp_path: Path,
    capsys,
    spoil: Callable[[list[Replica]], str],
    reader: Callable[..., str],
):
    url, replicas = with_theta_4
    says = spoil(replicas)
    said = reader(url, tmp_path / "theta", capsys)
    if reader is verify:
        assert said.startswith("status 1: ")
        assert "the anchor of round 4, written by a, is not what replaying gives" in said
        return
    assert said.startswith("status 0: ")
    assert says in said
    theta = replicas[1].anchor
    if reader is rebuild:
        assert equal(load_file(tmp_path / "theta"), theta)
    if reader is join:
        assert f"joined with anchor {replicas[1].exchange.anchor}" in said
    if reader is export:
        given = load_file(tmp_path / "theta" / "model.safetensors")["model.norm.weight"]
        assert torch.equal(given, theta["norm.weight"])


@pytest.mark.parametrize("reader", READERS.values(), ids=READERS)
def test_a_closer_that_starts_a_round_of_its_own_from_a_false_anchor_is_named(
    with_theta_4: tuple[str, list[Replica]], tmp_path: Path, capsys, reader: Callable[..., str]
):
    """Its commit, its manifest and its anchor agree with each other; nobody else has signed any of them."""
    url, (a, b, _) = with_theta_4
    false = false_anchor(a, 4)
    mine = a.update()
    for index, data in mine.shards.items():
        a.ledger.put_shard(5, index, data)
    sealed = a.sealed(5, a.entry(mine), anchor=false)
    entry = judge(a.ledger, sealed, "a", 5, false, a.ledger.get_shard)
    settle(a, {"a": entry}, anchor=false, round_number=5)
    with pytest.raises(Diverged):  # whoever trains asks the bucket first who is wrong
        b.exchange.closed(5)
    said = reader(url, tmp_path / "theta", capsys)
    assert said.startswith("status 1: ")
    if reader is verify:  # which comes to the anchor first
        assert "the anchor of round 4, written by a, is not what replaying gives" in said
    else:
        assert "manifest 5 of this run, by closer a, is not to be trusted: it starts from anchor " in said
    assert not (tmp_path / "theta").exists()


def test_an_anchor_needs_more_than_half_of_those_who_contributed_lately(
    with_theta_4: tuple[str, list[Replica]],
):
    _, replicas = with_theta_4
    digest = replicas[0].exchange.anchor
    ledger = replicas[0].ledger
    with pytest.raises(RunError, match="a alone speaks for it"):
        ledger.read_anchor(4, [])
    a = replicas[0]
    a.exchange.deliver(5, a.update())
    entry = judge(ledger, ledger.get_commit("a", 5), "a", 5, digest, ledger.get_shard)
    settle(a, {"a": entry}, round_number=5)
    with pytest.raises(RunError, match="a wrote it, and only 1 of 3 contributors have signed its digest"):
        ledger.read_anchor(4, [])
    assert ledger.read_anchor(2, [])[0] == ledger.manifest(3).anchor


def test_two_closers_are_the_default_and_full_replicas_come_first(tmp_path: Path):
    kinds = {"a": "full", "b": "pipelined", "c": "full", "d": "full"}

    def closers(names: str) -> tuple[str, ...]:
        head = RECIPE[: RECIPE.index("[[replicas]]")]
        table = "".join(
            f'[[replicas]]\nname = "{name}"\n'
            + ("" if kinds[name] == "full" else 'kind = "pipelined"\nstages = 2\n')
            for name in names
        )
        return create(
            parse_recipe(head + table), str(tmp_path / names / "bucket"), tmp_path / names / "k"
        ).closers

    assert closers("abcd") == ("a", "c")
    assert closers("ba") == ("a", "b")
    assert closers("b") == ("b",)
