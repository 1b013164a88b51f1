"""Updates scored by the closer of a real replica: the same number as from the model itself, and what its
author does with an update that was refused for it."""

from pathlib import Path

import pytest
import torch
from seats import take_seat
from small_recipes import recipe_text, replicas

from isthmus.config import Recipe, parse_recipe
from isthmus.data.corpus import open_corpus
from isthmus.outer.exchange import Contribution
from isthmus.protocol import closer
from isthmus.protocol.shards import unpack_shards
from isthmus.replica.usefulness import UpdateScorer
from isthmus.runtime.create import create
from isthmus.runtime.heartbeats import HeartbeatThread
from isthmus.runtime.recovery import Recovery
from isthmus.runtime.trainer import Trainer
from isthmus.sparse.topk import decode


@pytest.fixture(autouse=True)
def _no_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(closer, "STEP_IN_SECONDS", 0.0)


@pytest.fixture
def recipe() -> Recipe:
    wanted = {"bound": 1e-4, "sample": 3, "batches": 64}  # whichever windows are drawn, the sign is clear
    return parse_recipe(
        recipe_text(replicas("rack", count=3), outer={"inner_steps": 10}, score=wanted)
        + "\n[bucket]\nsign_agreement = 0\n"
    )


def seats(recipe: Recipe, folder: Path) -> list[Trainer]:
    create(recipe, str(folder / "bucket"), folder / "keys", closers=["rack-0"])
    fleet = [take_seat(recipe, folder, member) for member in recipe.fleet()]
    for one in fleet:
        Recovery(one).resume()
        HeartbeatThread(one, "seat", 1.0).beat()
    return fleet


def turned(trainer: Trainer, own: Contribution) -> Contribution:
    """The same update uphill, and twice as far."""
    sent = unpack_shards(trainer.ledger, own.shards)
    dense = {name: -2 * decode(payload) for name, payload in sent.items()}
    payloads = trainer.outer.codec.encode_many(dense)
    shards = {i: trainer.outer.codec.pack_many(payloads.part(trainer.ledger.shards[i])) for i in own.shards}
    return Contribution(own.replica, shards, own.facts)


def test_a_turned_update_is_refused_by_its_score_and_its_author_does_not_send_it_again(
    recipe: Recipe, tmp_path: Path
):
    fleet = seats(recipe, tmp_path)
    closing, _, bad = fleet
    own = [one.train_round(0, lambda h: None)[0] for one in fleet]
    anchor = {name: tensor.clone() for name, tensor in closing.anchor.items()}
    own[2] = bad.pending = turned(bad, own[2])
    feedback = {name: tensor.clone() for name, tensor in bad.feedback.items()}
    for one, update in zip(fleet, own, strict=True):
        one.exchange.deliver(1, update)
    for one in fleet:
        one.apply(1, one.exchange.close(1, []))

    manifest = closing.ledger.manifest(1)
    assert manifest is not None
    assert [entry.replica for entry in manifest.entries] == ["rack-0", "rack-1"]
    ((name, reason),) = manifest.refused
    assert name == "rack-2"
    assert "it makes the held-out loss worse by" in reason
    assert manifest.probation == {"rack-2": 0}

    scoring = closing.exchange.closer.verdicts
    draw = scoring.scores.score.args[0]  # pyright: ignore[reportFunctionMemberAccess]
    held_out = open_corpus(recipe.data.corpus).validation
    plain = UpdateScorer(recipe, held_out, closing.outer.codec, torch.device("cpu"), torch.float32)
    plain.begin(anchor, 1, draw)
    for update in own:
        expected = plain.score(unpack_shards(closing.ledger, update.shards))
        assert dict(manifest.scores)[update.replica] == pytest.approx(expected, abs=1e-5)
    assert dict(manifest.scores)["rack-0"] < 0 < dict(manifest.scores)["rack-2"]

    for name, tensor in bad.feedback.items():
        assert torch.equal(tensor, feedback[name]), "it did not return to the error feedback"
    digests = {one.exchange.settle_anchor() for one in fleet}
    assert len(digests) == 1
