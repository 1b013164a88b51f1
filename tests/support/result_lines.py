"""Lines of results that no machine ran, for tests of what is made of them."""

from experiments.catalog import rows_of
from experiments.lines import digest
from experiments.tables import recipe_of
from isthmus.config import dump_recipe


def line(scale, row, seed, full, pipelined=None, mixed=None, lrs=None, **facts):
    recipe = recipe_of(rows_of(scale)[row], scale, seed, "corpus/", lrs or scale.lr)
    pipelined = full if pipelined is None else pipelined
    mixed = (full + pipelined) / 2 if mixed is None else mixed
    rounds = recipe.outer.rounds
    return {
        "row": row,
        "scale": scale.name,
        "seed": seed,
        "digest": digest(recipe),
        "recipe": dump_recipe(recipe),
        "commit": "c0ffee",
        "device": "a device",
        "torch": "2.13.0",
        "corpus": "0123456789ab",
        "corpus_tokens": 27_000_000,
        "parameters": recipe.model.num_parameters,
        "tokens": rounds * recipe.round_tokens,
        "seconds": 12.5,
        "tokens_per_second": 1_600_000,
        "loss_full": full,
        "loss_pipelined": pipelined,
        "loss_mixed": mixed,
        "failed": None,
        "curve": [[0, 9.0, 9.0, 9.0], [rounds, full, pipelined, mixed]],
    } | facts
