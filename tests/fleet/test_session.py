"""A session by itself: one replica's part in a run of named tensors, in a loop that is not ours."""

from pathlib import Path

import pytest
import torch
from in_process import Fleet
from little import Little
from little import hasty as hasty
from returning import small
from torch import Tensor

from isthmus.model.llama import init_params
from isthmus.protocol import closer
from isthmus.replica.control_group import SingleProcess
from isthmus.runlog.facts import Facts
from isthmus.runtime.session import Session, State
from isthmus.sparse.topk import decode

ALONE = """
name = "little"
[model]
preset = "nano"
vocab = 64
width = 32
layers = 2
ffn = 64
heads = 2
context = 16
[data]
corpus = "not-here"
[outer]
inner_steps = 1
rounds = 6
keep = 8
[bucket]
anchor_every = 50
[[replicas]]
name = "a"
"""

pytestmark = pytest.mark.usefixtures("hasty")


class Loop:
    """Somebody's own loop, started again and again."""

    def __init__(self, folder: Path) -> None:
        self.run, self.said = Little(str(folder / "bucket"), folder, ALONE), list[str]()
        self.starts = 0

    def open(self, state: State | None = None, params: dict[str, Tensor] | None = None) -> Session:
        ledger, self.starts = self.run.ledger("a"), self.starts + 1
        anchor = init_params(ledger.run.recipe.model, ledger.run.recipe.seed)
        session = Session(
            ledger,
            anchor,
            anchor.keys(),
            SingleProcess(),
            f"{self.starts:016x}",
            self.said.append,
            again=False,
            background=False,
        )
        session.restore(state, params)
        return session


def trained(session: Session, seed: int) -> dict[str, Tensor]:
    chance = torch.Generator().manual_seed(seed)
    return {n: t - 0.01 * torch.randn(t.shape, generator=chance) for n, t in session.anchor.items()}


def copied(state: State) -> State:
    files = {file: {name: t.clone() for name, t in named.items()} for file, named in state.files.items()}
    return State(state.round, files, state.carried, tuple(state.starts))


def one_round(session: Session, seed: int) -> None:
    assert session.begin()
    session.deliver(trained(session, seed), Facts())
    assert session.settle().counted


@pytest.fixture
def loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Loop:
    monkeypatch.setattr(closer, "STEP_IN_SECONDS", 0.0)
    return Loop(tmp_path)


def test_an_old_state_takes_what_was_sent_since_and_sends_none_of_it_again(loop: Loop):
    """What the feedback held at the entries of later updates is gone; the rest stays."""
    session = loop.open()
    one_round(session, 1)
    old = copied(session.save())
    one_round(session, 2)
    one_round(session, 3)
    back = loop.open(old)
    back.catch_up()
    assert back.round == 4
    assert all(torch.equal(tensor, session.anchor[name]) for name, tensor in back.anchor.items())
    ledger, sent = loop.run.ledger(), dict[str, Tensor]()
    for t in (2, 3):
        shards = {s.index: ledger.get_shard("a", t, s) for s in ledger.manifest(t).entries[0].shards}
        for name, payload in session.outer.unpack(shards).items():
            sent[name] = sent.get(name, torch.tensor(False)) | (decode(payload) != 0)
    for name, e in back.feedback.items():
        assert torch.equal(e, torch.where(sent[name], 0.0, old.files["feedback"][name]))
    one_round(back, 4)


def test_an_update_on_its_way_is_finished_by_the_next_start(loop: Loop):
    session = loop.open()
    one_round(session, 1)
    assert session.begin()
    session.deliver(trained(session, 2), Facts())
    carried = copied(session.save())
    assert carried.carried
    session.settle()
    for state in (carried, copied(carried)):  # it was settled meanwhile, and counted
        back = loop.open(state)
        back.catch_up()
        assert back.round == 3
        for name, e in back.feedback.items():
            assert torch.equal(e, session.feedback[name])
            assert torch.equal(back.anchor[name], session.anchor[name])


def test_the_first_commit_to_an_open_round_stands(loop: Loop):
    """Killed between commit and manifest; the state is of before, and the loop trains to other weights."""
    session = loop.open()
    one_round(session, 1)
    before = copied(session.save())
    assert session.begin()
    session.deliver(trained(session, 2), Facts())
    back = loop.open(before)
    back.catch_up()
    assert back.begin()
    params = trained(back, 3)
    beta = back.ledger.run.recipe.outer.feedback_decay
    c = {n: before.files["feedback"][n] * beta + back.anchor[n] - p for n, p in params.items()}
    back.deliver(params, Facts())
    assert back.settle().counted
    (entry,) = loop.run.ledger().manifest(2).entries
    assert entry.incarnation == session.incarnation
    shards = {s.index: back.ledger.get_shard("a", 2, s) for s in entry.shards}
    for name, payload in back.outer.unpack(shards).items():  # the rule: e = c - decode(listed)
        torch.testing.assert_close(back.feedback[name], c[name] - decode(payload))


def test_weights_that_are_not_finite_are_not_delivered_and_a_skip_settles_the_round(loop: Loop):
    session = loop.open()
    one_round(session, 1)
    feedback = {name: e.clone() for name, e in session.feedback.items()}
    assert session.begin()
    params = trained(session, 2)
    next(iter(params.values())).view(-1)[0] = torch.nan
    assert not session.is_finite(params)
    session.skip("not_finite")
    assert not session.settle().counted
    assert session.round == 3
    assert all(torch.equal(e, feedback[name]) for name, e in session.feedback.items())


def test_a_long_evaluation_of_the_only_closer_holds_up_nobody(tmp_path: Path):
    fleet = Fleet(small(rounds=8, full=2, deadline_seconds=10), tmp_path, closers=["rack-0"])
    closing, seen = fleet["rack-0"], list[int]()

    def prepare(trainer) -> None:
        settle = trainer.settle

        def evaluate(round_number: int) -> int:
            done = settle(round_number)
            if round_number == 4:
                for _ in range(60):  # its thread, by hand
                    fleet.time.sleep(2.0)
                    trainer.session.watch.look_after()
                seen.append(fleet.ledger.last_round())
            return done

        trainer.settle = evaluate

    closing.prepare = prepare
    fleet.go()
    fleet.check_one_history()
    assert seen == [5]  # it closed the open round, and then the others waited for its word on the next
