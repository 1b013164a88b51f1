"""Lines of the regime in which every method is tuned alike, from no machine."""

from result_lines import line

from experiments.catalog import rows_of
from experiments.lines import digest
from experiments.tables import REGIME, pick_scale, recipe_of
from experiments.tuning import GROUPS, TUNING, chosen, drawn, regime_name, scored_on, trial_name

SCALE = pick_scale(REGIME)
ROWS_OF = rows_of(SCALE)
FIRST = chosen(SCALE, [])  # every method's first trial


def regime_line(row, seed, full, *losses, **facts):
    """Of a row by its short name, with the settings of the first trials."""
    name = regime_name(row)
    found = digest(recipe_of(ROWS_OF[name], SCALE, seed, "corpus/", SCALE.lr, FIRST))
    made = line(SCALE, name, seed, full, *losses, **facts) | {"digest": found}
    return made | {"corpus": scored_on(made["corpus"], ROWS_OF[name].text)}


def regime_seeds(row, *fulls, **facts):
    return [regime_line(row, seed, full, **facts) for seed, full in enumerate(fulls)]


def all_trials():
    """Every trial of every method; the first is the best."""
    return [
        line(SCALE, trial_name(group, number), 0, 4.0 + number, corpus=scored_on("0123456789ab", TUNING))
        for group in GROUPS
        for number in range(len(drawn(group, SCALE)))
    ]
