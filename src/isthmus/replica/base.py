"""The Replica protocol: one copy of the model, as the outer-round loop of a real fleet drives it."""

from collections.abc import Mapping
from enum import IntEnum
from typing import Protocol

import torch
from torch import Tensor

from isthmus.replica.clock import Clock


class Wish(IntEnum):
    """A process's wish between two inner steps. The largest wish of a replica's processes wins: all save if
    all can, and stop if one must."""

    SAVE, GO_ON, STOP = 0, 1, 2


class Replica(Protocol):
    """This process's part of a replica: all of it, one stage, or one of several that share a batch."""

    @property
    def clock(self) -> Clock:
        """A clock for the compute time of this process."""
        ...

    @property
    def grad_norm(self) -> float:
        """The gradient norm of the whole replica at the last inner step, before clipping."""
        ...

    @property
    def round_trip_seconds(self) -> float:
        """The round trip of the slowest link between stages at the last inner step; 0 without links."""
        ...

    def begin_round(self, anchor: Mapping[str, Tensor]) -> None:
        """Start from the anchor: the weights take its values, compressed stages its embedding (eqs. 3-4)."""

    def go_on(self, anchor: Mapping[str, Tensor], params: Mapping[str, Tensor]) -> None:
        """Continue inside a round: like `begin_round`, then set the weights to these values, bit for bit."""

    @property
    def wish_delay(self) -> int:
        """The number of inner steps until a wish takes effect."""
        ...

    def agree(self, wish: Wish) -> Wish:
        """After an inner step, return what all processes of the replica do here, from their wishes
        `wish_delay` steps ago."""
        ...

    def inner_step(self, inner_step: int) -> Tensor:
        """One InnerOpt update (eq. 1) on the batch of this inner step, counted over the whole run.

        Return the loss of the whole replica, the same in each of its processes: a float64 scalar that may
        still be on the device.
        """
        ...

    def named_parameters(self) -> dict[str, Tensor]:
        """The tensors that this process trains, detached but not copied, under full-model names."""
        ...

    def state(self) -> dict[str, Tensor]:
        """This process's moments of InnerOpt, for a resumed run."""
        ...

    def restore(self, state: Mapping[str, Tensor], step_count: int) -> None:
        """Continue from `state` as it was after `step_count` inner steps."""

    def pop_counts(self) -> dict[str, int]:
        """Bytes that this process sent to other stages since the last call, by purpose."""
        ...

    def pop_outside(self) -> int | None:
        """Tokens sent to other stages since the last call that were outside the range of a few-bit wire; None
        without one."""
        ...

    def close(self) -> None:
        """End the connections to the other processes of the replica."""


def precision_dtypes(precision: str) -> tuple[torch.dtype, torch.dtype]:
    """(master weights, stream) of "fp32", "fp64" or "bf16", the last over fp32 master weights."""
    master_dtype = torch.float64 if precision == "fp64" else torch.float32
    return master_dtype, torch.bfloat16 if precision == "bf16" else master_dtype
