"""An inner step that counts for nothing: what the first one of a start waits for is over when it is due."""

from collections.abc import Mapping

import torch
from torch import Tensor

from isthmus.replica.base import Replica


def rehearse(replica: Replica, anchor: Mapping[str, Tensor], inner_step: int) -> None:
    """Compilers, links and memory are ready afterwards. No trace of it stays: a round begins with its anchor,
    and the moments are those of a replica that has not trained. All processes of the replica do this.

    The step after `inner_step` must not be trained next: its batch may be read ahead, before it is known
    whose it is.
    """
    replica.begin_round(anchor)
    replica.inner_step(inner_step)
    forget(replica)


def forget(replica: Replica) -> None:
    """The moments of InnerOpt as they were before its first step."""
    replica.restore({key: torch.zeros_like(tensor) for key, tensor in replica.state().items()}, 0)
