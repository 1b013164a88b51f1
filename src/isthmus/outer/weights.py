"""How much each replica's pseudo-gradient counts in the mean of a round: by the sequences behind it."""

from collections.abc import Iterable, Sequence
from math import gcd

from isthmus.config import Recipe


def round_weights(recipe: Recipe, replicas: Iterable[str]) -> list[int]:
    """w_m of the replicas that count in a round, in the order given: H x batch_m, reduced by what all share.

    Batches are the recipe's, not what somebody says of itself. All alike are all 1, which is the plain mean,
    to the same bits.
    """
    batches = {member.name: recipe.batch_of(member.config) for member in recipe.fleet()}
    return reduced([recipe.outer.inner_steps * batches[name] for name in replicas])


def reduced(weights: Sequence[int]) -> list[int]:
    """In the same proportions, as small as whole numbers can be."""
    shared = gcd(*weights) or 1
    return [weight // shared for weight in weights]
