"""What `join` says of the run's length before it starts its workers."""

from types import SimpleNamespace

import pytest

from isthmus.runtime.preflight import time_left


def ledger(last, seconds=0.0, rounds=100):
    outer = SimpleNamespace(rounds=rounds)
    run = SimpleNamespace(recipe=SimpleNamespace(outer=outer))
    manifests = {last: SimpleNamespace(seconds=seconds)} if last else {}
    return SimpleNamespace(run=run, last_round=lambda: last, manifest=manifests.get)


@pytest.mark.parametrize(
    ("last", "seconds", "words"),
    [
        (0, 0.0, "none of 100 rounds is settled yet; `isthmus plan` estimates how long they take"),
        (40, 60.0, "rounds 41 to 100: about 1 h 00 min, if each takes as long as round 40 did"),
        (100, 60.0, "all 100 rounds are settled"),
    ],
)
def test_the_rest_takes_as_long_as_its_newest_round_says(last, seconds, words):
    assert time_left(ledger(last, seconds)) == words
