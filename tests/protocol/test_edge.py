"""The edge of a round between the processes of one replica: three control calls, and one word for all."""

import json
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from little import RECIPE, Little, at_once
from little import hasty as hasty

from isthmus.errors import Diverged, RunError
from isthmus.model.llama import init_params
from isthmus.protocol.edge import Edge
from isthmus.runlog.facts import Facts
from isthmus.runtime.session import Session

ALONE = RECIPE[: RECIPE.index("[[replicas]]")] + '[[replicas]]\nname = "c"\nkind = "pipelined"\nstages = 2\n'
ROUNDS = 6

pytestmark = pytest.mark.usefixtures("hasty")


class Threads:
    """Processes of one replica as threads of this one; it counts their calls."""

    def __init__(self, size: int) -> None:
        self.size, self.barrier, self.said = size, threading.Barrier(size), [b""] * size
        self.calls = [0] * size

    def of(self, rank: int) -> "Thread":
        return Thread(self, rank)


class Thread:
    def __init__(self, group: Threads, rank: int) -> None:
        self.group, self.rank, self.size = group, rank, group.size

    def share(self, data: bytes) -> list[bytes]:
        group = self.group
        group.calls[self.rank] += 1
        group.said[self.rank] = data
        group.barrier.wait(60)
        said = list(group.said)
        group.barrier.wait(60)
        return said

    def leave(self) -> None:
        pass


def test_an_edge_takes_three_control_calls_and_both_processes_reach_one_anchor(tmp_path: Path):
    run = Little(str(tmp_path / "bucket"), tmp_path, ALONE)
    group = Threads(2)
    calls: list[list[int]] = [[], []]
    sessions: list[Session] = []

    def process(rank: int) -> Callable[[], None]:
        ledger = run.ledger("c")
        anchor = init_params(ledger.run.recipe.model, ledger.run.recipe.seed)
        shards = [ledger.shards[:1], ledger.shards[1:]][rank]
        own = [name for shard in shards for name in shard]
        session = Session(ledger, anchor, own, group.of(rank), "0" * 16, lambda text: None)
        sessions.append(session)

        def rounds() -> None:
            session.restore(None)
            for t in range(1, ROUNDS + 1):
                before = group.calls[rank]
                assert session.begin()
                session.deliver({name: session.anchor[name] - 0.01 * t for name in own}, Facts())
                assert session.settle().round == t
                calls[rank].append(group.calls[rank] - before)
            session.finish(Facts())

        return rounds

    at_once(*[process(rank) for rank in range(2)])
    assert calls[0] == calls[1]
    assert calls[0][1:] == [3] * (ROUNDS - 1)
    for name, tensor in sessions[0].anchor.items():
        assert torch.equal(tensor, sessions[1].anchor[name])
    ledger = run.ledger()
    assert ledger.anchor_rounds() == [2, 4, 6]  # their uploads are agreed on by the same calls
    assert all(len(entry.shards) == len(ledger.shards) for entry in ledger.manifest(ROUNDS).entries)


class Says:
    """The other process says this."""

    rank, size = 0, 2

    def __init__(self, said: object) -> None:
        self.said = said if isinstance(said, bytes) else json.dumps(said).encode()

    def share(self, data: bytes) -> list[bytes]:
        return [data, self.said]

    def leave(self) -> None:
        pass


@pytest.mark.parametrize(
    "said", [b"\xff", b"[" * 10_000, [], {"digests": {"0": 5}}, {"rows": {"0": ["x", -1]}}, {"wish": "leave"}]
)
def test_what_is_no_frame_is_refused(said: object, tmp_path: Path):
    ledger = Little(str(tmp_path / "bucket"), tmp_path).ledger("a")
    with pytest.raises(RunError, match="process 1 of this replica shared what nobody asked for"):
        Edge(ledger, Says(said), print).share()


def test_processes_with_different_copies_of_a_shard_have_diverged(tmp_path: Path):
    ledger = Little(str(tmp_path / "bucket"), tmp_path).ledger("a")
    digests = {i: f"{i:064x}" for i in range(len(ledger.shards))}
    same = Edge(ledger, Says({"digests": {"0": digests[0]}}), print)
    assert same.hold_now(1, digests) == Edge(ledger, Says({}), print).hold_now(1, digests)
    with pytest.raises(Diverged, match="different copies of shard 0 after round 1"):
        Edge(ledger, Says({"digests": {"0": digests[1]}}), print).hold_now(1, digests)
    with pytest.raises(RunError, match="no stage holds some shards after round 1"):
        Edge(ledger, Says({}), print).hold_now(1, {0: digests[0]})
