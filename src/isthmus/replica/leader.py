"""A full replica of several processes: process 0 announces each call, the others make it too."""

from collections.abc import Mapping
from dataclasses import astuple

from torch import Tensor

from isthmus.data.tokens import Batches
from isthmus.layout.deal import Deal
from isthmus.replica.base import Wish
from isthmus.replica.control_group import ControlGroup
from isthmus.replica.full import FullReplica


class LeaderReplica:
    """Process 0's FullReplica. It announces every call that all must make, so only this process needs to know
    about rounds, buckets and state on disk."""

    round_trip_seconds, wish_delay = 0.0, 0

    def __init__(self, replica: FullReplica, control: ControlGroup, batches: Batches | None = None) -> None:
        self.replica, self.control, self.clock = replica, control, replica.clock
        self.batches = batches

    @property
    def grad_norm(self) -> float:
        return self.replica.grad_norm

    def deal(self, deal: Deal) -> None:
        """Set this replica's batches for the round that begins."""
        self.control.share(f"deal {' '.join(map(str, astuple(deal)))}".encode())
        if self.batches:
            self.batches.deal(deal)

    def begin_round(self, anchor: Mapping[str, Tensor]) -> None:
        self.control.share(b"begin")
        self.replica.begin_round(anchor)

    def go_on(self, anchor: Mapping[str, Tensor], params: Mapping[str, Tensor]) -> None:
        self.begin_round(params)

    def agree(self, wish: Wish) -> Wish:
        return wish  # the others follow this process

    def inner_step(self, inner_step: int) -> Tensor:
        self.control.share(f"step {inner_step}".encode())
        return self.replica.inner_step(inner_step)

    def restore(self, state: Mapping[str, Tensor], step_count: int) -> None:
        self.control.share(f"restore {step_count}".encode())
        self.replica.restore(state, step_count)

    def named_parameters(self) -> dict[str, Tensor]:
        return self.replica.named_parameters()

    def state(self) -> dict[str, Tensor]:
        return self.replica.state()

    def pop_counts(self) -> dict[str, int]:
        return self.replica.pop_counts()

    def pop_outside(self) -> int | None:
        return self.replica.pop_outside()

    def close(self) -> None:
        self.control.share(b"close")
        self.replica.close()


def follow_leader(replica: FullReplica, control: ControlGroup, batches: Batches | None = None) -> None:
    """Repeat the calls of process 0 in the other processes until it closes."""
    while True:
        word, _, number = control.share(b"")[0].decode("ascii").partition(" ")
        if word == "begin":
            replica.begin_round(None)
        elif word == "deal" and batches:
            batches.deal(Deal(*map(int, number.split())))
        elif word == "step":
            replica.inner_step(int(number))
        elif word == "restore":
            replica.restore(None, int(number))
        else:
            replica.close()
            return
