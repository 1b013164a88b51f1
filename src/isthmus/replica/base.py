"""The Replica protocol: one copy of the model, as the outer-round loop of a real fleet drives it."""

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from isthmus.replica.clock import Clock


class Replica(Protocol):
    """This process's part of a replica: all of it, one stage, or one of several that share a batch."""

    @property
    def clock(self) -> Clock:
        """Times the compute of this process."""
        ...

    @property
    def grad_norm(self) -> float:
        """Of the whole replica, at the last inner step, before clipping."""
        ...

    @property
    def round_trip_seconds(self) -> float:
        """Of the slowest link between stages, at the last inner step; 0 without links."""
        ...

    def begin_round(self, anchor: Mapping[str, Tensor]) -> None:
        """Start from the anchor: the weights take its values, compressed stages its embedding (eqs. 3-4)."""

    def go_on(self, anchor: Mapping[str, Tensor], params: Mapping[str, Tensor]) -> None:
        """Take up a round in its middle: as `begin_round`, and then the weights take these values, bit for
        bit."""

    def stops(self, wish: bool) -> bool:
        """Between two inner steps: does the replica stop here? Where its processes can agree on that, all of
        them do after the same inner step; a wish may be heard after the next one."""
        ...

    def inner_step(self, inner_step: int) -> Tensor:
        """One InnerOpt update (eq. 1) on the batch of this inner step, counted over the whole run.

        Returns the loss of the whole replica, the same in every process of it: a float64 scalar that may
        still be on the device.
        """
        ...

    def named_parameters(self) -> dict[str, Tensor]:
        """What this process trains, under full-model names; the tensors themselves, detached."""
        ...

    def state(self) -> dict[str, Tensor]:
        """InnerOpt's moments of this process, for a resumed run."""
        ...

    def restore(self, state: Mapping[str, Tensor], step_count: int) -> None:
        """Continue from `state` as it was after `step_count` inner steps."""

    def pop_counts(self) -> dict[str, int]:
        """Bytes that this process sent to other stages since the last call, by purpose."""
        ...

    def close(self) -> None:
        """End the connections to the other processes of the replica."""


def precision_dtypes(precision: str) -> tuple[torch.dtype, torch.dtype]:
    """(master weights, stream) of "fp32", "fp64" or "bf16", the last over fp32 master weights."""
    master_dtype = torch.float64 if precision == "fp64" else torch.float32
    return master_dtype, torch.bfloat16 if precision == "bf16" else master_dtype
