"""Each replica's share of a round's data: a pure function of the epoch and the manifest before.

A round deals its batches to the replicas that the manifest before names in `dealt_in`, in the fleet's order;
round 1 to all of run.json.
"""

from isthmus.layout.deal import Deal
from isthmus.protocol.documents import Manifest, RunInfo


def batches_of(run: RunInfo, before: Manifest | None) -> dict[str, int]:
    """The replicas with a share of a round's data, in the fleet's order -> sequences per inner step."""
    fleet = run.recipe.fleet()
    return {
        m.name: run.recipe.batch_of(m.config) for m in fleet if before is None or m.name in before.dealt_in
    }


def dealt_up_to(run: RunInfo, before: Manifest | None) -> tuple[int, int]:
    """The data assigned up to and including a round, at every inner step of every `dealt_in` replica:
    batches of inner.batch sequences, and remaining sequences."""
    taken = run.recipe.outer.inner_steps * sum(batches_of(run, before).values())
    return divmod(_sequences(run, before) + taken, run.recipe.inner.batch)


def deal(run: RunInfo, round_number: int, replica: str, before: Manifest | None) -> Deal | None:
    """The replica's batches in a round; None if it has no share of the data."""
    sizes = batches_of(run, before)
    if replica not in sizes:
        return None
    steps, number, each = run.recipe.outer.inner_steps, list(sizes).index(replica), list(sizes.values())
    begin, first = (round_number - 1) * steps, _sequences(run, before)
    return Deal(begin, steps, first, sum(each), sum(each[:number]), sizes[replica])


def _sequences(run: RunInfo, before: Manifest | None) -> int:
    """Sequences assigned up to the end of a round."""
    return before.dealt * run.recipe.inner.batch + before.dealt_rest if before else 0
