"""Batches of a fleet that changes: a replica reads its share of the round that was dealt, and no other."""

import pytest
import torch

from isthmus.data.ahead import ReadAhead
from isthmus.data.corpus import open_corpus
from isthmus.data.tokens import Batches
from isthmus.layout.deal import Deal
from isthmus.replica.leader import LeaderReplica, follow_leader


@pytest.fixture(scope="module")
def view():
    return open_corpus("builtin:sample").train


def test_dealt_as_ever_a_batch_is_the_same(view):
    plain, dealt = (Batches(view, 0, 3, 2, 16) for _ in range(2))
    dealt.deal(Deal(first_step=8, num_steps=4, first=48, each=6, offset=2, batch=2))
    for step in range(8, 12):
        assert torch.equal(dealt.at(99, step), plain.at(1, step))


def test_a_place_in_the_order_has_one_batch_whoever_reads_it(view):
    wide, narrow = Batches(view, 0, 3, 2, 16), Batches(view, 0, 1, 2, 16)
    wide.deal(Deal(first_step=0, num_steps=2, first=20, each=10, offset=8, batch=2))
    assert torch.equal(wide.at(0, 1), narrow.at(0, 10 + 5 + 4))


def test_nothing_is_read_before_its_round_is_dealt(view):
    batches = Batches(view, 0, 3, 2, 16)
    batches.deal(Deal(first_step=4, num_steps=4, first=0, each=2, offset=0, batch=2))
    for step in (3, 8):
        with pytest.raises(LookupError, match=f"inner step {step} is not of the round"):
            batches.at(0, step)


def test_what_was_read_ahead_of_a_deal_is_read_again():
    known = {0, 1}

    def read(step: int) -> torch.Tensor:
        if step not in known:
            raise LookupError(step)
        return torch.tensor([step])

    ahead = ReadAhead(read, torch.device("cpu"))
    ahead.device = type("Cuda", (), {"type": "cuda"})()  # what a GPU does, without one
    ahead._pinned = read
    to, torch.Tensor.to = torch.Tensor.to, lambda tensor, *args, **more: tensor
    try:
        assert [int(ahead.at(0)), int(ahead.at(1))] == [0, 1]
        known.add(2)
        assert int(ahead.at(2)) == 2
    finally:
        torch.Tensor.to = to


def test_the_other_processes_of_a_full_replica_are_dealt_the_same(view):
    said: list[bytes] = []

    class Control:
        def share(self, data: bytes) -> list[bytes]:
            said.append(data)
            return [data]

    class Told:
        def __init__(self) -> None:
            self.words = [*said, b"close"]

        def share(self, data: bytes) -> list[bytes]:
            return [self.words.pop(0)]

    class Replica:
        clock = None

        def close(self) -> None:
            pass

    first, second = (Batches(view, 0, 3, 2, 16) for _ in range(2))
    leader = LeaderReplica(Replica(), Control(), first)
    leader.deal(Deal(first_step=3, num_steps=3, first=22, each=8, offset=4, batch=2))
    follow_leader(Replica(), Told(), second)
    assert torch.equal(first.at(0, 5), second.at(0, 5))
