"""Which batches of the run's one order are whose, round by round. Standard library only."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Deal:
    """A replica's batches in one round: in inner step h, the one at place first + h * shares + share."""

    first_step: int  # of the round, counted over the whole run
    num_steps: int
    first: int  # batches that were dealt in the rounds before
    shares: int  # replicas of the round; the share of one that is absent stays unread
    share: int

    def place(self, inner_step: int) -> int:
        """Of the batch of an inner step; LookupError outside of the round."""
        if not 0 <= (h := inner_step - self.first_step) < self.num_steps:
            raise LookupError(f"inner step {inner_step} is not of the round that was dealt")
        return self.first + h * self.shares + self.share
