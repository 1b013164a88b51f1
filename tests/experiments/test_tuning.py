"""Equal tuning: as many trials for every method, on a text that is never reported, and the best is taken."""

import dataclasses

import numpy as np
import pytest
from result_lines import line

from experiments.budget import of_every_step
from experiments.catalog import rows_of
from experiments.estimates import Book
from experiments.lines import digest
from experiments.render import regime_part
from experiments.tables import EIGHT, REGIME, Row, pick_scale, recipe_of
from experiments.trial import half_of, run_trials
from experiments.tuning import (
    AGAIN,
    FURTHER,
    GROUPS,
    NEARER,
    REPORT,
    ROWS,
    SHORTER,
    TUNING,
    again_name,
    base_name,
    chosen,
    drawn,
    edges_of,
    nearer_name,
    picks_table,
    regime_name,
    scored_on,
    trial_name,
    trials_table,
)
from experiments.work import (
    SITTING,
    Job,
    Run,
    all_runs,
    jobs_of,
    missing,
    next_job,
    pick_tables,
    predicted_seconds,
    rate,
    settled,
    sittings,
)
from isthmus.data.corpus import open_corpus

SCALE = pick_scale(REGIME)
ROWS_OF = rows_of(SCALE)
LRS, FIRST = SCALE.regime.lrs, SCALE.regime.trials
TRIALS = FIRST + len(FURTHER[REGIME]["dense"])


def trial_lines(losses, **facts):
    """Lines of all trials of a group, scored on the text for tuning."""
    return [
        line(SCALE, trial_name("het", number), 0, loss, corpus=scored_on("0123456789ab", TUNING), **facts)
        for number, loss in enumerate(losses)
    ]


def test_every_method_has_the_same_number_of_trials_all_different_and_equally_long():
    counts = {group: len(set(drawn(group, SCALE))) for group in GROUPS}
    assert set(counts.values()) == {TRIALS}
    tokens = set()
    for group in GROUPS:
        for number in range(TRIALS):
            row = ROWS_OF[trial_name(group, number)]
            recipe = recipe_of(row, SCALE, 0, "", SCALE.lr)
            tokens.add(recipe.outer.rounds * recipe.round_tokens)
            assert row.text == TUNING
            assert recipe.fleet() == recipe_of(_reported(group), SCALE, 0, "", SCALE.lr).fleet()
    assert len(tokens) == 1
    assert {group for _, group, _, _ in ROWS} == set(GROUPS)


def test_every_method_tries_every_learning_rate_and_methods_with_the_same_knobs_the_same_settings():
    """The larger the learning rate, the longer the warm-up and the smaller the outer step."""
    for group in GROUPS:
        tried = drawn(group, SCALE)[:FIRST]
        assert {one[0] for one in tried} == {f"inner.lr={lr}" for lr in LRS}
        for at, (knob, grid) in enumerate(GROUPS[group].knobs.items(), start=2):
            values = [one[at] for one in tried]
            counts = [values.count(f"{knob}={value}") for value in grid]
            assert min(counts) >= 1
            assert max(counts) - min(counts) <= 1
        by_lr = sorted(tried, key=lambda one: float(one[0].partition("=")[2]))
        values = [[float(setting.partition("=")[2]) for setting in one] for one in by_lr]
        assert [one[1] for one in values] == sorted(one[1] for one in values)  # a longer warm-up
        if "outer.lr" in GROUPS[group].knobs:
            assert [one[2] for one in values] == sorted((one[2] for one in values), reverse=True)
        alike = [other for other in GROUPS if GROUPS[other].knobs == GROUPS[group].knobs]
        assert all(drawn(other, SCALE)[:FIRST] == tried for other in alike)


def test_further_trials_have_the_methods_knobs_and_are_the_same_for_what_is_compared_with_sparseloco():
    for group, further in FURTHER[REGIME].items():
        knobs = [setting.partition("=")[0] for setting in drawn(group, SCALE)[0]]
        for one, words in zip(drawn(group, SCALE)[FIRST:], further, strict=True):
            assert one == tuple(f"{knob}={value}" for knob, value in zip(knobs, words.split(), strict=True))
    assert FURTHER[REGIME]["dense"] == FURTHER[REGIME]["het"] == FURTHER[REGIME]["pp"]
    assert FURTHER[REGIME]["adamw-pp"] == FURTHER[REGIME]["adamw-het"]
    assert all(len(drawn(group, pick_scale(EIGHT))) == 6 for group in GROUPS)  # they are of one scale


def test_rows_wait_until_every_trial_of_their_method_is_there(capsys):
    runs = all_runs(pick_tables(["regime"], SCALE), SCALE, "c/", [], seeds=[0])
    assert settled(runs, SCALE, trial_lines([4.0] * (TRIALS - 1))) == []
    assert "rows of dense, adamw, het," in capsys.readouterr().err
    ready = settled(runs, SCALE, trial_lines([4.0] * TRIALS))
    assert {run.row.follows for run in ready} == {"het"}


def edges_told(losses):
    """The cell of the method, and its best trial."""
    [row] = [
        one
        for one in picks_table(SCALE, trial_lines(losses)).splitlines()
        if one.startswith("| SparseLoCo + Het-PP")
    ]
    return row.split("|")[3].strip(), drawn("het", SCALE)[losses.index(min(losses))]


def test_every_knob_of_a_pick_at_an_edge_of_what_was_tried_is_told():
    for best in range(TRIALS):
        losses = [4.0] * TRIALS
        losses[best] = 3.9
        told, pick = edges_told(losses)
        expected = []
        for at, setting in enumerate(pick):
            knob, _, value = setting.partition("=")
            values = {float(one[at].partition("=")[2]) for one in drawn("het", SCALE)}
            if not any(other < float(value) for other in values):
                expected.append(f"{knob} (smallest)")
            if not any(other > float(value) for other in values):
                expected.append(f"{knob} (largest)")
        assert told == (", ".join(expected) or "none")
    assert edges_told([3.9, *[4.0] * (TRIALS - 1)])[0] == "none"  # the middle of every grid


def test_an_edge_is_of_the_trials_that_were_run():
    losses = [4.0, *[4.1] * (FIRST - 1)]
    (first, *rest), knobs = drawn("het", SCALE), ["inner.lr", "warmup", "outer.lr", "outer.feedback_decay"]
    assert [setting.partition("=")[0] for setting in first] == knobs
    assert edges_of(first, [first]) == [f"{knob} (smallest and largest)" for knob in knobs]
    larger = next(one for one in rest if float(one[0].partition("=")[2]) > float(first[0].partition("=")[2]))
    assert edges_of(first, [first, larger])[0] == "inner.lr (smallest)"
    assert f"| {FIRST - 1} of {TRIALS} trials |" in picks_table(SCALE, trial_lines(losses[:-1]))
    assert f"(best of {FIRST} of {TRIALS} trials)" in picks_table(SCALE, trial_lines(losses))
    # The further trials of the recommended fleet have a larger learning rate than its first.
    tried = [
        line(SCALE, trial_name("recommended", number), 0, 4.0 - 0.1 * (one[0] == "inner.lr=1.25e-2"),
             corpus=scored_on("0123456789ab", TUNING))
        for number, one in enumerate(drawn("recommended", SCALE))
    ]  # fmt: skip
    assert "inner.lr (largest)" in picks_table(SCALE, tried[:FIRST])
    assert "inner.lr (largest)" not in picks_table(SCALE, tried)


def test_trials_stand_by_learning_rate_then_the_further_ones_and_the_best_is_bold():
    losses = [4.0, 4.1, 3.5, 4.2, 4.3, 4.4, 3.4, 4.5]

    def told(some):
        table = trials_table(SCALE, trial_lines(some)).splitlines()
        [row] = [one for one in table if one.startswith("| SparseLoCo + Het-PP")]
        return [cell.strip() for cell in row.split("|")[2:-1]]

    tried = [one[0].partition("=")[2] for one in drawn("het", SCALE)[:FIRST]]
    by_lr = [f"{losses[tried.index(lr)]:.3f}" for lr in LRS]
    further = [", ".join(words.split()) for words in FURTHER[REGIME]["het"]]
    assert told(losses) == [*by_lr, f"**3.400** ({further[0]})", f"4.500 ({further[1]})"]
    so_far = ["**3.500**" if word == "3.500" else word for word in by_lr]  # the best of the first
    assert told(losses[:FIRST]) == [*so_far, *(f"not run ({words})" for words in further)]
    assert not any("**" in cell for cell in told(losses[: FIRST - 1]))  # what is missing may be better


@pytest.mark.parametrize("name", [REGIME, EIGHT])
def test_h_and_keep_are_chosen_among_few_in_one_trial_of_the_same_tokens(name):
    scale = pick_scale(name)
    rows, regime = rows_of(scale), scale.regime
    first = recipe_of(rows[trial_name("dense", 0)], scale, 0, "", scale.lr)
    assert regime.base in regime.bases
    for base in regime.bases:
        row = rows[base_name(*base)]
        recipe = recipe_of(row, scale, 0, "", scale.lr)
        assert (recipe.outer.inner_steps, recipe.outer.keep) == base
        assert recipe.outer.rounds * recipe.round_tokens == first.outer.rounds * first.round_tokens
        assert row.text == TUNING
        assert (recipe == dataclasses.replace(first, name=recipe.name)) == (base == regime.base)
        if name == EIGHT:
            assert of_every_step(recipe) <= 0.01


def test_rows_that_come_nearer_compress_nothing_and_read_and_score_the_same_tokens():
    scale = pick_scale(EIGHT)
    rows, picks = rows_of(scale), chosen(scale, [])
    for name, (group, replicas, batch, inner_steps) in NEARER.items():
        row = rows[nearer_name(name)]
        recipe = recipe_of(row, scale, 0, "", scale.lr, picks)
        assert not any(replicas.compressed for replicas in recipe.replicas)
        assert (recipe.num_replicas, recipe.inner.batch) == (replicas, batch)
        assert recipe.outer.inner_steps == inner_steps
        assert recipe.inner.optimizer == ("muon" if group == "recommended" else "adamw")
        assert recipe.outer.rounds * recipe.round_tokens == 51_118_080
        assert recipe.data.eval_batches * recipe.inner.batch == 512
        assert row.text == TUNING
        other = recipe_of(rows[row.against], scale, 0, "", scale.lr, picks)
        assert other.outer.method == "adamw"
        assert other.round_tokens // other.outer.inner_steps == recipe.round_tokens // inner_steps


def _reported(group):
    name = next(name for name, own_group, own, _ in ROWS if own_group == group and not own)
    return ROWS_OF[regime_name(name)]


def test_the_regime_has_twenty_million_parameters_two_layers_a_stage_and_a_hundred_million_tokens():
    recipe = recipe_of(ROWS_OF["regime-het-8"], SCALE, 0, "", SCALE.lr, chosen(SCALE, []))
    assert recipe.model.num_parameters >= 20e6
    assert recipe.model.layers == 2 * recipe.replicas[-1].stages
    assert recipe.outer.rounds * recipe.round_tokens >= 100e6
    assert not recipe.subspace.decay_t_perp
    assert len(ROWS_OF["regime-het-8"].seeds) == 5


def test_rows_take_the_best_trial_of_their_group_once_all_are_there_and_warm_up_is_a_share():
    losses = [4.0, 4.1, 3.5, 4.2, 4.3, 4.4]
    first, best = drawn("het", SCALE)[0], drawn("het", SCALE)[2]
    assert chosen(SCALE, trial_lines(losses[:-1]))["het"] == chosen(SCALE, [])["het"]
    found = chosen(SCALE, trial_lines(losses))
    wanted = dict(one.split("=") for one in best)
    for name in ("het-8", "het-24", "het-8-frozen"):
        recipe = recipe_of(ROWS_OF[regime_name(name)], SCALE, 0, "", SCALE.lr, found)
        assert recipe.inner.lr == float(wanted["inner.lr"])
        assert recipe.outer.feedback_decay == float(wanted["outer.feedback_decay"])
        share = recipe.inner.warmup_steps / (SCALE.rounds * SCALE.inner_steps)
        assert share == pytest.approx(float(wanted["warmup"]), abs=1e-3)
    assert found["dense"] == chosen(SCALE, [])["dense"]
    assert first != best
    assert chosen(SCALE, trial_lines([*losses, 3.4]))["het"] == found["het"]  # one of the further is missing
    last = drawn("het", SCALE)[-1]
    assert chosen(SCALE, trial_lines([*losses, 3.6, 3.4]))["het"][0] == last[0]
    trial = recipe_of(ROWS_OF[trial_name("het", 2)], SCALE, 0, "", SCALE.lr)
    assert trial.outer.rounds * SHORTER == SCALE.rounds
    assert trial.inner.warmup_steps == pytest.approx(recipe.inner.warmup_steps / SHORTER, abs=1)


def test_the_page_calls_two_methods_tuned_only_when_all_their_trials_are_there():
    def told(count):
        text = scored_on("0123456789ab", TUNING)
        trials = [line(SCALE, trial_name(group, n), 0, 4.0, corpus=text) for group in ("dense", "adamw")
                  for n in range(count)]  # fmt: skip
        return regime_part("distance", Book(trials, SCALE))

    assert "both with the best of the trials that are there" in told(FIRST)
    assert "both tuned" in told(TRIALS)


def test_a_trial_that_diverged_or_has_other_settings_is_not_taken():
    lost = dict.fromkeys(("loss_full", "loss_pipelined", "loss_mixed"))
    lines = trial_lines([4.0, 4.1, 3.5, 4.2, 4.3, 4.4])
    lines[2] |= {"failed": "nan", **lost}
    assert chosen(SCALE, lines)["het"] == chosen(SCALE, [])["het"]
    lines[1]["digest"] = "feedfeedfeed"
    assert chosen(SCALE, lines)["het"] == chosen(SCALE, [])["het"]


def test_lines_of_the_tuning_text_are_never_shown_as_reported_ones_nor_stand_for_them():
    row = dataclasses.replace(ROWS_OF["regime-dense"], seeds=(0,))
    recipe = recipe_of(row, SCALE, 0, "corpus/", SCALE.lr, chosen(SCALE, []))
    tuned = line(SCALE, "regime-dense", 0, 3.0) | {"digest": digest(recipe)}
    reported = tuned | {"loss_full": 3.5, "loss_pipelined": 3.5, "loss_mixed": 3.5}
    tuned["corpus"], reported["corpus"] = (scored_on(tuned["corpus"], text) for text in (TUNING, REPORT))
    assert Book([tuned], SCALE).loss("regime-dense", "full") is None
    assert Book([tuned, reported], SCALE).loss("regime-dense", "full").mean == 3.5
    runs = all_runs(pick_tables(["regime"], SCALE), SCALE, "c/", [], only=["regime-dense"], seeds=[0])
    assert missing(runs, [tuned], "0123456789ab") == runs
    assert missing(runs, [reported], "0123456789ab") == []


def test_no_token_is_scored_both_for_tuning_and_for_the_report():
    corpus = open_corpus("builtin:sample")
    halves = [half_of(corpus, text) for text in (REPORT, TUNING)]
    parts = [half.validation.slice(0, len(half.validation)) for half in halves]
    whole = corpus.validation.slice(0, len(corpus.validation))
    assert np.array_equal(np.concatenate(parts), whole)
    assert all(half.train is corpus.train for half in halves)
    reported = [row for row in ROWS_OF.values() if row.follows and not row.name.startswith("nearer-")]
    assert {row.text.partition("/")[0] for row in reported} == {REPORT}


def test_a_trial_and_a_reported_row_run_and_name_their_half(tmp_path):
    scale = pick_scale("toy")
    rows, found = rows_of(scale), {}
    for name in ("trial-dense-0", "regime-dense"):
        recipe = recipe_of(rows[name], scale, 0, "builtin:sample", scale.lr, chosen(scale, []))
        small = dataclasses.replace(recipe, outer=dataclasses.replace(recipe.outer, rounds=1))
        [found[name]] = run_trials([(name, small)], scale.name, "cpu", "c0ffee", rows[name].text)
    assert {name: one["corpus"].partition("/")[2] for name, one in found.items()} == {
        "trial-dense-0": TUNING,
        "regime-dense": REPORT,
    }
    first = [one["curve"][0][1] for one in found.values()]
    assert first[0] != first[1]  # the same first weights, scored on other text


def test_a_row_that_is_run_once_more_is_another_run_of_the_same_recipe_and_compared_with_itself():
    again, row = ROWS_OF[again_name("dense")], ROWS_OF["regime-dense"]
    recipes = [recipe_of(one, SCALE, 0, "corpus/", SCALE.lr, chosen(SCALE, [])) for one in (row, again)]
    assert digest(recipes[0]) == digest(recipes[1])
    assert again.against == row.name
    runs = all_runs(pick_tables(["regime"], SCALE), SCALE, "c/", [], only=[row.name, again.name], seeds=[0])
    assert len(runs) == len(jobs_of(runs)) == 2
    first = line(SCALE, row.name, 0, 3.0) | {"digest": digest(recipes[0])}
    second = first | {"loss_full": 3.03, "corpus": scored_on(first["corpus"], again.text)}
    first["corpus"] = scored_on(first["corpus"], row.text)
    assert Book([first, second], SCALE).gap(again.name, "full").mean == pytest.approx(1.0)


def test_what_is_run_once_more_comes_after_every_seed_of_every_row():
    runs = all_runs(pick_tables(["regime"], SCALE), SCALE, "c/", [])
    repeats = [run.row.name in map(again_name, AGAIN) for run in runs]
    assert repeats == sorted(repeats)
    assert any(repeats)
    jobs = jobs_of(runs)
    assert [run for job in jobs for run in job.runs] == runs
    last = [job for job in jobs if job.seed == 4 or job.repeats]  # also for a worker that has it compiled
    again = next(job for job in last if job.repeats)
    assert not next_job(last, set(again.signatures), set()).repeats
    assert next_job([again], set(), set()) is again


def test_a_step_of_muon_costs_the_same_whatever_the_batch():
    def cost(scale, *settings):
        row = Row("row", "", "dense", ("outer.rounds=2", *settings), tuned=False)
        recipe = recipe_of(row, scale, 0, "c/", scale.lr)
        return Job((Run(row, 0, "1", recipe, digest(recipe)),)).cost

    def more(*settings):
        return cost(SCALE, "inner.optimizer=muon", *settings) - cost(SCALE, *settings)

    assert more() == pytest.approx(more("inner.batch=4"))
    assert more() > 0
    assert more("outer.rounds=6") == pytest.approx(3 * more())


def test_sittings_keep_the_order_and_their_length():
    runs = all_runs(pick_tables(["regime"], SCALE), SCALE, "c/", [])
    parts = sittings(runs, SCALE, [], 12)
    assert [run for part in parts for run in part] == runs
    assert len(parts) > 1
    assert all(predicted_seconds(part, SCALE, [], 12) <= SITTING for part in parts)
    assert {run.row.name for run in parts[0] if run.seed == 0} >= {regime_name(name) for name, *_ in ROWS}


def test_one_worker_is_expected_to_be_as_fast_as_the_fastest_line_and_many_as_their_sum():
    crowded = [
        line(SCALE, trial_name("het", n), 0, 4.0, corpus=scored_on("0123456789ab", TUNING)) for n in range(3)
    ]
    for one, speed in zip(crowded, (200_000, 250_000, 2_000_000), strict=True):
        one["tokens_per_second"] = speed
    assert rate(SCALE, [], 3) == (SCALE.tokens_per_second, False)
    assert rate(SCALE, crowded, 1) == (2_000_000, True)
    assert rate(SCALE, crowded, 12) == (12 * 250_000, True)
