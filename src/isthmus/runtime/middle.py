"""The middle of a round on disk: a kill costs what was trained since then, and not the round.

Beside the states of whole rounds a replica of one process saves where the open round stands: all of its
state, the weights as they are after some inner steps, and the losses so far. What follows from there is what
would have followed: the same bits.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from isthmus.errors import ConfigError

FOLDER = "middle"  # below that of the states
PARAMS, ABOUT = "params", "about"  # its files beside those of a state
MOST_STEPS = 10**9


@dataclass(frozen=True, slots=True)
class Middle:
    """A round after some of its inner steps."""

    round: int
    step_count: int  # inner steps that the optimiser had taken before this round
    losses: Tensor  # (h,) float64, one for each inner step
    carried: int = 0  # inner steps of earlier rounds that are in the feedback, and in no update yet

    @property
    def num_steps(self) -> int:
        return len(self.losses)

    def to_tensors(self) -> dict[str, Tensor]:
        return {
            "round": torch.tensor(self.round),
            "step_count": torch.tensor(self.step_count),
            "losses": self.losses,
            "carried": torch.tensor(self.carried),
        }

    @classmethod
    def from_tensors(cls, named: Mapping[str, Tensor]) -> "Middle":
        """ConfigError where it is something else."""
        try:
            counts = [int(named[key]) for key in ("round", "step_count", "carried")]
            about = cls(counts[0], counts[1], named["losses"], counts[2])
            numbers = about.round > 0 and all(0 <= count < MOST_STEPS for count in counts)
            if not numbers or about.losses.dtype != torch.float64 or about.losses.dim() != 1:
                raise ValueError("its numbers are out of range")
            return about
        except (KeyError, ValueError, RuntimeError) as error:
            raise ConfigError(f"it does not say which round it is the middle of ({error})") from None
