"""OuterSync against eq. 2, and what happens when (docs/use.md): kills, states, faults, strangers."""

import io
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from loops import Run, all_of, together
from models import Equation2, Odd
from torch.testing import assert_close

import isthmus
from isthmus.cli.main import main
from isthmus.errors import ConfigError, RunError
from isthmus.loop.outer_sync import OuterSync
from isthmus.loop.tensors import Parameters

PLAIN = {"outer.keep": 8, "outer.chunk_side": 16, "outer.values": "fp32", "outer.clip": "none"}


@pytest.fixture(autouse=True)
def _hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda handle: None)


@pytest.mark.parametrize("names", ["a", "ab"])
def test_rounds_are_equation_2(tmp_path: Path, names: str):
    run = Run(tmp_path, names, torch.float64, overrides=PLAIN)
    plain = Equation2(Parameters(Odd(dtype=torch.float64)).anchor(), len(names), 8, 16, beta=0.95)
    loops = all_of(run, *names)
    for t in range(4):
        plain.round([loop.sent[t] for loop in loops])
    for loop in loops:
        assert_close(loop.params, plain.theta, rtol=0, atol=1e-6)  # what is sent is float32
    assert len({loop.sync.digest for loop in loops}) == 1
    assert main(["ledger", "verify", run.url]) == 0
    found = isthmus.open_run(run.url)
    assert [row.tokens for row in found.rows] == [0, *(108 * len(names) * t for t in range(1, 5))]
    assert_close(found.weights(), plain.theta, rtol=0, atol=1e-6)


def test_the_end_of_a_run(tmp_path: Path):
    run = Run(tmp_path, "a", rounds=2)
    loop = run.loop("a").train()
    assert (loop.sync.done, loop.sync.round, loop.sync.global_step) == (True, 2, 6)
    assert loop.sync.step() is False
    again = run.loop("a")
    assert (again.sync.done, again.sync.step(), again.sync.digest) == (True, False, loop.sync.digest)
    assert_close(again.params, loop.params, rtol=0, atol=0)


# A kill


def test_a_kill_inside_a_round_with_the_state_restored_changes_nothing(tmp_path: Path):
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    whole = all_of(Run(tmp_path / "one"), "a", "b")[0]
    run = Run(tmp_path / "two")

    def killed() -> OuterSync:
        loop = run.loop("a").train(rounds=1)
        loop.step()
        file = io.BytesIO()
        torch.save(loop.saved(), file)
        loop.kill()
        loop = run.loop("a", saved=torch.load(io.BytesIO(file.getvalue()), weights_only=True))
        assert (loop.sync.round, loop.sync.global_step) == (1, 4)
        return loop.train().sync

    first, second = together(killed, lambda: run.loop("b").train().sync)
    assert first.digest == second.digest == whole.sync.digest


def test_a_kill_without_a_state_takes_the_newest_weights_and_an_empty_feedback(tmp_path: Path):
    run = Run(tmp_path)

    def killed() -> OuterSync:
        loop = run.loop("a").train(rounds=2)
        loop.step()
        loop.kill()
        loop = run.loop("a")
        assert loop.sync.round >= 2
        tensors = loop.sync.state_dict()["tensors"]
        assert not any(t.any() for name, t in tensors.items() if name.startswith("feedback/"))
        return loop.train().sync

    first, second = together(killed, lambda: run.loop("b").train().sync)
    assert first.digest == second.digest


def test_an_old_state_jumps_to_the_newest_round_and_empties_what_was_counted(tmp_path: Path):
    run = Run(tmp_path, rounds=5)

    def killed() -> OuterSync:
        loop = run.loop("a").train(rounds=1)
        loop.step()
        old = loop.saved()
        loop.train(rounds=3).kill()
        loop = run.loop("a", saved=old)
        assert loop.sync.round >= 3
        assert loop.sync.global_step == 3 * loop.sync.round
        assert any("global_step jumps" in line for line in loop.said)
        return loop.train().sync

    first, second = together(killed, lambda: run.loop("b").train().sync)
    assert first.digest == second.digest
    assert main(["ledger", "verify", run.url]) == 0


def test_the_first_commit_to_an_open_round_stands(tmp_path: Path):
    run = Run(tmp_path, rounds=2)
    loop = run.loop("a")
    saved = loop.saved()
    interrupt(loop.sync)
    with pytest.raises(KeyboardInterrupt):
        loop.train()
    loop.kill()
    entry = (tmp_path / "bucket/commits/000001/a.json").read_bytes()
    first, second = together(lambda: run.loop("a", saved=saved).train(), lambda: run.loop("b").train())
    assert first.sync.digest == second.sync.digest
    assert (tmp_path / "bucket/commits/000001/a.json").read_bytes() == entry


def interrupt(sync: OuterSync) -> None:
    """Ctrl-C in the first wait for the others."""

    def pressed(seconds: float) -> None:
        raise KeyboardInterrupt

    sync._patience.sleep = pressed


def test_ctrl_c_while_it_waits_keeps_the_update_and_the_next_start_finishes_that_round(tmp_path: Path):
    run = Run(tmp_path, rounds=2)
    loop = run.loop("a")
    interrupt(loop.sync)
    with pytest.raises(KeyboardInterrupt), loop.sync:
        loop.train()
    saved = loop.saved()
    assert saved["sync"]["carried"] == 1

    def back() -> OuterSync:
        again = run.loop("a", saved=saved)
        assert (again.sync.round, again.sync.global_step) == (1, 3)
        return again.train().sync

    first, second = together(back, lambda: run.loop("b").train().sync)
    assert first.digest == second.digest
    assert main(["ledger", "verify", run.url]) == 0


def test_a_late_joiner_begins_with_the_newest_weights(tmp_path: Path):
    run = Run(tmp_path, rounds=6, overrides={"bucket.start_seconds": 0.0, "bucket.deadline_seconds": 1.0})
    first = run.loop("a").train(rounds=2)
    second = run.loop("b")
    assert second.sync.round == 2
    assert_close(second.params, first.params, rtol=0, atol=0)
    digests = together(lambda: first.train().sync.digest, lambda: second.train().sync.digest)
    assert len(set(digests)) == 1


def test_round_1_waits_for_all_and_says_for_whom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("isthmus.protocol.exchange.FIRST_NOTE_SECONDS", 0.2)
    run = Run(tmp_path, rounds=1, overrides={"bucket.start_seconds": 3.0, "bucket.deadline_seconds": 1.0})
    started = time.monotonic()
    loop = run.loop("a").train()
    assert time.monotonic() - started > 2.0
    assert any("waiting for the update of b, 3 s at most; `isthmus revoke`" in line for line in loop.said)


# Faults


def test_weights_that_are_not_finite_send_a_skip_and_three_in_a_row_are_an_error(tmp_path: Path):
    run = Run(tmp_path, rounds=6)

    def bad() -> int:
        loop = run.loop("a").train(rounds=1)
        for _ in range(3):
            loop.step() if loop.sync.global_step % 3 < 2 else poison(loop)
        assert loop.params["scale"].isfinite()
        loop.train(rounds=3)
        for _ in range(8):
            poison(loop)
        with pytest.raises(RunError, match="not finite, as in the 2 rounds before"):
            poison(loop)
        loop.sync.close()
        return sum("not finite" in line for line in loop.said)

    def poison(loop) -> None:
        with torch.no_grad():
            loop.model.scale.fill_(float("nan"))
        loop.sync.step()

    told, _ = together(bad, lambda: run.loop("b").train())
    assert told == 3
    ledger = isthmus.open_run(run.url).ledger
    assert ledger.manifest(2).skips == {"a": "not_finite"}
    assert main(["ledger", "verify", run.url]) == 0


def test_a_bucket_that_is_not_there_yet_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("isthmus.loop.opening.LOOK_SECONDS", 0.2)
    run = Run(tmp_path, "a", rounds=3)
    away = tmp_path / "elsewhere"
    (tmp_path / "bucket").rename(away)

    def comes_back() -> None:
        time.sleep(1.0)
        away.rename(tmp_path / "bucket")

    loop, _ = together(lambda: run.loop("a"), comes_back)
    assert "there is no folder" in loop.said[0]
    assert loop.train().sync.done


def test_a_store_that_goes_away_is_waited_for(tmp_path: Path, bad_network: tuple[str, Any]):
    url, proxy = bad_network
    run = Run(tmp_path, "a", rounds=3, url=url)
    loop = run.loop("a").train(rounds=1)
    proxy.close_port()

    def comes_back() -> None:
        time.sleep(3.0)
        proxy.open_port()

    together(loop.train, comes_back)
    assert loop.sync.done


def test_what_belongs_to_another_run_touches_no_weight(tmp_path: Path):
    run = Run(tmp_path)
    (tmp_path / "other").mkdir()
    other = Run(tmp_path / "other")
    loop = run.loop("a")
    loop.step()
    saved = loop.saved()
    loop.sync.close()
    strange = torch.nn.Linear(2, 2)
    before = strange.weight.detach().clone()
    with pytest.raises(ConfigError, match="this model is not the run's"):
        OuterSync(strange, key=run.keys["a"])
    assert torch.equal(strange.weight, before)
    with pytest.raises(ConfigError, match="bucket of another run"):
        OuterSync(Odd(), other.url, key=run.keys["a"])
    for name, where, words in (("b", run, "its replica is a, not b"), ("a", other, "its run is")):
        with pytest.raises(ConfigError, match=words):
            where.loop(name, saved=saved)
    model = Odd(seed=3)
    with torch.no_grad():
        model.fixed.copy_(Odd().fixed)
    before = Parameters(model).anchor()
    with pytest.raises(ConfigError, match="restore model and optimizer"):
        OuterSync(model, key=run.keys["a"], state=saved["sync"])
    assert_close(Parameters(model).anchor(), before, rtol=0, atol=0)
    with pytest.raises(ConfigError, match="is not one of OuterSync"):
        OuterSync(Odd(), key=run.keys["a"], state={"a": 1})


def test_the_second_start_with_one_key_is_refused_unless_the_first_was_killed(tmp_path: Path):
    run = Run(tmp_path, "a")
    first = run.loop("a")
    first.train(rounds=1)
    with pytest.raises(ConfigError, match="replica a runs already"):
        run.loop("a")
    first.kill()
    assert run.loop("a").train().sync.done


def test_a_state_may_be_loaded_after_construction(tmp_path: Path):
    run = Run(tmp_path, "a")
    loop = run.loop("a").train(rounds=1)
    loop.step()
    saved = loop.saved()
    loop.sync.close()
    again = run.loop("a")
    again.model.load_state_dict(saved["model"])
    again.sync.load_state_dict(saved["sync"])
    assert again.sync.global_step == 4
    with pytest.raises(ConfigError, match="is closed"):
        loop.sync.step()
    assert again.train().sync.done


def test_closing_goes_on_while_the_closers_loops_are_elsewhere(tmp_path: Path):
    overrides = {"bucket.deadline_seconds": 1.0, "bucket.missed_rounds": 2}
    run = Run(tmp_path, "abc", rounds=5, overrides=overrides)  # a and b close
    loops = together(*(lambda name=name: run.loop(name) for name in "abc"))
    together(*(lambda loop=loop: loop.train(rounds=3) for loop in loops))
    started = time.monotonic()
    together(lambda: loops[2].train(rounds=4))  # a and b evaluate
    assert time.monotonic() - started < 30
    digests = together(*(lambda loop=loop: loop.train().sync.digest for loop in loops))
    assert len(set(digests)) == 1


def test_a_step_between_rounds_takes_less_than_100_microseconds(tmp_path: Path):
    run = Run(tmp_path, "a", inner_steps=100_000, rounds=1)
    loop, loss = run.loop("a"), torch.tensor(1.0)
    best = float("inf")
    for _ in range(20):
        started = time.perf_counter()
        for _ in range(100):
            loop.sync.step(loss, tokens=32)
        best = min(best, (time.perf_counter() - started) / 100)
    loop.sync.close()
    assert best < 100e-6
