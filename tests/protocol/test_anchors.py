"""An anchor counts if the next manifest states its digest, or a replay gives it; every other is named."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from little import RECIPE, Little, Replica, equal, rounds, settle
from little import hasty as hasty
from safetensors.torch import load_file

from isthmus.cli.main import main
from isthmus.config import parse_recipe
from isthmus.data.corpus import open_corpus
from isthmus.data.tokens import Batches
from isthmus.errors import RunStopped
from isthmus.model.digest import anchor_digest, shard_digests
from isthmus.protocol.ledger import Ledger, read_run
from isthmus.protocol.trust import Signer, load_signer
from isthmus.replica.control_group import SingleProcess
from isthmus.replica.full import FullReplica
from isthmus.runtime.create import create
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
        done = fleet.resume()
        while not fleet.begin(done + 1):
            done = fleet.settle(done + 1)
    except RunStopped as stopped:
        return f"status 1: {stopped}"
    said.append(f"joined with anchor {fleet.session.edge.settle()}")
    return "status 0: " + "\n".join(said)


READERS = {"verify": verify, "rebuild": rebuild, "export": export, "join": join}

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
    settle(4, replicas[0], replicas, replicas)
    return bucket, replicas


def an_anchor_that_nobody_has_started_from(replicas: list[Replica]) -> str:
    false_anchor(replicas[0], 4)
    return "round 5, which confirms it, is not settled yet"


def an_anchor_that_the_next_round_did_not_start_from(replicas: list[Replica]) -> str:
    false_anchor(replicas[0], 4)
    rounds(replicas, [5])
    false_anchor(replicas[0], 4)
    return "round 5 began from another one"


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
    to = tmp_path / ("theta.safetensors" if reader is rebuild else "theta")
    said = reader(url, to, capsys)
    if reader is verify:
        assert said.startswith("status 1: ")
        assert "the anchor of round 4, written by a, is not what replaying gives" in said
        return
    assert said.startswith("status 0: ")
    assert says in said
    theta = replicas[1].anchor
    if reader is rebuild:
        assert equal(load_file(to), theta)
    if reader is join:
        assert f"joined with anchor {replicas[1].exchange.anchor}" in said
    if reader is export:
        given = load_file(to / "model.safetensors")["model.norm.weight"]
        assert torch.equal(given, theta["norm.weight"])


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
