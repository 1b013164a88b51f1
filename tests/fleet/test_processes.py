"""Several processes of one machine as one full replica: the same run as with one."""

import pytest
from small_recipes import recipe_text, replicas

from isthmus import simulate, train
from isthmus.config import parse_recipe
from isthmus.protocol.access import open_ledger
from isthmus.protocol.replay import Replay

RECIPE = recipe_text(
    replicas("node", processes=2) + replicas("rack"),
    inner={"precision": "fp64"},
    outer={"inner_steps": 2, "rounds": 2, "values": "fp64"},
)


@pytest.mark.fleet_check
def test_two_processes_that_share_a_full_replica_train_what_one_would(tmp_path):
    recipe = parse_recipe(RECIPE)
    real = train(recipe, tmp_path / "real", device="cpu", quiet=True)
    simulated = simulate(recipe, tmp_path / "simulated", device="cpu", quiet=True)
    for ours, theirs in zip(real.rows, simulated.rows, strict=True):
        assert abs(ours["loss_full"] - theirs["loss_full"]) < 1e-9
    ledger = open_ledger(str(tmp_path / "real" / "bucket"))
    assert Replay(ledger, 0).recipe.replicas[0].processes == 2
    assert all(row.get("contributors") == ["node", "rack"] for row in real.rows[1:])
    log = (tmp_path / "real" / "logs" / "node.log").read_text()
    assert "all rounds are done" in log
