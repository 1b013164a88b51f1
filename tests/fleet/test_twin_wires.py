"""The twin with wires of 8, 6 and 4 bits, Muon, and many entries sent.

5 bits and a full replica: `beyond` in test_twin. Here k = 12, so that words of eight codes hold parts of two
tokens.
"""

import pytest
from small_recipes import pipelined
from test_twin import EXACT, FP64, ROUNDS, Twins, run_both

from isthmus.layout.traffic import round_bytes
from isthmus.runlog import totals

pytestmark = pytest.mark.soak

WIRES = ("int8", "int6", "int4")
MANY = ["outer.keep=1344", "outer.feedback_decay=0.99", "outer.lr=0.6"]  # the nearest to per-step AdamW
FLEET = "".join(pipelined(wire, stages=2, compression="3/16", wire=wire) for wire in WIRES)


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Twins:
    return run_both(tmp_path_factory.mktemp("wires"), [*FP64[:2], "inner.optimizer=muon", *MANY], FLEET)


def test_weights_after_every_round_are_the_simulators_with_every_wire(both):
    assert [member.config.wire for member in both.recipe.fleet()] == list(WIRES)
    assert len(both.real) == len(both.simulated) == ROUNDS
    assert max(both.gaps()) < 1e-9


def test_bytes_that_processes_counted_are_those_predicted_with_every_wire(both):
    counted = totals(both.real_rows)["bytes"]
    rounds = [round_bytes(both.recipe, t) for t in range(1, ROUNDS + 1)]
    assert {p: counted[p] for p in EXACT} == {p: sum(sent[p] for sent in rounds) for p in EXACT}
    assert {p: totals(both.simulated_rows)["bytes"][p] for p in EXACT} == {p: counted[p] for p in EXACT}
