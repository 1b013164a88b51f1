"""Whom a round refuses because its norm does not fit the others' (docs/protocol.md, A round).

Every replica has one vote, as it has one share of the mean: its norm of this round, or of the round before
if it has not delivered. A norm is too large when more than half of the votes lie below it by more than the
limit. So a majority is never refused by a minority, and of two nobody is.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

# The 2-norm of a whole update below which it moves no float32 weight. It is refused whatever the others
# sent: it adds nothing to the mean, but outer.clip would scale others down to it.
EMPTY_NORM = 1e-6
# Whoever delivers alone has nobody to be compared with but the round before. A closer can bring that about by
# leaving out all others, so it is no leave to send anything.
LEFT_ALONE = 20.0


_TOO_LARGE = re.compile(r"its norm \S+ is over \S+ times ")


def too_large(norm: float, factor: float, times_what: str) -> str:
    """Why an update is refused whose norm is too large; it stands in the manifest."""
    return f"its norm {norm:.3g} is over {factor:g} {times_what}"


def is_too_large(reason: str) -> bool:
    """Was an update refused by `too_large`? Its author asks."""
    return _TOO_LARGE.match(reason) is not None


@dataclass(frozen=True, slots=True)
class Comparison:
    """Who is refused and why, and what the log should say of those who differ and stay."""

    refused: dict[str, str] = field(default_factory=dict)
    note: str = ""


def compare_norms(norms: Mapping[str, float], before: Mapping[str, float], limit: float) -> Comparison:
    """Judge the norms of a round's updates, by replica. `before` holds those that the last round counted.

    It is repeated without those that it refuses, who vote by their last norm from then on, until nobody is
    refused. So readers, who know only what manifests list, come to the same: what a closer may list passes
    here once more.
    """
    refused: dict[str, str] = {}
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
    refused = {name: f"its norm {norms[name]:.3g} is that of an empty update" for name in empty}
    votes = sorted({**before, **norms}.values())
    # Of an even number the upper one: a half is no majority, and says nothing about the other half.
    median, lower = (votes[at // 2] if votes else 0.0 for at in (len(votes), len(votes) - 1))
    if median < EMPTY_NORM:  # nothing to compare with
        return Comparison(refused)
    large = {name for name, norm in norms.items() if norm > limit * median}
    if large | empty == norms.keys():  # the others are gone, and their last norms may be out of date
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
