from pathlib import Path

import pytest
from fabricate import FULL, PIPELINED, make_run, recipe

from isthmus.runlog import REAL, summary
from isthmus.runlog.words import clock, count, duration, fleet_in_words, rate, size, times

ONE = FULL.replace("2", "1")


def words(tmp_path: Path, fleet: str, *overrides: str, num_rounds: int = 20, **about) -> list[str]:
    return summary(make_run(tmp_path / "run", recipe(fleet, *overrides), num_rounds, **about))


def test_a_mixed_fleet_in_words(tmp_path: Path):
    assert words(tmp_path, FULL + PIPELINED) == [
        "4 replicas (2 full; 2 pipelined in 2 stages at k/d = 1/8) trained a model of 1.1 M parameters "
        "for 20 rounds of 15 inner steps on 1.2 M tokens in 58 s.",
        "Held-out loss fell from 7.01 to 4.34 nats as the replicas train (mixed), 4.28 as a full forward, "
        "4.40 as a pipelined forward.",
        "Between stages 40.6 MB crossed (activations 19.7, gradients 19.7, token ids 1.2); "
        "uncompressed they would have sent 316 MB (7.8 times as much).",
        "Between replicas 7.9 MB crossed (2.0 up, 5.9 down): sparse updates, once a round; "
        "dense data parallelism would have sent 8.0 GB (1,000 times as much).",
        "Snapshots, manifests and heartbeats in the bucket took 72 kB more.",
        "With the recipe's links, and a machine like this one for each that it names, it would take "
        "4 min 10 s: a formula, not a measurement.",
    ]


def test_the_virtual_clock_says_of_what_machines_it_speaks_and_is_silent_of_those_that_ran(tmp_path: Path):
    rates = [f"replicas.{name}.tflops=0.5" for name in ("rack", "edge")]
    stated = words(tmp_path / "stated", FULL + PIPELINED, *rates, mode=REAL)
    assert stated[-1] == (
        "With machines and links as the recipe states them it would take 4 min 10 s: a formula, not a "
        "measurement."
    )
    assert not any("formula" in text for text in words(tmp_path / "real", FULL + PIPELINED, mode=REAL))


@pytest.mark.parametrize(
    ("done", "says"),
    [
        (16, "Its last 4 rounds will open the boundaries for a plain model."),
        (18, "Boundaries opened in 2 of 4 finishing rounds, for a plain model."),
        (20, "Boundaries opened in 4 of 4 finishing rounds, for a plain model."),
    ],
)
def test_finishing_rounds_in_words(tmp_path: Path, done: int, says: str):
    assert words(tmp_path, FULL + PIPELINED, "finish.rounds=4", num_rounds=done)[1] == says


def test_without_pipelined_replicas_there_is_one_loss_and_no_stage(tmp_path: Path):
    text = words(tmp_path, FULL, "outer.method=diloco")
    assert text[1] == "Held-out loss fell from 6.95 to 4.28 nats."
    assert not any("stages" in sentence for sentence in text)
    assert "dense updates, once a round" in text[2]


def test_adamw_is_not_compared_with_itself(tmp_path: Path):
    text = words(tmp_path, FULL, "outer.method=adamw")
    assert text[2].endswith("gradients, after every inner step, which is dense data parallelism.")


def test_one_replica_exchanges_nothing(tmp_path: Path):
    text = words(tmp_path, ONE)
    assert text[0].startswith("1 full replica trained")
    assert "With one replica there was nothing to exchange between replicas." in text


def test_before_the_first_round(tmp_path: Path):
    assert words(tmp_path, FULL, num_rounds=0, status="running") == [
        "2 full replicas will train a model of 1.1 M parameters; no round has been completed.",
        "Before training the held-out loss is 6.95 nats.",
    ]
    empty = make_run(tmp_path / "empty", recipe(), -1, status="failed", error="no such device")
    assert summary(empty)[1:] == [
        "The held-out loss has not been measured.",
        "The run failed after round 0 of 20: no such device.",
    ]


@pytest.mark.parametrize(
    ("about", "sentence"),
    [
        ({"status": "interrupted"}, "The run was interrupted after round 7 of 20."),
        ({"status": "running"}, "The run has not ended: round 7 of 20 is the last one written down."),
        (
            {"status": "failed", "error": "out of\nmemory."},
            "The run failed after round 7 of 20: out of memory.",
        ),
    ],
)
def test_a_run_that_did_not_finish_says_so(tmp_path: Path, about: dict, sentence: str):
    assert words(tmp_path, PIPELINED, num_rounds=7, **about)[1] == sentence


def test_rounds_without_evaluation_are_not_taken_for_the_last_loss(tmp_path: Path):
    text = words(tmp_path, FULL, num_rounds=7, eval_every=4)
    assert text[1] == "Held-out loss fell from 6.95 to 5.63 nats (last measured after round 4)."


def test_a_diverged_run_says_so(tmp_path: Path):
    run = make_run(tmp_path / "run", recipe(), 3)
    run.append(dict(run.rows()[-1]) | {"round": 4, "loss_train": float("nan"), "loss_mixed": float("nan")})
    assert "The training loss of the last round was not a finite number: the run diverged." in summary(run)


def test_fleets_in_words():
    barn = PIPELINED.replace("edge", "barn").replace('"1/8"', '"none"').replace("stages = 2", "stages = 4")
    shed = FULL.replace("rack", "shed")
    assert fleet_in_words(recipe(FULL + shed)) == "4 full replicas"
    assert fleet_in_words(recipe(PIPELINED)) == "2 replicas, pipelined in 2 stages at k/d = 1/8,"
    assert fleet_in_words(recipe(FULL + shed + barn)) == (
        "6 replicas (4 full; 2 pipelined in 4 stages without compression)"
    )


def test_figures_change_unit_before_they_grow_a_fourth_digit():
    assert [size(n) for n in (0, 999, 999.6, 99_949, 999_499, 999_500, 93.04e6, 8e9)] == [
        *("0 B", "999 B", "1.0 kB", "99.9 kB", "999 kB", "1.0 MB", "93 MB", "8.0 GB")
    ]
    assert [count(n) for n in (7, 999, 1_100_000, 178e6)] == ["7", "999", "1.1 M", "178 M"]
    assert [duration(s) for s in (0.5, 9.97, 59.6, 250, 3599.7, 11_100, 216_000)] == [
        *("0.5 s", "10 s", "1 min 00 s", "4 min 10 s", "1 h 00 min", "3 h 05 min", "2 d 12 h")
    ]
    assert [clock(s) for s in (5, 70, 3700, 200_000)] == ["5s", "1m10s", "1h01m", "2d07h"]
    assert [times(r) for r in (1.0, 7.61, 12, 1712, 0.5)] == [
        *("the same", "7.6 times as much", "12 times as much", "1,700 times as much", "0.50 times as much")
    ]
    assert [rate(r) for r in (12, 48_123, 1.2e6)] == ["12.0 tok/s", "48.1k tok/s", "1.2M tok/s"]
