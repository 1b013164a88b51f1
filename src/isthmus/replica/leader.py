"""A full replica of several processes: number 0 says what comes, the others do the same beside it."""

from collections.abc import Mapping

from torch import Tensor

from isthmus.replica.control_group import ControlGroup
from isthmus.replica.full import FullReplica


class LeaderReplica:
    """Number 0's FullReplica. Every call that all must make is announced to them first, so that only
    this one needs to know of rounds, buckets and state on disk."""

    def __init__(self, replica: FullReplica, control: ControlGroup) -> None:
        self.replica, self.control = replica, control

    @property
    def grad_norm(self) -> float:
        return self.replica.grad_norm

    def begin_round(self, anchor: Mapping[str, Tensor]) -> None:
        self.control.share(b"begin")
        self.replica.begin_round(anchor)

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

    def close(self) -> None:
        self.control.share(b"close")
        self.replica.close()


def follow_leader(replica: FullReplica, control: ControlGroup) -> None:
    """What the other processes do: as number 0 says, until it closes."""
    while True:
        word, _, number = control.share(b"")[0].decode("ascii").partition(" ")
        if word == "begin":
            replica.begin_round(None)
        elif word == "step":
            replica.inner_step(int(number))
        elif word == "restore":
            replica.restore(None, int(number))
        else:
            replica.close()
            return
