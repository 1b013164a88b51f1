"""Refuse updates whose norm does not fit the others' (docs/protocol.md, A round).

Every replica has one vote, as it has one share of the mean: its norm of this round, or of the last round if
it has not delivered. A norm is too large if it exceeds more than half of the votes by more than the limit. So
a minority never refuses a majority, and of two replicas neither is refused.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from isthmus.protocol.trust import Refused

if TYPE_CHECKING:
    from isthmus.protocol.ledger import Ledger

# An update whose 2-norm is below this moves no float32 weight. It is always refused: it adds nothing to the
# mean, but outer.clip would scale others down to it.
EMPTY_NORM = 1e-6
# A replica that delivers alone can be compared only with the last round. A closer can cause that by leaving
# out all others, so a limit applies here too.
LEFT_ALONE = 20.0
REFUSALS = 3  # for the norm in a row, after which a replica empties its error feedback
LOOK_BACK = 12  # rounds searched for them: a slow replica does not deliver in every round

TOO_LARGE, EMPTY = "norm_too_large", "norm_empty"  # codes of refusals


def too_large(norm: float, factor: float, times_what: str) -> Refused:
    """The refusal of an update whose norm is too large; its words appear in the manifest."""
    return Refused(f"its norm {norm:.3g} is over {factor:g} {times_what}", TOO_LARGE)


@dataclass(frozen=True, slots=True)
class Comparison:
    """The refusals, and a note for the log about updates that differ and stay."""

    refused: dict[str, Refused] = field(default_factory=dict)
    note: str = ""


def compare_norms(norms: Mapping[str, float], before: Mapping[str, float], limit: float) -> Comparison:
    """Judge the norms of a round's updates, by replica. `before` holds those that the last round counted.

    Repeat without the refused replicas, which then vote by their last norm, until none is refused. Readers
    know only what manifests list and reach the same result: each list that a closer may write passes this
    function again.
    """
    refused: dict[str, Refused] = {}
    note = ""
    while True:
        compared = _compare_once({n: x for n, x in norms.items() if n not in refused}, before, limit)
        note = compared.note or note
        if not compared.refused:
            return Comparison(refused, note)
        refused |= compared.refused


def _compare_once(norms: Mapping[str, float], before: Mapping[str, float], limit: float) -> Comparison:
    some = any(norm >= EMPTY_NORM for norm in norms.values())
    empty = {name for name, norm in norms.items() if norm < EMPTY_NORM and some}
    refused = {
        name: Refused(f"its norm {norms[name]:.3g} is that of an empty update", EMPTY) for name in empty
    }
    votes = sorted({**before, **norms}.values())
    # The upper of two middle votes: half is not a majority, and says nothing about the other half.
    median, lower = (votes[at // 2] if votes else 0.0 for at in (len(votes), len(votes) - 1))
    if median < EMPTY_NORM:  # nothing to compare with
        return Comparison(refused)
    large = {name for name, norm in norms.items() if norm > limit * median}
    if large | empty == norms.keys():  # the others are gone, and their last norms may be outdated
        out_of_all = {name for name in large if before and norms[name] > LEFT_ALONE * max(before.values())}
        refused |= {
            name: too_large(norms[name], LEFT_ALONE, "times any of the round before") for name in out_of_all
        }
        large -= out_of_all
        return Comparison(refused, _note(large, len(votes), limit, "only they delivered") if large else "")
    refused |= {name: too_large(norms[name], limit, f"times the median {median:.3g}") for name in large}
    doubtful = {name for name, norm in norms.items() if limit * lower < norm <= limit * median}
    why = "no majority is smaller"
    return Comparison(refused, _note(doubtful, len(votes), limit, why) if doubtful else "")


def _note(names: set[str], votes: int, limit: float, why: str) -> str:
    return (
        f"the norm of {', '.join(sorted(names))} is over {limit:g} times that of others, but {why} "
        f"({votes} votes): nobody is refused by comparison alone"
    )


def is_refused_too_often(ledger: "Ledger", replica: str, round_number: int, since: int = 0) -> bool:
    """Whether a replica's update to this round is the third in a row with too large a norm, after `since`.

    A replica does not judge its own norm before it sends: only a closer sees the others', and a fleet whose
    norms all grow must not stop sending. But wrong feedback persists through every refusal. The count is the
    manifests', so it survives a restart, and all processes of a replica reach the same.
    """
    refusals = 0
    for t in range(round_number, max(since, round_number - LOOK_BACK, 0), -1):
        manifest = ledger.manifest(t)
        if manifest is None or manifest.entry(replica) is not None:
            return False
        refusal = manifest.refusal(replica)
        if refusal is None:
            continue  # we were late or away
        if refusal.code != TOO_LARGE:
            return False
        refusals += 1
        if refusals == REFUSALS:
            return True
    return False
