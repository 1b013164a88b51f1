"""Count updates refused for their norm in several rounds: the error feedback may then be wrong."""

from isthmus.protocol.ledger import Ledger
from isthmus.protocol.norms import TOO_LARGE

REFUSALS = 3  # in a row, after which the error feedback is emptied
LOOK_BACK = 12  # rounds searched for them: a slow replica does not deliver in every round


class Refusals:
    """Counts from the manifests alone, so the count survives a restart. All processes of a replica read the
    same ones."""

    def __init__(self, ledger: Ledger, replica: str) -> None:
        self.ledger, self.replica = ledger, replica
        self.emptied_in = 0  # the round after which the feedback was last emptied

    def too_many(self, round_number: int) -> bool:
        """Whether our update to this round was the third in a row with too large a norm.

        A replica does not judge its own norm before it sends: only a closer sees the others', and a fleet
        whose norms all grow must not stop sending. But wrong feedback persists through every refusal.
        """
        refusals = 0
        for t in range(round_number, max(self.emptied_in, round_number - LOOK_BACK, 0), -1):
            manifest = self.ledger.manifest(t)
            if manifest is None or manifest.entry(self.replica) is not None:
                return False
            refusal = manifest.refusal(self.replica)
            if refusal is None:
                continue  # we were late or away
            if refusal.code != TOO_LARGE:
                return False
            refusals += 1
            if refusals == REFUSALS:
                self.emptied_in = round_number
                return True
        return False
