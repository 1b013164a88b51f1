"""Whether the order of trials is that of whole runs."""

from regime_lines import ROWS_OF, SCALE, all_trials
from result_lines import line

from experiments.lines import digest
from experiments.tables import recipe_of
from experiments.trial_length import by_tuning, lengths, run_to_the_end
from experiments.tuning import REPORT, drawn, regime_name, scored_on, settings_of


def whole_run(row, group, number, loss, seed=0):
    """A row with the settings of one of its method's trials."""
    name = regime_name(row)
    settings = {group: settings_of(drawn(group, SCALE)[number], SCALE.rounds, SCALE.inner_steps)}
    found = digest(recipe_of(ROWS_OF[name], SCALE, seed, "corpus/", SCALE.lr, settings))
    made = line(SCALE, name, seed, loss)
    return made | {"digest": found, "corpus": scored_on(made["corpus"], REPORT)}


def test_a_method_counts_once_two_of_its_trials_were_run_to_the_end():
    lines = [*all_trials(), whole_run("dense", "dense", 0, 3.5)]
    assert run_to_the_end(SCALE, lines) == {}
    assert lengths(SCALE, lines) == "No method was run to the end with the settings of two trials."
    lines += [whole_run("dense", "dense", 3, 3.4, seed=1)]  # of another seed
    assert run_to_the_end(SCALE, lines) == {}
    lines += [whole_run("dense", "dense", 3, 3.4), whole_run("het-24", "het", 1, 3.0)]
    (found,) = run_to_the_end(SCALE, lines).values()
    assert [(one.number, one.trial, one.whole) for one in found] == [(0, 4.0, 3.5), (3, 7.0, 3.4)]


def test_methods_are_counted_whose_better_trial_gave_the_better_run():
    kept = [whole_run("dense", "dense", 0, 3.5), whole_run("dense", "dense", 3, 3.6)]
    turned = [whole_run("pp-8", "pp", 0, 4.0), whole_run("pp-8", "pp", 5, 3.6)]
    text = lengths(SCALE, [*all_trials(), *kept, *turned])
    assert text.startswith("The better trial gave the better run for 1 of 2 methods (one seed).\n\n")
    assert "| 4.000 | 3.500 | |" in text.replace("|  |", "| |")
    assert "| 9.000 | 3.600 | -10.00 % |" in text


def test_differences_are_given_by_the_picks_and_by_the_best_runs():
    lines = [*all_trials(), whole_run("dense", "dense", 0, 3.0), whole_run("dense", "dense", 3, 3.3)]
    assert by_tuning(SCALE, lines) == "No two methods were run so."
    lines += [whole_run("pp-8", "pp", 0, 3.3), whole_run("pp-8", "pp", 5, 2.97)]
    (told,) = by_tuning(SCALE, lines).splitlines()[2:]
    assert told == ("| SparseLoCo + PP-Compress, against SparseLoCo | +10.00 % | -1.00 % | the sign turns |")
