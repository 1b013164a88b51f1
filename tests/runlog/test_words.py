from pathlib import Path

import pytest
from fabricate import FULL, PIPELINED, make_run, recipe

from isthmus.runlog import summary
from isthmus.runlog.words import clock, count, duration, rate, size, times


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


def test_a_diverged_run_says_so(tmp_path: Path):
    run = make_run(tmp_path / "run", recipe(), 3)
    run.append(dict(run.rows()[-1]) | {"round": 4, "loss_train": float("nan"), "loss_mixed": float("nan")})
    assert "The training loss of the last round was not a finite number: the run diverged." in summary(run)


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
