"""Assign the sequences of the run's one order to replicas, round by round. Standard library only."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Deal:
    """A replica's batches of a round: inner step h reads `batch` sequences from first + h * each + offset."""

    first_step: int  # of the round, counted over the whole run
    num_steps: int
    first: int  # sequences assigned in earlier rounds
    each: int  # sequences that all replicas take in a step; an absent replica's share stays unread
    offset: int  # sequences of the replicas before this one
    batch: int  # sequences of this one

    def place(self, inner_step: int) -> int:
        """Return the position of an inner step's first sequence; LookupError outside the round."""
        if not 0 <= (h := inner_step - self.first_step) < self.num_steps:
            raise LookupError(f"inner step {inner_step} is not of the round that was dealt")
        return self.first + h * self.each + self.offset
