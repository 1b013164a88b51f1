"""Which of a round's updates count: the rules that need more than one update, one after another, for closers
and for bench/attacks.py."""

from collections.abc import Mapping

from torch import Tensor

from isthmus.config import BucketConfig
from isthmus.protocol.norms import compare_norms
from isthmus.protocol.scores import Judged, RoundScores
from isthmus.protocol.signs import compare_signs


def compare(
    signs: Mapping[str, Tensor],
    norms: Mapping[str, float],
    before: Mapping[str, float],
    scores: RoundScores,
    limits: BucketConfig,
) -> Judged:
    """Who is refused, of updates that are each good alone. `before` holds the norms of the last round.

    Who is on probation has no vote about others, and is judged beside them. Where nobody else has delivered,
    there is nobody to protect, and newcomers count.
    """
    new = [name for name in norms if name in scores.probation]
    if len(new) == len(norms):
        new = []
    others = [name for name in norms if name not in new]
    refused = compare_signs({name: signs[name] for name in others}, limits.sign_agreement)
    by_score = scores.compare([name for name in others if name not in refused])
    refused |= by_score.refused
    # Norms last: a reader, who sees only what is listed, compares them again and must come to the same.
    kept = {name: norms[name] for name in others if name not in refused}
    by_norm = compare_norms(kept, before, limits.norm_limit)
    refused |= by_norm.refused
    kept = {name: norm for name, norm in kept.items() if name not in refused}
    for name in new:
        beside = compare_signs({n: signs[n] for n in (*kept, name)}, limits.sign_agreement)
        beside |= compare_norms({**kept, name: norms[name]}, before, limits.norm_limit).refused
        refused[name] = beside.get(name) or scores.of_newcomer(name, list(kept))
    notes = [note for note in (by_score.note, by_norm.note) if note]
    return Judged(refused, "; ".join(notes))
