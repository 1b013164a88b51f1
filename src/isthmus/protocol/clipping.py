"""The factors of `outer.clip` in a round that counts fewer than three updates, from its manifests.

A process that holds one stage of the model cannot measure an update's norm. All processes read the same
manifests, so all clip by the same factors.
"""

from collections.abc import Iterable, Mapping

from isthmus.outer.clip import EARLIER, history_clips, history_factor
from isthmus.protocol.ledger import Ledger

LOOK_BACK = 32  # rounds: a longer absence starts a new history, so nobody reads all manifests


def clip_factors(ledger: Ledger, round_number: int, replicas: Iterable[str]) -> list[float] | None:
    """Return the factors for the updates of these replicas in this settled round; None if the median of the
    round clips, or nothing does."""
    norms = {entry.replica: entry.norm for entry in ledger.settled(round_number).entries}
    return _factors(ledger, round_number, {name: norms[name] for name in replicas})


def clipped_in(ledger: Ledger, round_number: int, norms: Mapping[str, float]) -> tuple[str, ...]:
    """Return the replicas whose own history clips their updates in the round that is being closed.

    Clipped norms do not enter that history: a replica that stays too large must not become its own measure.
    """
    factors = _factors(ledger, round_number, norms) or []
    return tuple(name for name, factor in zip(norms, factors, strict=False) if factor < 1.0)


def _factors(ledger: Ledger, round_number: int, norms: Mapping[str, float]) -> list[float] | None:
    if not history_clips(ledger.run.recipe.outer, len(norms)):
        return None
    earlier: dict[str, list[float]] = {name: [] for name in norms}
    for t in range(round_number - 1, max(0, round_number - 1 - LOOK_BACK), -1):
        if all(len(own) == EARLIER for own in earlier.values()):
            break
        before = ledger.settled(t)
        for entry in before.entries:
            own = earlier.get(entry.replica, [0.0] * EARLIER)
            if len(own) < EARLIER and entry.replica not in before.clipped:
                own.append(entry.norm)
    return [history_factor(norm, earlier[name]) for name, norm in norms.items()]
