"""The weight of each replica's pseudo-gradient in the mean of a round: by the sequences behind it."""

from collections.abc import Iterable
from math import gcd

from isthmus.config import Recipe


def round_weights(recipe: Recipe, replicas: Iterable[str]) -> list[int]:
    """w_m of the replicas that count in a round, in the given order: H x batch_m over their common divisor.

    Batches are the recipe's, not what a replica states. Equal batches all become 1, which gives the plain
    mean, with the same bits.
    """
    batches = {member.name: recipe.batch_of(member.config) for member in recipe.fleet()}
    sequences = [recipe.outer.inner_steps * batches[name] for name in replicas]
    shared = gcd(*sequences) or 1
    return [number // shared for number in sequences]
