"""Which sequences of the run's one order are whose, round by round. Standard library only."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Deal:
    """A replica's batches in one round: in inner step h, `batch` sequences from first + h * each + offset."""

    first_step: int  # of the round, counted over the whole run
    num_steps: int
    first: int  # sequences that were dealt in the rounds before
    each: int  # that all replicas of the round take in a step; the share of one that is absent stays unread
    offset: int  # of which those before it in the fleet take so many
    batch: int  # and this one

    def place(self, inner_step: int) -> int:
        """Of the first sequence of an inner step; LookupError outside of the round."""
        if not 0 <= (h := inner_step - self.first_step) < self.num_steps:
            raise LookupError(f"inner step {inner_step} is not of the round that was dealt")
        return self.first + h * self.each + self.offset
